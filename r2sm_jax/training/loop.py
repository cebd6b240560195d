"""The training loop: the only one, for every task."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flax import nnx
from flax.traverse_util import flatten_dict

from r2sm_jax.config import LoopConfig
from r2sm_jax.training.processes import AnyProcess, run_on_main, to_host
from r2sm_jax.training.run_folder import Checkpoints, Logs, point_latest, write_model
from r2sm_jax.training.step import TrainState, Values


@runtime_checkable
class Batches(Protocol):
    """An endless iterator of batches that continues exactly from a state, which JSON takes."""

    def __next__(self) -> Any: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


Evaluate = Callable[[nnx.State, int, Path], tuple[float, Mapping[str, Any], Mapping[str, Any]]]
"""(weights, step, run folder) -> the score, of which the highest is the best; figures for the log,
in mappings by name; what belongs to the weights in `config.json`: calibration, threshold."""


@runtime_checkable
class Task(Protocol):
    """What is trained: `segmenter`, `completer` or `outliner` is its `part`."""

    part: str
    constants: nnx.State
    """Weights that training leaves as they are."""
    evaluate: Evaluate

    def set_weights(self, weights: nnx.State) -> None: ...
    def load_pretrained(self) -> None: ...
    def start(self) -> tuple[TrainState, Batches]: ...
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Values]: ...


def fit(task: Task, folder: Path, config: LoopConfig, *, keeps_start: bool = False) -> float | None:
    """Trains a task in a run folder, from its latest checkpoint if it has one.

    With `keeps_start` the weights before the first step are evaluated, too: they stay the run's
    best where training makes them worse. A run that was killed and resumed is bit for bit one that
    never stopped, on the same machine and devices.

    Returns the seconds over all processes that trained the run one after the other; None where a
    signal stopped it. Raises InputError if a loss is not finite.
    """
    started = time.monotonic()
    checkpoints = Checkpoints(folder)
    state, batches = task.start()
    best: float | None = None
    if restored := checkpoints.restore((state, task.constants)):
        (state, task.constants), known = restored
        batches.set_state(known["position"])
        best = known["best"]
        started -= known["seconds"]
        print(f"resumed at step {int(state.step)}", flush=True)

    first = int(state.step) + 1
    logs = Logs(folder, config, start=first - 1)

    def evaluate(step: int, weights: nnx.State) -> tuple[float, Mapping[str, Any]]:
        score, figures, stored = run_on_main(partial(task.evaluate, weights, step, folder))
        logs.record(step, numbers(figures))
        return score, stored

    if keeps_start and first == 1:
        weights = to_host(nnx.merge_state(state.weights, task.constants))
        best, stored = evaluate(0, weights)
        run_on_main(partial(write_model, folder, task.part, weights, {"step": 0, **stored}))
    with signals_caught() as is_signalled:
        for step in range(first, config.steps + 1):
            state, values = task.step(state, next(batches))
            is_stopped = is_signalled()
            evaluates = step % config.evaluate_every == 0 or step == config.steps
            saves = evaluates or is_stopped or step % config.checkpoint_every == 0
            logs.add(step, values, wait=saves)
            if evaluates or (is_stopped and best is None):
                weights = to_host(nnx.merge_state(state.weights, task.constants))
                # At a signal there is no time to evaluate, but what was learned can be used.
                score, stored = None, {}
                if evaluates:
                    score, stored = evaluate(step, weights)
                if best is None or (score is not None and score > best):
                    best = score
                    stored = {"step": step, **stored}
                    run_on_main(partial(write_model, folder, task.part, weights, stored))
            if saves:
                seconds = time.monotonic() - started
                position = batches.get_state()
                known = {"position": position, "best": best, "seconds": seconds}
                checkpoints.save(step, (state, task.constants), known)
                point_latest(folder)
                logs.restart_clock(step)
            if is_stopped:
                break
    checkpoints.close()
    logs.close()
    return time.monotonic() - started if int(state.step) == config.steps else None


def numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures that are defined, as "dev/NAME" or "dev/KIND/NAME"."""
    flat = flatten_dict({"dev": dict(figures)}, sep="/")
    return {str(name): value for name, value in flat.items() if value is not None}


@contextmanager
def signals_caught() -> Iterator[Callable[[], bool]]:
    """Lets the loop save and end after the current step on Ctrl-C or SIGTERM.

    Gives a function that says whether a process received one; of several processes at the step
    before, so that no device waits. A second signal interrupts.
    """
    is_received = False
    any_process = AnyProcess()

    def handle(number: int, frame: Any) -> None:
        nonlocal is_received
        if is_received:
            raise KeyboardInterrupt
        is_received = True
        print(f"{signal.Signals(number).name}: saving after this step", flush=True)

    handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: any_process(is_received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
