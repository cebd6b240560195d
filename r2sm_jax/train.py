"""`python -m r2sm_jax.train [CONFIG.py] [--flags]`: trains a segmenter and reports on it.

Reads top to bottom: data, model, step, loop. A run folder holds everything (see runs.py), and `--resume` goes on from
its last checkpoint to bit-identical parameters.
"""

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from r2sm_jax.config import Config, LoopConfig, Products, check_sizes
from r2sm_jax.cpu import ask_for_huge_pages, choose_products, tune_malloc
from r2sm_jax.data.batches import Assemble, PreparedSource, training_batches
from r2sm_jax.data.samples import Source
from r2sm_jax.data.sheet import save_sheet
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.evaluate import evaluate, open_splits, score_source, show_report
from r2sm_jax.flags import parse_config
from r2sm_jax.metrics.html import first_of_images, panels
from r2sm_jax.metrics.report import split_figures, write_report
from r2sm_jax.models.heads import LEARNED
from r2sm_jax.models.published import load_published, with_published_sizes
from r2sm_jax.models.text_states import TextStates
from r2sm_jax.predictor import Predictor
from r2sm_jax.queries.free_sentences import write_free_sentences
from r2sm_jax.runs import read_config, restore_weights, resumed_folder, start_folder
from r2sm_jax.sources import is_procedural, open_source
from r2sm_jax.training.calibration import Calibration
from r2sm_jax.training.checkpoints import Checkpoints
from r2sm_jax.training.frozen_features import FrozenImages, why_not
from r2sm_jax.training.logs import Logs
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.step import TrainState, init_state, make_train_step, split_model

SHEET_ROWS = 6
FITTING = 0.99
"""Share of the sentences that training has room for: the longest are left out, or all would be padded to them."""


def open_data(config: Config, split: str, count: int) -> Source:
    """One split of the run's data source. Training scenes get as many queries as a step asks of them."""
    data, size = config.data, config.model.vision.image_size
    queries = data.queries if split == "train" else 8
    return open_source(
        data.source,
        split,
        count=count,
        seed=data.seed,
        size=size,
        queries=queries,
        images_dir=data.images,
        backgrounds=data.backgrounds,
    )


def all_texts(source: PreparedSource) -> list[str]:
    """Every query of a prepared source."""
    return [text for index in range(len(source)) for text in source.texts(index)]


def print_parameters(params: nnx.State, constants: nnx.State, texts: TextStates) -> None:
    """The table of what is trained and what is frozen."""
    table = Table("module", "parameters", title="parameters", title_justify="left")

    def count(tree: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    for name, part in params.items():
        table.add_row(str(name), f"{count(part):,}")
    table.add_section()
    table.add_row("trainable", f"{count(params):,}")
    if frozen := count(constants.get("vision", {})):
        table.add_row("frozen: vision", f"{frozen:,}")
    table.add_row(f"frozen: {texts.folder.name}", f"{count(texts.weights):,}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def make_mesh(batch_size: int, accumulate: int = 0) -> jax.sharding.Mesh:
    """All local devices along one `data` axis.

    Raises:
        InputError: the batch does not divide evenly.
    """
    devices = jax.local_device_count()
    if batch_size % devices:
        raise InputError(f"--train.batch-size {batch_size} is not divisible by the {devices} devices; give a multiple")
    if accumulate and batch_size // devices % accumulate:
        raise InputError(
            f"--train.accumulate {accumulate}: a device's {batch_size // devices} images (--train.batch-size over "
            f"{devices} devices) do not divide into so many parts; give a divisor"
        )
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def resolve_products(loop: LoopConfig) -> Products:
    """The products that training uses on this machine."""
    return choose_products() if loop.products == "auto" else loop.products


def how_to_step(loop: LoopConfig) -> dict[str, Any]:
    """Options of `make_train_step`. On CPU half a batch at a time is faster, since more of it stays in the caches."""
    halves = jax.default_backend() == "cpu" and loop.batch_size // jax.local_device_count() % 2 == 0
    if loop.accumulate == 0 and halves:
        return {"accumulate": 2, "unroll": True, "kind": resolve_products(loop)}
    return {"accumulate": loop.accumulate or 1, "kind": resolve_products(loop)}


def with_sizes(config: Config) -> Config:
    """The configuration with the sizes of the published weights that it names; from the run that is resumed or
    started from, if there is one that has them.

    Raises:
        InputError: the weights cannot be had, or the sizes contradict one another.
    """
    if config.model.vision.init is None and config.model.vision.name is None:
        return config
    run = resumed_folder(config) if config.resume else Path(config.init) if config.init else None
    config = replace(config, model=with_published_sizes(config.model, read_config(run).model if run else None))
    check_sizes(config.model)
    return config


def load_initial(config: Config, params: nnx.State, constants: nnx.State, folder: Path) -> tuple[nnx.State, nnx.State]:
    """Published weights, or those of another run (`--init RUN`), as the starting point.

    What became of each published key is said, and written to `published_weights.txt` in the run folder.

    Raises:
        InputError: the run has another architecture, or the published weights do not fit.
    """
    if config.init is None:
        params, constants, reports = load_published(config.model, params, constants)
        for report in reports:
            print(report, flush=True)
        if reports:
            lines = [line for report in reports for line in (f"# {report.name}", *report.lines())]
            (folder / "published_weights.txt").write_text("\n".join(lines) + "\n")
        return params, constants
    other = read_config(Path(config.init))
    if other.model != config.model:
        raise InputError(
            f"--init {config.init}: its model differs from this configuration's; use the same --model flags"
        )
    stored = restore_weights(Path(config.init))
    print(f"weights from {config.init}", flush=True)
    return stored.params, stored.constants


class Stop:
    """Set by Ctrl-C and SIGTERM: the loop saves and ends after the current step; a second one interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGINT, signal.SIGTERM)}

    def end(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(f"{signal.Signals(number).name}: saving after this step", flush=True)


def train(config: Config) -> Path:
    """Runs one experiment; returns its folder.

    Raises:
        InputError: something that the user can mend, see the message.
    """
    started = time.monotonic()
    config = with_sizes(config)
    mesh = make_mesh(config.train.batch_size, config.train.accumulate)
    folder = start_folder(config)
    print(f"run folder {folder}", flush=True)

    # data: prepared once, sentences encoded once
    source = open_data(config, "train", config.data.scenes)
    if not len(source):
        raise InputError(f"{config.data.source}: the training split is empty")
    vision, text = config.model.vision, config.model.text
    prepared = PreparedSource(source, vision.image_size, config.model.mask_size, crop=config.data.crop)
    if prepared.remember():
        print(f"{len(prepared)} training images prepared, {time.monotonic() - started:.0f} s", flush=True)
    else:
        print(f"{len(prepared)} training images, prepared anew at each visit", flush=True)
    dev = open_data(config, "dev" if is_procedural(config.data.source) else "val", config.train.evaluate_samples)
    cache = config.data.cache_features
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens, cache=cache)
    if text.dim != texts.dim:
        raise InputError(f"--model.text.dim {text.dim}: {text.name} has token states of width {texts.dim}; give that")
    from_words = config.model.head in LEARNED
    free = write_free_sentences(config.data.free_sentences if from_words else 0, seed=config.data.seed)
    sentences = [*all_texts(prepared), *(sentence.text for sentence in free)]
    texts.encode(sentences, kind="float32" if cache else resolve_products(config.train))
    print(f"{texts.truncation_summary()}, encoded, {time.monotonic() - started:.0f} s", flush=True)
    tokens = texts.token_quantile(sentences, FITTING)
    too_long = frozenset(sentence for sentence in sentences if len(texts.states_of(sentence)) > tokens)
    print(f"{len(too_long)} sentences of more than {tokens} tokens are left out of training", flush=True)
    names = {group: texts.embeddings(words) for group, words in source.vocabulary.items()}
    reason = why_not(config) if cache else None
    frozen = FrozenImages(Path(cache), prepared) if cache and not reason else None
    if reason:
        print(f"--data.cache-features: image features are not cached, since {reason}", flush=True)
    assemble = Assemble(
        text_states=texts,
        tokens=tokens,
        queries=config.data.queries,
        instances=config.data.instances,
        slots=config.model.decoder.slots,
        mirror=config.data.mirror,
        token_drop=config.data.token_drop,
        colour_jitter=config.data.colour_jitter,
        from_words=from_words,
        free=[sentence for sentence in free if sentence.text not in too_long],
        too_long=too_long,
        frozen=frozen,
    )
    batches = training_batches(prepared, assemble, batch_size=config.train.batch_size, seed=config.train.seed)

    # model
    graphdef, params, constants = split_model(config.model, config.train.seed)
    print_parameters(params, constants, texts)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    checkpoints = Checkpoints(folder)
    if config.resume and checkpoints.steps:
        state, constants = checkpoints.restore(init_state(params, optimizer), constants, batches)
        print(f"resumed at step {int(state.step)}", flush=True)
    else:
        params, constants = load_initial(config, params, constants, folder)
        state = init_state(params, optimizer)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state, constants, names = jax.device_put((state, constants, names), everywhere)
    split_rows = NamedSharding(mesh, PartitionSpec("data"))
    if frozen is not None:
        count = frozen.compute(
            graphdef,
            nnx.merge_state(state.params, constants),
            config,
            batch_size=config.train.batch_size,
            sharding=split_rows,
        )
        print(f"features of {count:,} images computed, {time.monotonic() - started:.0f} s", flush=True)
    train_step = make_train_step(graphdef, optimizer, config.loss, **how_to_step(config.train))
    predictor = Predictor(config.model, graphdef, nnx.merge_state(state.params, constants), texts)
    calibration = Calibration(graphdef, texts) if from_words else None

    # loop
    logs = Logs(folder, config, start=int(state.step))
    stop = Stop()
    images: dict[int, Any] = {}
    first = int(state.step) + 1
    for step in range(first, config.train.steps + 1):
        batch = next(batches)
        images = {step - 1: images.get(step - 1), step: batch["index"]}
        state, values = train_step(state, constants, jax.device_put(batch, split_rows), names)
        last = step == config.train.steps or stop.asked
        evaluates = step % config.train.evaluate_every == 0 or step == config.train.steps
        saves = evaluates or last or step % config.train.checkpoint_every == 0
        if (bad := logs.add(step, values, settle=saves)) is not None:
            checkpoints.close()
            keep_state(folder / "not_finite", state, constants, batches)
            raise InputError(
                f"step {bad}: the loss is not finite on the training images {', '.join(map(str, images[bad]))}; the "
                f"state is saved in {folder / 'not_finite'}; lower --optimizer.learning-rate and "
                "--optimizer.muon-learning-rate or look at these images, then --resume from the checkpoint before"
            )
        if step == first:
            jax.block_until_ready(values)
            ask_for_huge_pages()
        giou = None
        if evaluates:
            constants = calibration(state.params, constants) if calibration else constants
            predictor.weights = nnx.merge_state(state.params, constants)
            giou = quick_evaluation(predictor, dev, step, folder, logs)
        if saves:
            checkpoints.save(state, constants, batches, giou)
        if last:
            break
    stop.end()
    checkpoints.close()
    logs.close()
    if stop.asked:
        print(f"stopped at step {int(state.step)}; continue with --resume --run {folder}", flush=True)
        return folder

    # report
    best = restore_weights(folder)
    predictor.weights = nnx.merge_state(best.params, best.constants)
    sources = open_splits(
        config.data.source, "all", count=config.train.report_samples, seed=config.data.seed, size=vision.image_size,
        images_dir=config.data.images, backgrounds=config.data.backgrounds,
    )  # fmt: skip
    report, evaluated = evaluate(predictor, sources, spec=config.data.source, step=best.step)
    report["meta"]["minutes"] = round((time.monotonic() - started) / 60, 2)
    write_report(report, evaluated, folder)
    show_report(report)
    print(f"finished in {report['meta']['minutes']} minutes: {folder / 'report.html'}", flush=True)
    return folder


def keep_state(folder: Path, state: TrainState, constants: nnx.State, batches: Any) -> None:
    """Saves a state to look at, apart from the checkpoints that a run goes on from."""
    apart = Checkpoints(folder)
    apart.save(state, constants, batches, None)
    apart.close()


def quick_evaluation(predictor: Predictor, dev: Source, step: int, folder: Path, logs: Logs) -> float:
    """gIoU on the dev images, logged, with a sheet of samples."""
    scored = score_source(predictor, dev)
    figures = split_figures(scored.results, scored.instances)
    logs.evaluation(step, figures)
    try:
        rows = panels(dev, scored, first_of_images(scored, SHEET_ROWS))
        save_sheet(folder / "samples" / f"step_{step:06d}.png", rows, title=f"step {step}")
    except OSError as error:
        raise InputError(f"{folder}: the sample sheet cannot be written ({error.strerror}); free disk space") from None
    return float(np.float64(figures["all"]["giou"] or 0))


def main() -> None:
    """Command line. A run that is resumed keeps its configuration; flags may only repeat it."""
    tune_malloc()
    args = sys.argv[1:]
    config = parse_config(args)
    if config.resume and args[0].startswith("-"):
        config = parse_config(args, read_config(resumed_folder(config)))
    train(config)


if __name__ == "__main__":
    exit_cleanly(main)
