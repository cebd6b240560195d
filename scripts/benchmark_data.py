"""How fast training data comes, and where the time goes: `python scripts/benchmark_data.py [--data SPEC]`.

Without `--data` it writes 640 x 480 JPEGs of scenes with 7 instances and 8 queries each, as a TFDS data set in a
temporary folder, and reads that. Nothing else should run beside it. Token states are blank: looking them up is timed,
computing them is not.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from r2sm_jax.cli import parse_flags
from r2sm_jax.data.batches import Assemble, PreparedSource, random_crop, training_batches
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.sources import load_json_split, open_source
from r2sm_jax.data.tfds import write_tfds
from r2sm_jax.errors import cli_main
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.scenes.source import draw_scene
from r2sm_jax.tools.convert import Conversion, write_json

HEIGHT, WIDTH, INSTANCES, TOKENS = 480, 640, 7, 32


@dataclass(frozen=True)
class Options:
    """What is read, and what is made of it."""

    data: str | None = None
    """json:FILE, tfds:DIR, compose:FILE, cutouts:DIR or scenes; default: a data set made for the purpose."""
    split: str = "train"
    count: int = 96
    """Images that are read."""
    image_size: int = 512
    batch_size: int = 16
    crop: float = 1.0
    colour_jitter: float = 0.0


def make_photos(folder: Path, count: int) -> str:
    """A TFDS data set of `count` JPEGs in `folder`; gives its SPEC."""
    (folder / "images").mkdir()
    made, number = Conversion(), 0
    while len(made.images) < count:
        scene = draw_scene(0, number, WIDTH)
        number += 1
        if len(scene.instances) < INSTANCES:
            continue
        rows = slice((WIDTH - HEIGHT) // 2, (WIDTH + HEIGHT) // 2)
        queries = write_queries(scene.facts, rng=np.random.default_rng(number), count=8)
        name = f"{number:06d}.jpg"
        Image.fromarray(scene.image[rows]).save(folder / "images" / name, quality=92)
        made.images[number] = {"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH}
        ids = {
            i.id: made.add_annotation(number, i.category, i.modal[rows], i.complete[rows])
            for i in scene.instances[:INSTANCES]
            if i.modal[rows].any()
        }
        for query in queries:
            if ids.keys() >= set(query.instance_ids):
                made.add_query(
                    number, query.text, query.mask_type, [ids[i] for i in query.instance_ids]
                )
    write_json(folder / "data.json", made.records("scenes"))
    write_tfds({"train": load_json_split(folder / "data.json", "all")}, folder / "tfds")
    return f"tfds:{folder / 'tfds'}"


def blank_states(texts: list[str], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """As many bytes as the default language model's states take."""
    states = np.zeros((len(texts), tokens, 3, 384), np.float16)
    states[:, : tokens // 2] = 1
    return states, np.ones((len(texts), tokens), bool)


def milliseconds(work: Callable[[int], Any], count: int) -> float:
    """Mean time of `work(index)` over the indices."""
    start = time.perf_counter()
    for index in range(count):
        work(index)
    return 1000 * (time.perf_counter() - start) / count


def measure(source: Source, options: Options) -> Table:
    """Time of each stage on one core, then the rate of whole batches on all."""
    count = min(options.count, len(source))
    # Masks are supervised at a quarter of the image's resolution, or half of it where that is small.
    cells = options.image_size // (4 if options.image_size > 256 else 2)
    prepared = PreparedSource(source, options.image_size, cells, crop=options.crop)
    assemble = Assemble(
        blank_states,
        tokens=TOKENS,
        queries=8,
        instances=8,
        slots=4,
        mirror=True,
        colour_jitter=options.colour_jitter,
    )
    rng = np.random.default_rng(0)
    samples = [source[index] for index in range(count)]
    examples = [prepared[index] for index in range(count)]
    table = Table(
        "stage", "ms an image, one core", title=f"{count} images, {options.image_size} px"
    )
    table.add_row("decode image and masks", f"{milliseconds(source.__getitem__, count):.1f}")
    table.add_row(
        "letterbox and pool",
        f"{milliseconds(lambda i: prepared.prepare(random_crop(samples[i], options.crop, rng)), count):.1f}",
    )
    table.add_row("assemble", f"{milliseconds(lambda i: assemble(i, examples[i], rng), count):.1f}")
    batches = training_batches(prepared, assemble, batch_size=options.batch_size, seed=0)
    next(batches)
    rounds = max(4, 2 * count // options.batch_size)
    start = time.perf_counter()
    for _ in range(rounds):
        next(batches)
    rate = rounds * options.batch_size / (time.perf_counter() - start)
    table.add_section()
    table.add_row("whole batches, all cores", f"{rate:.0f} images/s")
    return table


def main() -> None:
    options = parse_flags(Options, sys.argv[1:], prog="python scripts/benchmark_data.py")
    with tempfile.TemporaryDirectory() as folder:
        spec = options.data or make_photos(Path(folder), options.count)
        source = open_source(spec, options.split, count=options.count, size=options.image_size)
        Console().print(measure(source, options))


if __name__ == "__main__":
    cli_main(main)
