"""Speed on this machine: `python scripts/benchmark.py NAME`.

    training    [CONFIG.py] [--flags]   drawing scenes, encoding sentences, a training step
    data        [CONFIG.py] [--flags]   decoding, preparing and batching the images of --data.source
    loading     [--samples N]           samples a second by number of worker processes
    opening     [--images N]            opening a dataset file of COCO's size, which is made for it
    memory      [--images N]            memory of training on such a file, step by step
    evaluation  [--queries N]           scoring masks that are made for the purpose
    serving     RUN|EXPORT [--images N] images and queries a second

Run nothing else at the same time. Figures are medians unless they say otherwise.
"""

import itertools
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from flax import nnx
from grain import DatasetIterator
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

import r2sm_jax
from r2sm_jax.cli import cli_main, parse_config, parse_flags
from r2sm_jax.config import Config, DataConfig, ModelConfig, VisionConfig
from r2sm_jax.data import masks
from r2sm_jax.data.batches import Batch, Examples, training_batches
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.prepare import prepare, random_crop
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.models.pretrained import fill_sizes
from r2sm_jax.models.r2sm import build_model
from r2sm_jax.sources import load_json_split, open_split, open_training
from r2sm_jax.synthetic.queries.sentences import write_text_only_queries
from r2sm_jax.synthetic.scenes.source import draw_scene
from r2sm_jax.training.losses import segmenter_loss
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.run_folder import resolve_auto
from r2sm_jax.training.segmenter import TrainingData, fill_in_states, prepare_data
from r2sm_jax.training.step import init_state, jit_train_step

Figures = Iterator[tuple[str, str]]
"""Names and figures, as they are measured."""
NUM_SCENES = 64
NUM_PHOTOS = 48
BATCH_SIZE = 8
PHOTO_SIZE = (640, 480)


def median_seconds(work: Callable[[], Any], num_repeats: int) -> float:
    """Median time of a call whose result is waited for, after a first one that compiles."""
    jax.block_until_ready(work())
    times = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return median(times)


def peak_memory() -> str:
    """The largest memory of this process until now."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"


def measure_training(args: Sequence[str]) -> Figures:
    """The training step of `train.py` with its batches, and what comes before it."""
    config = resolve_auto(parse_config(args))
    config = replace(config, data=replace(config.data, source="scenes", scenes=NUM_SCENES))
    size = config.model.vision.image_size
    seconds = median_seconds(lambda: [draw_scene(0, i, size) for i in range(NUM_SCENES)], 3)
    yield "scenes drawn a second and core", f"{NUM_SCENES / seconds:.0f}"

    data = prepare_data(config, open_training(config), write_text_only_queries(600, seed=0))
    source = open_split(DataConfig(), "train", count=NUM_SCENES, size=size)
    sentences = [query.text for i in range(NUM_SCENES) for query in source.queries_at(i)]
    data.texts(sentences[:1] * 64)  # compiled
    start = time.perf_counter()
    data.texts(sentences)
    seconds = time.perf_counter() - start
    yield "sentences encoded a second", f"{len(sentences) / seconds:.0f}"

    batches = make_batches(data, config)
    batch = jax.device_put(fill_in_states(next(batches), data.texts))
    batches.close()
    step = make_step(config, data)
    jax.block_until_ready(step(batch))
    shape = f"{config.train.batch_size} images x {config.data.queries} queries"
    milliseconds = 1000 * median_seconds(lambda: step(batch), 20)
    yield f"training step, {shape}", f"{milliseconds:.0f} ms"


def make_batches(data: TrainingData, config: Config) -> DatasetIterator:
    """The batches of a run, with token ids."""
    size = config.train.batch_size
    workers = config.data.workers
    return training_batches(data.examples, batch_size=size, seed=0, workers=workers)


def make_step(config: Config, data: TrainingData) -> Callable[[Batch], Any]:
    """The training step on one device. It keeps its state, and returns the losses of a batch."""
    model = build_model(fill_sizes(config.model), rngs=nnx.Rngs(0))
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    optimizer = make_optimizer(config.optimizer, config.train.steps, config.model.vision)
    state = init_state(params, optimizer)
    loss = segmenter_loss(config, data.name_embeddings)
    train_step = jit_train_step(graphdef, loss, optimizer, config.train)

    def step(batch: Batch) -> Any:
        nonlocal state
        state, losses = train_step(state, constants, batch)
        return losses

    return step


def measure_data(args: Sequence[str]) -> Figures:
    """Means over images of each stage on one core, then whole batches on all. Tokens are
    blank."""
    config = resolve_auto(parse_config(args))
    data, vision = config.data, config.model.vision
    source = open_training(config)
    count = min(96, len(source))
    examples = Examples(source, config, blank_token_ids, text_length=32, max_kept_bytes=0)
    rng = np.random.default_rng(0)

    def mean_milliseconds(work: Callable[[int], Any]) -> str:
        start = time.perf_counter()
        for i in range(count):
            work(i)
        return f"{1000 * (time.perf_counter() - start) / count:.3g} ms"

    def prepare_sample(sample: Any) -> Any:
        return prepare(
            random_crop(sample, data.crop, rng),
            image_size=vision.image_size,
            mask_size=config.model.mask_size,
            vocabulary=source.vocabulary,
            tokenizer=blank_token_ids,
        )

    samples = [source[i] for i in range(count)]
    prepared = [prepare_sample(sample) for sample in samples]
    yield "decode image and masks", mean_milliseconds(source.__getitem__)
    yield "letterbox and pool", mean_milliseconds(lambda i: prepare_sample(samples[i]))
    yield "assemble", mean_milliseconds(lambda i: examples.assemble(prepared[i], rng))

    batch_size = config.train.batch_size
    batches = training_batches(examples, batch_size=batch_size, seed=0, workers=data.workers)
    for _ in range(1 + data.workers):  # every worker has started
        next(batches)
    num_batches = max(4, 2 * count // batch_size, 2 * data.workers)
    rate = num_batches * batch_size / seconds_of(batches, num_batches)
    yield f"whole batches, {place_of(data.workers)}", f"{rate:.1f} images/s"


def seconds_of(batches: DatasetIterator, count: int) -> float:
    """Time until `count` more batches are there; they are closed afterwards."""
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    seconds = time.perf_counter() - start
    batches.close()
    return seconds


def place_of(workers: int) -> str:
    """Where batches are made."""
    if not workers:
        return "threads on all cores"
    return "1 worker process" if workers == 1 else f"{workers} worker processes"


def blank_token_ids(texts: Sequence[str]) -> list[list[int]]:
    """Sentences of 16 tokens."""
    return [[0] * 16 for _ in texts]


@dataclass(frozen=True)
class LoadingConfig:
    """What is loaded, and by how many."""

    samples: int = 160
    """Samples of each measurement."""
    workers: tuple[int, ...] = (0, 1, 2, 4)
    """Numbers of worker processes."""
    sizes: tuple[int, ...] = (448, 1024)
    """Pixels of a side of the model's frame. Masks have a quarter of that."""


def measure_loading(args: Sequence[str]) -> Figures:
    """Samples a second as training gets them, anew at each visit, of photos that are made for it:
    640 x 480 pixels, 7 polygons, 8 queries."""
    config = parse_flags(LoadingConfig, args, prog="python scripts/benchmark.py loading")
    with tempfile.TemporaryDirectory() as name:
        source = read_json(write_photos(Path(name), NUM_PHOTOS))
        for size, workers in itertools.product(config.sizes, config.workers):
            model = ModelConfig(vision=VisionConfig(image_size=size, patch_size=16))
            batches = training_batches(
                Examples(
                    source, Config(model=model), blank_token_ids, text_length=32, max_kept_bytes=0
                ),
                batch_size=BATCH_SIZE,
                seed=0,
                workers=workers,
            )
            num_ahead = 1 + 3 * workers
            for _ in range(num_ahead):  # every worker has started, and what it had ready is gone
                next(batches)
            num_batches = max(1, config.samples // BATCH_SIZE)
            num_samples = num_batches * BATCH_SIZE
            cpu_start = time.process_time()
            rate = num_samples / seconds_of(batches, num_batches)
            milliseconds = 1000 * (time.process_time() - cpu_start) / num_samples
            yield f"{size} px, {place_of(workers)}", f"{rate:.1f} samples/s"
            if not workers:  # else it would be that of the main process alone
                yield f"{size} px, processor time of a sample", f"{milliseconds:.3g} ms"


def write_photos(folder: Path, count: int) -> Path:
    """JPEGs of about the size and the cost of COCO's, with a dataset file."""
    rng = np.random.default_rng(0)
    width, height = PHOTO_SIZE
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    queries: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        file_name = f"{number:06}.jpg"
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        noise = rng.normal(0, 12, (height, width, 1))
        pixels = np.asarray(coarse.resize(PHOTO_SIZE, Image.Resampling.BICUBIC)) + noise
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / file_name, quality=90)
        images.append({"id": number, "file_name": file_name, "height": height, "width": width})
        for k in range(7):
            mask = draw_ellipse(rng)
            annotation = {"id": 7 * number + k, "image_id": number, "category_id": 1, "iscrowd": 0}
            annotation |= {"bbox": masks.coco_box(mask), "area": masks.area(mask)}
            annotations.append(annotation | {"segmentation": masks.polygons(mask)})
        for k in range(8):
            query = {"id": 8 * number + k, "image_id": number, "text": f"the thing {k}"}
            targets = [7 * number + k % 7]
            queries.append(query | {"mask_type": "modal", "instance_ids": targets})
    records = {"images": images, "annotations": annotations, "queries": queries}
    path = folder / "photos.json"
    path.write_text(json.dumps(records | {"categories": [{"id": 1, "name": "thing"}]}), "utf-8")
    return path


@dataclass(frozen=True)
class OpeningConfig:
    """What is opened."""

    images: int = 118_000
    """Images of the file; there are 7.3 annotations and 8.5 queries for each, as in R2SM."""


def measure_opening(args: Sequence[str]) -> Figures:
    """The splits of one dataset file, and the annotations of a first image. Of the images there is
    nothing but their names."""
    prog = "python scripts/benchmark.py opening"
    num_images = parse_flags(OpeningConfig, args, prog=prog).images
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "large.json"
        write_large_file(path, num_images)
        yield "size of the file", f"{path.stat().st_size / 1e6:,.0f} MB"
        yield "memory before", peak_memory()
        start = time.perf_counter()
        training = load_json_split(path, "train", need_images=False)
        yield "training split opened", f"{time.perf_counter() - start:.3g} s"
        start = time.perf_counter()
        for split in ("dev", "val"):
            load_json_split(path, split, need_images=False)
        yield "dev and val opened", f"{time.perf_counter() - start:.3g} s"
        start = time.perf_counter()
        training.truth_at(0)
        yield "first annotations", f"{1000 * (time.perf_counter() - start):.3g} ms"
    yield "peak memory", peak_memory()


def write_large_file(path: Path, num_images: int) -> None:
    """A dataset file of ellipses, written record by record, so that it takes no memory."""
    rng = np.random.default_rng(0)
    ellipses = [draw_ellipse(rng) for _ in range(200)]
    shapes = []
    for mask in ellipses:
        record = {"category_id": 1, "iscrowd": 0, "bbox": masks.coco_box(mask)}
        shapes.append(record | {"area": masks.area(mask), "segmentation": masks.encode(mask)})

    width, height = PHOTO_SIZE
    # Image i has annotations up to this number, and the first of them is that after the one before.
    last_annotation = [math.ceil(7.3 * i) for i in range(num_images + 1)]
    last_query = [math.ceil(8.5 * i) for i in range(num_images + 1)]

    def write_records(key: str) -> Iterator[dict[str, Any]]:
        for i in range(1, num_images + 1):
            image = {"image_id": i}
            if key == "images":
                yield {"id": i, "file_name": f"{i:012}.jpg", "height": height, "width": width}
            elif key == "annotations":
                for number in range(last_annotation[i - 1] + 1, last_annotation[i] + 1):
                    yield {"id": number} | image | shapes[number % len(shapes)]
            else:
                targets = [last_annotation[i - 1] + 1]
                for number in range(last_query[i - 1] + 1, last_query[i] + 1):
                    query = {"id": number} | image | {"instance_ids": targets}
                    query |= {"text": f"the thing {number} beside the other"}
                    yield query | {"mask_type": "modal"}

    with path.open("w", encoding="utf-8") as file:
        file.write('{"categories": [{"id": 1, "name": "thing"}]')
        for key in ("images", "annotations", "queries"):
            file.write(f', "{key}": [')
            for number, record in enumerate(write_records(key)):
                file.write(",\n" if number else "")
                file.write(json.dumps(record))
            file.write("]")
        file.write("}")


@dataclass(frozen=True)
class MemoryConfig:
    """What is trained on, and for how long."""

    images: int = 118_000
    """Images of the file, as in `opening`."""
    steps: int = 50
    workers: int = 1
    """Worker processes; 0 = threads, and the states of sentences are kept."""


def measure_memory(args: Sequence[str]) -> Figures:
    """Memory of the model of configs/smoke.py while it trains on one file of COCO's size, all of
    whose images are one grey picture. Worker processes count."""
    flags = parse_flags(MemoryConfig, args, prog="python scripts/benchmark.py memory")
    smoke = Path(__file__).parents[1] / "configs" / "smoke.py"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "large.json"
        write_large_file(path, flags.images)
        write_grey_pictures(path.parent, flags.images)
        data_flags = ["--data.source", f"json:{path}", "--data.workers", str(flags.workers)]
        config = resolve_auto(parse_config([str(smoke), *data_flags]))

        start = time.perf_counter()
        data = prepare_data(config, open_training(config), [])
        yield "data opened", f"{time.perf_counter() - start:.3g} s"
        yield "memory then", current_memory()
        batches = make_batches(data, config)
        train_step = make_step(config, data)
        for step in range(1, flags.steps + 1):
            jax.block_until_ready(train_step(fill_in_states(next(batches), data.texts)))
            if step % 10 == 0 or step == flags.steps:
                yield f"memory after {step} steps", current_memory()
        batches.close()
    yield "peak memory of the main process", peak_memory()


def write_grey_pictures(folder: Path, count: int) -> None:
    """The images of `write_large_file`: links to one file, since a file system may allow a file
    fewer names than that."""
    grey = folder / "grey.jpg"
    Image.new("RGB", PHOTO_SIZE, (128, 128, 128)).save(grey)
    for number in range(1, count + 1):
        (folder / f"{number:012}.jpg").symlink_to(grey)


def current_memory() -> str:
    """Memory of this process and of the worker processes. What they share counts in each."""
    pages = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return f"{pages * resource.getpagesize() / 2**30:.2f} GiB"


@dataclass(frozen=True)
class EvaluationConfig:
    """How many queries are scored."""

    queries: int = 78_204
    """The default is the number of R2SM's validation."""


def measure_evaluation(args: Sequence[str]) -> Figures:
    """Scores masks in run-length encoding, ten queries an image, as `evaluate --predictions`
    does."""
    prog = "python scripts/benchmark.py evaluation"
    num_queries = parse_flags(EvaluationConfig, args, prog=prog).queries
    with tempfile.TemporaryDirectory() as name:
        data, predictions = make_predictions(Path(name), num_queries)
        start = time.perf_counter()
        scored = score_predictions(predictions, read_json(data, need_images=False))
        yield f"{num_queries:,} queries scored", f"{time.perf_counter() - start:.3g} s"
        start = time.perf_counter()
        split_figures(scored.rows)
        yield "figures, AP and AR among them", f"{time.perf_counter() - start:.3g} s"
    yield "peak memory", peak_memory()


def make_predictions(folder: Path, num_queries: int) -> tuple[Path, Path]:
    """A dataset file of overlapping ellipses, and predictions that are shifted by some pixels."""
    rng = np.random.default_rng(0)
    ellipses = [draw_ellipse(rng) for _ in range(80)]
    shifted = [np.roll(mask, tuple(rng.integers(-9, 10, 2)), (0, 1)) for mask in ellipses]
    amodal_rles = [masks.encode(mask) for mask in ellipses]
    predicted_rles = [masks.encode(mask) for mask in shifted]

    width, height = PHOTO_SIZE
    num_images = -(-num_queries // 10)
    images = [
        {"id": i, "file_name": f"{i}.jpg", "height": height, "width": width}
        for i in range(1, num_images + 1)
    ]
    annotations: list[dict[str, Any]] = []
    queries: list[dict[str, Any]] = []
    predictions: list[dict[str, Any]] = []
    for image in images:
        chosen = rng.choice(len(ellipses), 6, replace=False)
        first_id = len(annotations) + 1
        for k in chosen:
            front = ellipses[rng.choice(chosen)]
            visible = ellipses[k] & ~front if rng.random() < 0.5 else ellipses[k]
            annotation = {"id": len(annotations) + 1, "image_id": image["id"], "category_id": 1}
            annotation |= {"iscrowd": 0, "bbox": [0, 0, 1, 1], "area": 1}
            annotation |= {"segmentation": amodal_rles[k], "visible_mask": masks.encode(visible)}
            annotations.append(annotation)
        for _ in range(min(10, num_queries - len(queries))):
            targets = rng.choice(6, rng.integers(1, 4), replace=False)
            query = {"id": len(queries) + 1, "image_id": image["id"], "text": "the thing"}
            query |= {"mask_type": str(rng.choice(["modal", "amodal"]))}
            query |= {"instance_ids": [int(first_id + i) for i in targets]}
            queries.append(query)
            for i in targets:
                mask = predicted_rles[chosen[i]]
                score = float(rng.random())
                predictions.append({"query_id": query["id"], "segmentation": mask, "score": score})

    data = {"images": images, "annotations": annotations, "queries": queries}
    data["categories"] = [{"id": 1, "name": "thing"}]
    data_file = folder / "data.json"
    predictions_file = folder / "predictions.json"
    data_file.write_text(json.dumps(data), "utf-8")
    predictions_file.write_text(json.dumps(predictions), "utf-8")
    return data_file, predictions_file


def draw_ellipse(rng: np.random.Generator) -> np.ndarray:
    """A random ellipse as a mask [H W]."""
    x, y = rng.uniform([80, 80], [PHOTO_SIZE[0] - 80, PHOTO_SIZE[1] - 80])
    radius_x, radius_y = rng.uniform(20, 110, 2)
    image = Image.new("1", PHOTO_SIZE)
    box = (x - radius_x, y - radius_y, x + radius_x, y + radius_y)
    ImageDraw.Draw(image).ellipse(box, fill=1)
    return np.asarray(image)


@dataclass(frozen=True)
class ServingConfig:
    """What is served."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, export, or hf:owner/name of one on the Hugging Face hub."""
    images: int = 40
    """Images, and repetitions of every measurement."""


def measure_serving(args: Sequence[str]) -> Figures:
    """A new sentence passes the language model, a known one does not."""
    config = parse_flags(ServingConfig, args, prog="python scripts/benchmark.py serving")
    if config.images < 8:
        raise InputError(f"--images {config.images}: too few for a median; give 8 or more")
    predictor = r2sm_jax.load(config.run)
    source = open_split(DataConfig(), "val", count=config.images, size=96)
    images = [
        np.asarray(Image.fromarray(source[i].image).resize(PHOTO_SIZE))
        for i in range(config.images)
    ]

    start = time.perf_counter()
    predictor.set_image(images[0])
    predictor.predict(["the red mug"])
    yield "first answer, which compiles", f"{time.perf_counter() - start:.2f} s"
    predictor.warm_up()
    numbers = itertools.count()
    image_cycle = itertools.cycle(images)

    def query_new() -> None:
        predictor.predict([f"the red mug {next(numbers)}"])

    def query_new_image() -> None:
        predictor.set_image(next(image_cycle))
        query_new()

    def query_known() -> None:
        predictor.predict(["the red mug"])

    for name, work in (
        ("a new image and a new sentence", query_new_image),
        ("a new sentence", query_new),
        ("a known sentence", query_known),
    ):
        yield name, f"{1000 * median_seconds(work, config.images):.3g} ms"

    for num_queries in (1, 8):
        queries = [[f"the blue book {next(numbers)}" for _ in range(num_queries)] for _ in images]
        list(predictor.predict_batches(images[:8], queries[:8]))
        start = time.perf_counter()
        list(predictor.predict_batches(images, queries))
        rate = len(images) / (time.perf_counter() - start)
        yield f"images a second, {num_queries} queries each", f"{rate:.3g}"
    yield "peak memory", peak_memory()


BENCHMARKS: dict[str, Callable[[Sequence[str]], Figures]] = {
    "training": measure_training,
    "data": measure_data,
    "loading": measure_loading,
    "opening": measure_opening,
    "memory": measure_memory,
    "evaluation": measure_evaluation,
    "serving": measure_serving,
}


def main() -> None:
    """Command line."""
    name, *args = sys.argv[1:] or [""]
    if name not in BENCHMARKS:
        raise InputError(f"benchmark {name!r} is unknown; give one of {', '.join(BENCHMARKS)}")
    table = Table(name, "figure")
    for row in BENCHMARKS[name](args):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    cli_main(main)
