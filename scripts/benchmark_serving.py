# ruff: noqa: E402
"""What a server may expect: `python scripts/benchmark_serving.py RUN|EXPORT [--images 40]`.

Nothing else should run beside it. Times of single answers are medians, on images of 640 x 480 pixels. A new sentence
has to pass the language model, a known one does not; masks are drawn at the image's own resolution every time.
"""

import time

STARTED = time.perf_counter()

import itertools
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table

import r2sm_jax
from r2sm_jax.cli import parse_flags
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError, cli_main
from r2sm_jax.evaluate import count_compilations
from r2sm_jax.models.matmul import tune_malloc

SIZE = (640, 480)


@dataclass(frozen=True)
class ServingConfig:
    """Measures how fast a run or an export answers."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, export, or OWNER/NAME of one on the Hugging Face hub."""
    images: int = 40
    """Images, and repetitions of every measurement."""


def milliseconds(work: Callable[[int], Any], repeats: int) -> float:
    """Median time of a call."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def pictures(count: int) -> list[np.ndarray]:
    """Scenes, enlarged."""
    source = open_source("scenes", "val", count=count, size=96)
    return [np.asarray(Image.fromarray(source[i].image).resize(SIZE)) for i in range(count)]


def measure(config: ServingConfig) -> Iterator[tuple[str, str]]:
    """Names and figures, as they come."""
    if config.images < 8:
        raise InputError(f"--images {config.images}: fewer than 8 tell nothing; give 8 or more")
    predictor = r2sm_jax.load(config.run)
    yield "load, with imports", f"{time.perf_counter() - STARTED:.1f} s"
    images = pictures(config.images)
    start = time.perf_counter()
    predictor.set_image(images[0])
    predictor.predict(["the red mug"])
    first = time.perf_counter() - start
    yield "first answer, which compiles", f"{first:.2f} s"
    start = time.perf_counter()
    predictor.warm_up()
    for count in (1, 8):
        predictor.predict_batch(images[:8], [["the red mug"] * count] * 8)
    yield "compiling the rest", f"{time.perf_counter() - start:.1f} s"
    compiled = count_compilations()

    numbers = itertools.count()

    def ask(count: int, new: bool) -> Callable[[int], Any]:
        return lambda i: predictor.predict(
            [f"the red mug {next(numbers) if new else n}" for n in range(count)]
        )

    def look_and_ask(i: int) -> None:
        predictor.set_image(images[i])
        ask(1, True)(i)

    repeats = config.images
    whole = milliseconds(look_and_ask, repeats)
    look = milliseconds(lambda i: np.asarray(predictor.encode(images[i]).tokens), repeats)
    new, known = (milliseconds(ask(1, anew), repeats) for anew in (True, False))
    yield "a new image and a new sentence", f"{whole:.1f} ms"
    yield "  the image alone", f"{look:.1f} ms"
    yield "  a new sentence on it", f"{new:.1f} ms"
    yield "  a known sentence on it", f"{known:.1f} ms"
    yield "second query faster than the very first", f"{1000 * first / new:.0f} times"
    yield (
        "second query faster than a new image and sentence",
        f"{whole / new:.1f} times, {whole / known:.1f} if known",
    )
    for count in (1, 8):
        took, again = (milliseconds(ask(count, anew), repeats) for anew in (True, False))
        figures = f"{1000 * count / took:.0f} new, {1000 * count / again:.0f} known"
        yield f"queries a second on one image, {count} at once", figures
    start = time.perf_counter()
    predictor.predict_batch(images, [[f"the blue book {i}"] for i in range(len(images))])
    yield (
        "images a second, one new query each",
        f"{len(images) / (time.perf_counter() - start):.1f}",
    )
    start = time.perf_counter()
    predictor.predict_batch(
        images, [[f"the blue book {i} {n}" for n in range(8)] for i in range(len(images))]
    )
    yield (
        "images a second, eight new queries each",
        f"{len(images) / (time.perf_counter() - start):.1f}",
    )
    yield "compiled since it was warm", compiled()
    yield "peak memory", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def main() -> None:
    tune_malloc()
    config = parse_flags(ServingConfig, sys.argv[1:], prog="python scripts/benchmark_serving.py")
    table = Table("what", "figure", title=Path(config.run).name, title_justify="left")
    for row in measure(config):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    cli_main(main)
