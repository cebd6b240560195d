"""Checkpoints of a run: saved in the background, whole or not at all, verified when they are read.

Each holds the parameters, the optimizer state, the step, the model's constants, and the position in the data; the
latest two are kept, and the best by dev gIoU. Arrays are stored by path, so files are free of library classes, with a
digest that tells a damaged file.
"""

import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from r2sm_jax.errors import InputError
from r2sm_jax.training.step import TrainState

Arrays = dict[str, Any]
policies = ocp.training.preservation_policies


def flatten(tree: Any) -> Arrays:
    """A pytree as {path: array}."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(like: Any, arrays: Arrays) -> Any:
    """The inverse of `flatten` for a tree of the same structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree_util.tree_unflatten(structure, [arrays[jax.tree_util.keystr(path)] for path, _ in paths])


def digest(arrays: Arrays) -> str:
    """Hash of names and bytes."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        total.update(name.encode())
        total.update(np.ascontiguousarray(np.asarray(arrays[name])).tobytes())
    return total.hexdigest()


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, run: Path):
        self.folder = run / "checkpoints"
        logging.getLogger("absl").setLevel(logging.ERROR)
        keep = policies.AnyPreservationPolicy(
            [
                policies.LatestN(2),
                policies.BestN(get_metric_fn=lambda m: m["giou"], n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        options: Any = {"directory": self.folder.absolute(), "preservation_policy": keep}
        self._orbax = ocp.training.Checkpointer(**options)

    @property
    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending."""
        return sorted(int(c.step) for c in self._orbax.checkpoints)

    @property
    def best(self) -> int | None:
        """The step of the highest dev gIoU; None where no checkpoint was evaluated."""
        every: list[Any] = list(self._orbax.checkpoints)
        scored = [(c.metrics["giou"], c.step) for c in every if c.metrics]
        return max(scored)[1] if scored else None

    def save(self, state: TrainState, constants: nnx.State, batches: grain.DatasetIterator, giou: float | None) -> None:
        """Starts saving; an earlier save is waited for first.

        Raises:
            InputError: the disk is full or not writable. Earlier checkpoints stay as they were.
        """
        arrays = flatten({"state": state, "constants": constants})
        arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
        step = int(state.step)
        metrics: Any = None if giou is None else {"giou": giou}
        if step in self.steps:
            return
        self._guard(
            lambda: self._orbax.save_checkpointables_async(
                step,
                {"arrays": arrays, "data": batches},
                metrics=metrics,
                custom_metadata={"digest": digest(arrays)},
                force=True,
            )
        )

    def close(self) -> None:
        """Waits for the last save."""
        self._guard(self._orbax.close)

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # orbax wraps the operating system's errors in many ways
            reason = str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__
            kept = f"checkpoints up to step {self.steps[-1]} are kept" if self.steps else "nothing was saved before"
            raise InputError(
                f"{self.folder}: a checkpoint could not be saved ({reason}); free disk space or permit writing, then "
                f"--resume ({kept})"
            ) from error

    def restore(
        self,
        state: TrainState,
        constants: nnx.State,
        batches: grain.DatasetIterator | None = None,
        *,
        step: int | None = None,
    ) -> tuple[TrainState, nnx.State]:
        """The newest good checkpoint, or the one at `step`; damaged ones are reported and passed over.

        `state` and `constants` give structure and shapes; `batches` is moved to the saved position.

        Raises:
            InputError: there is no readable checkpoint.
        """
        wanted = flatten({"state": state, "constants": constants})
        candidates = [s for s in reversed(self.steps) if s != step]
        if step is not None:
            candidates.insert(0, step)
        for number in candidates:
            try:
                arrays = self._load(number, wanted, batches)
            except Exception as error:  # damaged files fail in orbax, tensorstore, json or grain
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
                problem = f"checkpoint {number} is damaged or does not fit ({reason}); trying an earlier one"
                print(problem, file=sys.stderr, flush=True)
                continue
            tree = unflatten({"state": state, "constants": constants}, arrays)
            return tree["state"], tree["constants"]
        raise InputError(f"{self.folder}: no usable checkpoint; give a run folder that was trained")

    def _load(self, step: int, wanted: Arrays, batches: grain.DatasetIterator | None) -> Arrays:
        like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
        arrays = self._orbax.load_checkpointables(step, {"arrays": like})["arrays"]
        metadata: Any = self._orbax.checkpointables_metadata(step).custom_metadata or {}
        if digest(arrays) != metadata.get("digest"):
            raise ValueError("its digest does not match its arrays")
        if batches is not None:
            self._orbax.load_checkpointables(step, {"data": batches})
        return arrays
