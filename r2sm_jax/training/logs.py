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

PRINTED_LOSSES = ("loss", "modal", "amodal", "slots", "type", "dense_category", "dense_hidden")


class Logs:
    """Averages losses over intervals of steps; prints and records the means."""

    def __init__(self, folder: Path, config: Config, *, start: int):
        """Opens the logs in a run folder.

        Args:
            start: the step that training begins after.

        Raises InputError if they cannot be written.
        """
        self._loop = config.train
        self._queries_per_image = config.data.queries
        # Other processes write nothing, so that there is one log.
        path = folder / "metrics.jsonl" if is_main_process() else Path(os.devnull)
        try:
            self._file = path.open("a", encoding="utf-8")
            self._events = SummaryWriter(str(folder), write_to_disk=is_main_process())
        except OSError as error:
            raise InputError(
                f"{folder}: logs cannot be written ({error.strerror}); give another --run"
            ) from None
        # Values stay on the device until they are printed or checked.
        self._interval: list[Values] = []
        self._unchecked: list[tuple[int, Values]] = []
        self._start = start
        # The time and the step from which the speed is measured.
        self._clock = time.monotonic()
        self._clock_step = start

    def add(self, step: int, values: Values, *, wait: bool) -> int | None:
        """Adds the losses of a step.

        Returns the number of the first step whose loss or gradient is not finite, else None. Values
        are read one step late, so that the device never waits for Python; with `wait`, and where a
        line is printed, they are read at once.
        """
        self._interval.append(values)
        self._unchecked.append((step, values))
        is_printed = step % self._loop.log_every == 0 or step == self._loop.steps
        num_unread = 0 if is_printed or wait else 1
        while len(self._unchecked) > num_unread:
            number, unchecked = self._unchecked.pop(0)
            if not math.isfinite(float(unchecked["loss"]) + float(unchecked["gradient_norm"])):
                return number

        if step == self._start + 1:
            # The first step compiles, which is not part of the speed.
            jax.block_until_ready(values)
            self.restart_clock(step)
        if is_printed:
            self._write(step)
        return None

    def restart_clock(self, step: int) -> None:
        """Begins to measure the speed anew, after something that is not part of it."""
        self._clock = time.monotonic()
        self._clock_step = step

    def _write(self, step: int) -> None:
        """Prints and records the means of the interval that ends with a step."""
        means = {}
        for name in self._interval[0]:
            means[name] = sum(float(v[name]) for v in self._interval) / len(self._interval)
        recorded = {f"train/{name}": value for name, value in means.items()}
        losses = "  ".join(f"{name} {means[name]:.3f}" for name in PRINTED_LOSSES if name in means)
        line = f"step {step}/{self._loop.steps}  {losses}"
        # The first step has no speed.
        num_steps = step - self._clock_step
        if num_steps:
            seconds_per_step = (time.monotonic() - self._clock) / num_steps
            recorded["train/seconds_per_step"] = seconds_per_step
            line += f"  {self._describe_speed(seconds_per_step, self._loop.steps - step)}"
        self._interval = []
        self.restart_clock(step)
        print(line, flush=True)
        self._record(step, recorded)

    def _describe_speed(self, seconds_per_step: float, num_steps_left: int) -> str:
        images = self._loop.batch_size / seconds_per_step
        queries = images * self._queries_per_image
        minutes, seconds = divmod(int(seconds_per_step * num_steps_left), 60)
        return f"{images:.1f} images/s  {queries:.0f} queries/s  {minutes}:{seconds:02d} left"

    def evaluation(self, step: int, figures: dict[str, Any]) -> None:
        """Writes the figures of a quick evaluation."""
        all_figures = {
            "giou": figures["all"]["giou"],
            "modal": figures["modal"]["giou"],
            "amodal": figures["amodal"]["giou"],
            "occluded_iou": figures["all"]["occluded_iou"],
            "type_accuracy": figures["mask_type"]["accuracy"],
        }
        defined = {name: value for name, value in all_figures.items() if value is not None}
        line = "  ".join(f"{name} {value:.3f}" for name, value in defined.items())
        print(f"step {step}  dev: {line}", flush=True)
        self._record(step, {f"dev/{name}": value for name, value in defined.items()})

    def _record(self, step: int, values: dict[str, float]) -> None:
        """Appends to metrics.jsonl and to the event file."""
        row = {"step": step, "time": round(time.time(), 3)} | values
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        except OSError as error:
            raise InputError(
                f"{self._file.name}: cannot be written ({error.strerror}); free disk space"
            ) from None

    def close(self) -> None:
        """Writes the rest of both files and closes them."""
        self._file.close()
        self._events.close()
