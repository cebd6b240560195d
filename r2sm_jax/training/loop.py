"""The training loop: the only one, for every task."""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flax import nnx
from flax.traverse_util import flatten_dict

from r2sm_jax.cli import trim_memory
from r2sm_jax.config import LoopConfig
from r2sm_jax.training.processes import AnyProcess, is_main_process, run_on_main, to_host
from r2sm_jax.training.run_folder import RUNS, Checkpoints, Logs, point_latest, write_model
from r2sm_jax.training.step import TrainState, Values, without_compiler_alarm


@runtime_checkable
class Batches(Protocol):
    """An endless iterator of batches that continues exactly from a state, which JSON takes."""

    def __next__(self) -> Any: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class Evaluation(NamedTuple):
    """What is known of the weights of a step."""

    score: float
    """The weights with the highest one are the best."""
    figures: Mapping[str, Any]
    """Numbers for the log, in mappings by name."""
    stored: Mapping[str, Any]
    """What belongs to the weights in `config.json`: calibration, threshold."""


Evaluate = Callable[[nnx.State, int, Path], Evaluation]
"""(weights, step, run folder) -> how good they are. It also prints, and saves pictures."""


@runtime_checkable
class Task(Protocol):
    """What is trained: `segmenter`, `completer` or `outliner` is its `part`."""

    part: str
    constants: nnx.State
    """Weights that training leaves as they are."""
    evaluate: Evaluate

    def start(self) -> tuple[TrainState, Batches]: ...
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Values]: ...


class Fitted(NamedTuple):
    """How training ended."""

    is_complete: bool
    """False where a signal stopped it."""
    seconds: float
    """Over all processes that trained the run one after the other."""


def fit(task: Task, folder: Path, config: LoopConfig) -> Fitted:
    """Trains a task in a run folder, from its latest checkpoint if it has one.

    A run that was killed and resumed is bit for bit one that never stopped, on the same machine and
    devices. Raises InputError if a loss is not finite, or nothing can be written.
    """
    started = time.monotonic()
    checkpoints = Checkpoints(folder)
    state, batches = task.start()
    known: dict[str, Any] = {"best": None, "seconds": 0.0}
    if restored := checkpoints.restore((state, task.constants)):
        (state, task.constants), known = restored
        batches.set_state(known["position"])
        print(f"resumed at step {int(state.step)}", flush=True)
    best = known["best"]

    first = int(state.step) + 1
    logs, stop = Logs(folder, config, start=first - 1), StopOnSignal()
    try:
        for step in range(first, config.steps + 1):
            with without_compiler_alarm() if step == first else nullcontext():
                state, values = task.step(state, next(batches))
            is_stopped = stop.requested()
            evaluates = step % config.evaluate_every == 0 or step == config.steps
            saves = evaluates or is_stopped or step % config.checkpoint_every == 0
            logs.add(step, values, wait=saves)
            if step == first:
                trim_memory()
            if evaluates:
                weights = to_host(nnx.merge_state(state.weights, task.constants))
                evaluation = run_on_main(partial(task.evaluate, weights, step, folder))
                logs.record(step, numbers(evaluation.figures))
                if best is None or evaluation.score > best:
                    best = evaluation.score
                    stored = {"step": step, **evaluation.stored}
                    run_on_main(partial(write_model, folder, task.part, weights, stored))
            elif is_stopped and best is None:
                # There is no time to evaluate, but what was learned can be used.
                weights = to_host(nnx.merge_state(state.weights, task.constants))
                run_on_main(partial(write_model, folder, task.part, weights, {"step": step}))
            if saves:
                seconds = known["seconds"] + time.monotonic() - started
                position = batches.get_state()
                learned = state, task.constants
                checkpoints.save(
                    step, learned, {"position": position, "best": best, "seconds": seconds}
                )
                if is_main_process() and folder.parent == RUNS:
                    point_latest(folder)
                logs.restart_clock(step)
            if is_stopped:
                break
    finally:
        stop.restore_handlers()
    checkpoints.close()
    logs.close()
    seconds = known["seconds"] + time.monotonic() - started
    return Fitted(int(state.step) == config.steps, seconds)


def numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures that are defined, as "dev/NAME" or "dev/KIND/NAME"."""
    flat = flatten_dict({"dev": dict(figures)}, sep="/")
    return {str(name): value for name, value in flat.items() if value is not None}


class StopOnSignal:
    """Lets the loop save and end after the current step on Ctrl-C or SIGTERM. A second signal
    interrupts."""

    def __init__(self) -> None:
        self._received = False
        self._any_process = AnyProcess()
        self._handlers = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _handle(self, number: int, frame: Any) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = True
        print(f"{signal.Signals(number).name}: saving after this step", flush=True)

    def requested(self) -> bool:
        """Whether a process received a signal; of several processes at the step before, so that no
        device waits."""
        return self._any_process(self._received)

    def restore_handlers(self) -> None:
        """Brings back the signal handlers that were there before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
