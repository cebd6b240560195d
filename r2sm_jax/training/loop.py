"""The training loop: the only one, for every task."""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from r2sm_jax.config import Config
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.processes import AnyProcess, place, run_on_main, shard_batch, to_host
from r2sm_jax.training.run_folder import Checkpoints, Logs, point_latest, write_model
from r2sm_jax.training.step import Loss, init_state, jit_train_step

DEVICE_BATCHES = 2
"""How many batches wait on the devices: while these compute a step, the next one has arrived."""
Batches = Callable[[Any], Iterator[tuple[Any, Any]]]
"""Position -> the batches from there on, each with the position after it, a value that JSON can
hold; None is the position of the first. A process reads its own rows."""
Evaluate = Callable[[nnx.State, int, Path], tuple[float, Mapping[str, Any], Mapping[str, Any]]]
"""(weights, step, run folder) -> the score, of which the highest is the best; figures for the log,
in mappings by name; what belongs to the weights in `config.json`: calibration, threshold."""


class Task(NamedTuple):
    """What is trained."""

    model: nnx.Module
    """With the weights that training starts from. `fit` takes them over."""
    loss: Loss
    batches: Batches
    evaluate: Evaluate


def fit(
    task: Task, folder: Path, config: Config, mesh: Mesh, *, keeps_start: bool = False
) -> float | None:
    """Trains a task in a run folder, from its latest checkpoint if it has one.

    With `keeps_start` the weights before the first step are evaluated, too: they stay the run's
    best where training makes them worse. A run that was killed and resumed is bit for bit one that
    never stopped, on the same machine and devices.

    Returns the seconds that the run was trained, from its start through every `--resume`, or None
    where a signal stopped it. Raises InputError if a loss or its gradient is not finite.
    """
    started = time.monotonic()
    loop = config.train
    # In the model itself, so that no device holds a second copy.
    nnx.update(task.model, place(mesh, nnx.state(task.model)))
    graphdef, params, constants = nnx.split(task.model, nnx.Param, ...)
    optimizer = make_optimizer(config.optimizer, loop.steps, config.model.vision)
    state = init_state(params, optimizer, mesh, averaged=loop.ema > 0)
    train_step = jit_train_step(graphdef, task.loss, optimizer, loop, state)

    checkpoints = Checkpoints(folder)
    best: float | None = None
    position = None
    if restored := checkpoints.restore((state, constants)):
        (state, constants), known = restored
        position, best = known["position"], known["best"]
        started -= known["seconds"]
        print(f"resumed at step {int(state.step)}", flush=True)
    batches = device_batches(task.batches(position), mesh)

    first = int(state.step) + 1
    logs = Logs(folder, loop, start=first - 1)

    def evaluate(step: int, weights: nnx.State) -> tuple[float, Mapping[str, Any]]:
        score, figures, stored = run_on_main(partial(task.evaluate, weights, step, folder))
        logs.record(step, numbers(config.train.select_on, figures))
        return score, stored

    if keeps_start and first == 1:
        weights = to_host(nnx.merge_state(state.weights, constants))
        best, stored = evaluate(0, weights)
        run_on_main(partial(write_model, folder, loop.part, weights, {"step": 0, **stored}))
    with signals_caught() as is_signalled:
        for step in range(first, loop.steps + 1):
            batch, position = next(batches)
            state, losses = train_step(state, constants, batch)
            is_stopped = is_signalled()
            evaluates = step % loop.evaluate_every == 0 or step == loop.steps
            saves = evaluates or is_stopped or step % loop.checkpoint_every == 0
            logs.add(step, losses, wait=saves)
            if evaluates or (is_stopped and best is None):
                weights = to_host(nnx.merge_state(state.weights, constants))
                # At a signal there is no time to evaluate, but what was learned can be used.
                score, stored = None, {}
                if evaluates:
                    score, stored = evaluate(step, weights)
                if best is None or (score is not None and score > best):
                    best = score
                    stored = {"step": step, **stored}
                    run_on_main(partial(write_model, folder, loop.part, weights, stored))
            if saves:
                seconds = time.monotonic() - started
                known = {"position": position, "best": best, "seconds": seconds}
                checkpoints.save(step, (state, constants), known)
                point_latest(folder)
                logs.restart_clock(step)
            if is_stopped:
                break
    checkpoints.close()
    logs.close()
    return time.monotonic() - started if int(state.step) == loop.steps else None


def device_batches(batches: Iterator[tuple[Any, Any]], mesh: Mesh) -> Iterator[tuple[Any, Any]]:
    """Puts batches on the devices before they are needed.

    No thread puts them there: processes that share devices must give them their programs in the
    same order.
    """
    waiting = deque()
    for batch, position in batches:
        waiting.append((shard_batch(mesh, batch), position))
        if len(waiting) == DEVICE_BATCHES:
            yield waiting.popleft()


def numbers(split: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a split that are defined, as "dev/NAME" or "dev/KIND/NAME"."""
    flat = flatten_dict({split: dict(figures)}, sep="/")
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
