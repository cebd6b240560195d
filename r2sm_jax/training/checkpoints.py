"""Checkpoints of a run: saved as a whole or not at all, and verified when they are read.

A checkpoint holds the parameters, their running average if there is one, the optimizer state, the
step, the model's constants and its calibration. The latest two are kept, and the one with the
highest gIoU. Arrays are stored by path, without library classes. A digest tells whether a file is
damaged.
"""

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from r2sm_jax.errors import InputError
from r2sm_jax.models.r2sm import NOT_CALIBRATED, Calibration
from r2sm_jax.training.sharding import is_sharded_across_processes, run_on_main, to_host
from r2sm_jax.training.step import TrainState

Arrays = dict[str, Any]
policies = ocp.training.preservation_policies


def flatten(tree: Any) -> Arrays:
    """Returns the arrays of a pytree by path, such as `['state'].params['decoder']`."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def digest(arrays: Arrays) -> str:
    """Returns a hash of the names and bytes of arrays, which tells whether a file was changed."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        total.update(name.encode())
        total.update(np.ascontiguousarray(to_host(arrays[name])).tobytes())
    return total.hexdigest()


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    state: TrainState
    constants: nnx.State
    calibration: Calibration


class Checkpoints:
    """Saves and restores checkpoints in the folder `checkpoints/` of a run."""

    def __init__(self, run: Path):
        self.folder = run / "checkpoints"
        # orbax logs the traceback of each thread that fails; `_guard` says it in one sentence.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        _silence_late_callbacks()
        self._check_scores()
        # Checkpoints between evaluations have no gIoU, and are kept only as the latest.
        best = policies.BestN(
            get_metric_fn=lambda m: m["giou"], n=1, keep_checkpoints_without_metrics=False
        )
        keep = policies.AnyPreservationPolicy([policies.LatestN(2), best])
        options: Any = {"directory": self.folder.absolute(), "preservation_policy": keep}
        self._orbax = ocp.training.Checkpointer(**options)

    def _check_scores(self) -> None:
        """Raises InputError if the file with the gIoU of a checkpoint cannot be read."""
        # orbax reads all of them at once, and would fail without the name of the file.
        for file in sorted(self.folder.glob("*/metrics/metrics")):
            try:
                json.loads(file.read_bytes())
            except (OSError, ValueError) as error:
                raise InputError(
                    f"{file}: the score of this checkpoint cannot be read ({error}); remove the "
                    "file, and the checkpoint counts as not evaluated"
                ) from error

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return sorted(int(c.step) for c in self._orbax.checkpoints)

    @property
    def best(self) -> int | None:
        """The step with the highest gIoU; None if no checkpoint was evaluated."""
        every: list[Any] = list(self._orbax.checkpoints)
        scored = [(c.metrics["giou"], c.step) for c in every if c.metrics]
        return max(scored)[1] if scored else None

    def save(
        self,
        state: TrainState,
        constants: nnx.State,
        giou: float | None,
        calibration: Calibration = NOT_CALIBRATED,
    ) -> None:
        """Saves a checkpoint and waits until it is on disk.

        A checkpoint of the same step is replaced: it is there where a run was resumed from an
        earlier one. In one process, each step is saved at most once.

        Args:
            giou: figure of the evaluation at this step; None without one.
            calibration: fitted to these parameters.

        Raises InputError if the disk is full or cannot be written.
        """
        arrays = flatten({"state": state, "constants": constants})
        metadata = {
            "digest": digest(arrays),
            "calibration": calibration._asdict(),
        }
        # Arrays in parts are written where they lie. Of the others every process has a copy, and
        # orbax lets the first one write it.
        for name, leaf in arrays.items():
            if not is_sharded_across_processes(leaf):
                arrays[name] = np.asarray(leaf)
        num_bytes = sum(leaf.nbytes for leaf in arrays.values())
        run_on_main(lambda: self._check_room(num_bytes))

        def save() -> None:
            self._orbax.save_checkpointables(
                int(state.step),
                {"arrays": arrays},
                metrics=None if giou is None else {"giou": giou},
                custom_metadata=metadata,
                force=True,
                overwrite=True,
            )

        self._guard(save)

    def _check_room(self, num_bytes: int) -> None:
        """Raises InputError if the disk has no room for a checkpoint."""
        # Before anything is written: orbax's threads print tracebacks when they fail to write.
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise InputError(
                f"{self.folder}: a checkpoint could not be saved (it takes {num_bytes / 1e6:,.1f} "
                f"MB and the disk has {free / 1e6:,.1f} MB left); free disk space, then "
                f"{self._how_to_go_on()}"
            )

    def _how_to_go_on(self) -> str:
        if not self.steps:
            return "start again (nothing was saved before)"
        return f"--resume (checkpoints up to step {self.steps[-1]} are kept)"

    def close(self) -> None:
        """Ends orbax's threads."""
        self._guard(self._orbax.close)

    def _guard(self, action: Callable[[], Any]) -> None:
        """Calls a function of orbax; its errors become one InputError."""
        try:
            action()
        except Exception as error:  # orbax wraps the operating system's errors in many ways
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
            raise InputError(
                f"{self.folder}: a checkpoint could not be saved ({reason}); free disk space or "
                f"permit writing, then {self._how_to_go_on()}"
            ) from error

    def restore(
        self,
        state: TrainState,
        constants: nnx.State,
        *,
        step: int | None = None,
        only: bool = False,
    ) -> Checkpoint:
        """Restores the checkpoint of a step, or the newest one that is not damaged.

        A damaged one is named on stderr, and the next older one is tried.

        Args:
            state: gives structure and shapes, as `constants` does.
            step: is tried first; None: the newest.
            only: do not try another one than that of `step`.

        Raises InputError if none can be read.
        """
        for number in sorted(self.steps, key=lambda s: (s == step, s), reverse=True):
            try:
                return self._read(number, state, constants)
            except Exception as error:  # damaged files fail in orbax, tensorstore or json
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
                if "incompatible handler" in reason:  # orbax's words for files that it cannot parse
                    reason = "its files are cut short or missing"
                problem = f"checkpoint {number} is damaged or does not fit ({reason})"
                if only:
                    others = f"the steps that are there are {', '.join(map(str, self.steps))}"
                    raise InputError(
                        f"{self.folder}: {problem}; give another one, {others}"
                    ) from None
                print(f"{problem}; trying another one", file=sys.stderr, flush=True)
        raise InputError(f"{self.folder}: no usable checkpoint; give a run folder that was trained")

    def _read(self, step: int, state: TrainState, constants: nnx.State) -> Checkpoint:
        """Reads the checkpoint of a step. Raises ValueError if it was changed or is not whole."""
        tree = {"state": state, "constants": constants}
        shapes = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in flatten(tree).items()}
        arrays = self._orbax.load_checkpointables(step, {"arrays": shapes})["arrays"]
        metadata: Any = self._orbax.checkpointables_metadata(step).custom_metadata
        if not metadata:
            raise ValueError("its metadata is cut short or missing")
        if digest(arrays) != metadata["digest"]:
            raise ValueError("its digest does not match its arrays")

        # `shapes` has the order in which the tree is flattened.
        leaves = [arrays[name] for name in shapes]
        restored = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        return Checkpoint(
            restored["state"],
            restored["constants"],
            Calibration(**metadata["calibration"]),
        )


def _silence_late_callbacks() -> None:
    """Drops the tracebacks that orbax's threads print after a save has failed.

    Each comes when the event loop of the save is closed already, after the one sentence that says
    what failed.
    """
    previous = sys.unraisablehook
    if getattr(previous, "drops_late_callbacks", False):
        return

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    vars(hook)["drops_late_callbacks"] = True
    sys.unraisablehook = hook


def save_not_finite(
    run: Path,
    state: TrainState,
    constants: nnx.State,
    *,
    step: int,
    images: Any,
) -> NoReturn:
    """Saves a state that is not finite, and raises InputError with the step and its images.

    It is saved in a folder of its own, since the run continues from the newest checkpoint.
    """
    checkpoints = Checkpoints(run / "not_finite")
    checkpoints.save(state, constants, None)
    checkpoints.close()
    raise InputError(
        f"step {step}: the loss is not finite on the training images "
        f"{', '.join(map(str, images))}; the state is saved in {run / 'not_finite'}; lower "
        "--optimizer.learning-rate and --optimizer.muon-learning-rate or look at these images, "
        "then --resume from the checkpoint before"
    )
