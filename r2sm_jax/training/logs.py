"""Logs of a run: a printed line for each interval of steps, `metrics.jsonl`, and TensorBoard's
event files."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.training.sharding import is_main_process
from r2sm_jax.training.step import Values

SHOWN = ("loss", "modal", "amodal", "slots", "type", "dense_category", "dense_hidden")


class Logs:
    """Averages the losses of an interval and writes them to all three, in the first process."""

    def __init__(self, folder: Path, config: Config, *, start: int):
        self._loop, self._queries = config.train, config.data.queries
        try:
            self._file = (folder / "metrics.jsonl" if is_main_process() else Path(os.devnull)).open(
                "a", encoding="utf-8"
            )
            self._events = SummaryWriter(str(folder), write_to_disk=is_main_process())
        except OSError as error:
            raise InputError(
                f"{folder}: logs cannot be written ({error.strerror}); give another --run"
            ) from None
        self._interval: list[Values] = []
        self._unchecked: list[tuple[int, Values]] = []
        self._start = start
        self._clock = time.monotonic(), start  # of the step from which the speed is measured

    def add(self, step: int, values: Values, *, settle: bool) -> int | None:
        """Adds the losses of a step. Returns the number of this step, or of the one before, if its
        loss or gradient is not finite. They are read one step late, so that the device never waits,
        or at once with `settle`."""
        self._interval.append(values)
        self._unchecked.append((step, values))
        write = step % self._loop.log_every == 0 or step == self._loop.steps
        while len(self._unchecked) > (0 if write or settle else 1):
            number, known = self._unchecked.pop(0)
            if not math.isfinite(float(known["loss"]) + float(known["gradient_norm"])):
                return number
        if step == self._start + 1:  # compilation is not part of the speed
            jax.block_until_ready(values)
            self._clock = time.monotonic(), step
        if write:
            self._write(step)
        return None

    def _write(self, step: int) -> None:
        means = {
            k: sum(float(v[k]) for v in self._interval) / len(self._interval)
            for k in self._interval[0]
        }
        seconds = (time.monotonic() - self._clock[0]) / max(1, step - self._clock[1])
        self._interval, self._clock = [], (time.monotonic(), step)
        losses = "  ".join(f"{k} {means[k]:.3f}" for k in SHOWN if k in means)
        images, steps = self._loop.batch_size / seconds, self._loop.steps
        minutes, left = divmod(int(seconds * (steps - step)), 60)
        queries = images * self._queries
        speed = f"{images:.1f} images/s  {queries:.0f} queries/s  {minutes}:{left:02d} left"
        print(f"step {step}/{steps}  {losses}  {speed}", flush=True)
        self._record(
            step, {f"train/{k}": v for k, v in means.items()} | {"train/seconds_per_step": seconds}
        )

    def evaluation(self, step: int, figures: dict[str, Any]) -> None:
        """Writes the figures of a quick evaluation."""
        shown = {
            "giou": figures["all"]["giou"],
            "modal": figures["modal"]["giou"],
            "amodal": figures["amodal"]["giou"],
            "occluded_iou": figures["all"]["occluded_iou"],
            "type_accuracy": figures["mask_type"]["accuracy"],
        }
        known = {k: v for k, v in shown.items() if v is not None}
        print(
            f"step {step}  dev: " + "  ".join(f"{k} {v:.3f}" for k, v in known.items()), flush=True
        )
        self._record(step, {f"dev/{k}": v for k, v in known.items()})
        self._clock = time.monotonic(), step

    def _record(self, step: int, values: dict[str, float]) -> None:
        try:
            self._file.write(
                json.dumps({"step": step, "time": round(time.time(), 3)} | values) + "\n"
            )
            self._file.flush()
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            raise InputError(
                f"{self._file.name}: cannot be written ({error.strerror}); free disk space"
            ) from None

    def close(self) -> None:
        """Flushes everything."""
        self._file.close()
        self._events.close()
