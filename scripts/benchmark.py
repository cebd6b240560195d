"""Speed of every stage on this machine: `python scripts/benchmark.py [CONFIG.py] [--flags]`, as for training.

Run nothing else at the same time. Scenes and queries are made on one core; the rest uses all devices that JAX finds.
The training step is that of `train.py`, with its batches, products and parts. Figures are medians.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from r2sm_jax.cli import parse_config
from r2sm_jax.config import Config
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import cli_main
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import resolve
from r2sm_jax.models.matmul import trim_memory, tune_malloc
from r2sm_jax.models.pretrained import read_encoder_sizes
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.scenes.source import draw_scene
from r2sm_jax.train import prepare_data
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.step import init_state, jit_train_step, split_model

SCENES = 64


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median time of a call whose result is waited for, after one that compiles."""
    jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return median(times)


def measure(config: Config) -> Iterator[tuple[str, str]]:
    """Names and figures, as they come."""
    config = resolve(config)
    size = config.model.vision.image_size
    took = seconds(lambda: [draw_scene(0, i, size) for i in range(SCENES)], 3)
    yield "scenes drawn a second and core", f"{SCENES / took:.0f}"
    drawn = [draw_scene(0, i, size).facts for i in range(SCENES)]
    took = seconds(
        lambda: [
            write_queries(t, rng=np.random.default_rng(i), count=8) for i, t in enumerate(drawn)
        ],
        3,
    )
    yield "queries written a second and core", f"{8 * SCENES / took:,.0f}"

    config = replace(config, data=replace(config.data, source="scenes", scenes=SCENES))
    data = prepare_data(config, lambda message: None)
    source, texts = open_source("scenes", "train", count=SCENES, size=size), data.texts
    sentences = [query.text for i in range(SCENES) for query in source.queries_at(i)]
    numbers = count()

    def encode_anew() -> None:
        number = next(numbers)
        texts.encode(
            (f"{sentence} {number}" for sentence in sentences), kind=config.train.matmul_precision
        )

    yield "sentences encoded a second", f"{len(sentences) / seconds(encode_anew, 3):.0f}"

    graphdef, params, constants = split_model(config.model, read_encoder_sizes(config.model), 0)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    state = init_state(params, optimizer)
    batch, names = jax.device_put((next(data.batches), data.names))
    train_step = jit_train_step(graphdef, optimizer, config)
    predictor = Predictor(
        config.model, graphdef, nnx.merge_state(jax.tree.map(np.array, params), constants), texts
    )

    def step() -> Any:
        nonlocal state
        state, logs = train_step(state, constants, batch, names)
        return logs

    jax.block_until_ready(step())
    trim_memory()
    shape = f"{config.train.batch_size} images x {config.data.queries} queries"
    yield f"training step, {shape}", f"{1000 * seconds(step, 20):.0f} ms"

    image = source[0].image

    def answer() -> None:
        predictor.set_image(image)
        predictor.predict(sentences[:1])

    yield "one image and one known query", f"{1000 * seconds(answer, 20):.0f} ms"


def main() -> None:
    tune_malloc()
    table = Table("what", "figure")
    for row in measure(parse_config(sys.argv[1:])):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    cli_main(main)
