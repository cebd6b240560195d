"""`python -m r2sm_jax.train [CONFIG.py] [--flags]`: trains a segmenter and reports on it.

Read it top to bottom: data, model, loop, report. A run folder holds everything
(training/run_folder.py). `--resume` continues from the last checkpoint. Its last parameters are bit
for bit those of a run that never stopped, on the same machine and devices.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from r2sm_jax.cli import check_first, cli_main, parse_config, to_json, trim_memory

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_first(lambda: parse_config(sys.argv[1:]))

import grain
import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from PIL import Image
from rich.console import Console
from rich.table import Table

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.batches import (
    Batch,
    ExampleBuilder,
    TokenIds,
    VisitBuilder,
    training_batches,
)
from r2sm_jax.data.dataset import Dataset, Source
from r2sm_jax.data.encoded_batches import TEXT_FIELDS, BatchEncoder, encode_ahead
from r2sm_jax.data.prepare import PreparedSource
from r2sm_jax.data.sheet import save_sheet
from r2sm_jax.data.split_summary import check_teaches
from r2sm_jax.data.splits import WHOLE_TRAIN
from r2sm_jax.data.text_states import TextStates, quantile
from r2sm_jax.data.validation import find_pictures_in_both
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.evaluation.calibration import calibrate
from r2sm_jax.evaluation.evaluator import evaluate, evaluate_source
from r2sm_jax.evaluation.page import example_rows, sample_queries, write_report
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.evaluation.tables import describe_result
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import enable_compilation_cache, restore_weights
from r2sm_jax.models.pretrained import fill_sizes, load_pretrained
from r2sm_jax.models.r2sm import Calibration
from r2sm_jax.synthetic.queries.sentences import intent_sentences, write_text_only_queries
from r2sm_jax.synthetic.sources import (
    REPORTED,
    SourceSpec,
    asks_for_absent_things,
    open_dataset,
    split_names,
    spread_evenly,
)
from r2sm_jax.train_completer import train_completer
from r2sm_jax.train_outliner import train_outliner
from r2sm_jax.training.checkpoints import Checkpoints, save_not_finite
from r2sm_jax.training.device_batches import DeviceBatches
from r2sm_jax.training.frozen_features import Lookup, can_precompute, precompute
from r2sm_jax.training.logs import Logs
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.run_folder import (
    check_inputs,
    check_unchanged,
    lock_run,
    new_run,
    point_latest,
    read_config,
    resolve_auto,
    resumed_folder,
)
from r2sm_jax.training.sharding import (
    AnyProcess,
    allgather,
    barrier,
    batch_shapes,
    check_same_config,
    is_main_process,
    make_mesh,
    place,
    row_sharding,
    run_on_main,
    running,
    shard_batch,
    shard_locally,
    shardings,
)
from r2sm_jax.training.step import compile_step, init_state, jit_train_step, split_model

SHEET_ROWS = 6
FITTING_QUANTILE = 0.99
"""The longest 1 % of the sentences are not trained on. The rest is padded to its longest sentence,
and attention takes time for padding too."""

Log = Callable[[str], None]
"""Prints a message with the seconds since the start."""


class TrainingData(NamedTuple):
    """What training reads."""

    prepared: PreparedSource
    build_example: ExampleBuilder
    texts: TextStates
    names: dict[str, np.ndarray]
    """Embeddings of each attribute's values."""
    sha256: str
    has_absent_targets: bool
    """Whether some queries are for something that is not in the picture."""


def open_data(config: Config, split: str, count: int) -> Source:
    """One split of the run's data source.

    For training ("train"), procedural sources write as many queries for each picture as a step asks
    about it; of a file, `dev` is trained on too unless it selects the checkpoint. Of another split,
    which selects, there are at most `count` images, evenly spread.
    """
    data = config.data
    size = config.model.vision.image_size
    if split != "train":
        return spread_evenly(open_dataset(data, split, image_size=size, count=count), count)

    spec = SourceSpec.parse(data.source)
    if config.train.select_on != "dev" and not spec.is_procedural:
        split = WHOLE_TRAIN
    all_photos = data.fresh and spec.kind == "compose"
    return open_dataset(
        data,
        split,
        image_size=size,
        count=None if all_photos else count,
        queries=data.queries,
    )


def open_reported(config: Config) -> dict[str, Source]:
    """The splits of the final report. They are opened before training, so that a fault in one of
    them does not end a run at its report. Raises InputError for one without queries."""
    data = config.data
    size = config.model.vision.image_size
    count = config.train.report_samples
    sources: dict[str, Source] = {}
    for name in split_names(data.source, REPORTED, data.images):
        source = open_dataset(data, name, image_size=size, count=count)
        if not any(source.queries_at(index) for index in range(len(source))):
            raise InputError(
                f"{data.source}: the split {name}, which the run would report, has no queries; "
                "write some with python -m r2sm_jax.data queries, or take its file away"
            )
        sources[name] = source
    return sources


def warn_of_shared_pictures(training: Source, reported: Mapping[str, Source]) -> None:
    """Says which of the reported splits hold pictures that the run trains on, by name."""
    if not isinstance(training, Dataset):
        return
    names = [image["file_name"] for image in training.images]
    for split, source in reported.items():
        if isinstance(source, Dataset):
            other_names = [image["file_name"] for image in source.images]
            if shared := find_pictures_in_both(other_names, names):
                print(f"warning: {source.path}: {shared} (train and {split})", flush=True)


def prepare_data(config: Config, log: Log) -> TrainingData:
    """Opens the training split and the language model. Images are prepared and sentences encoded
    later, as batches need them.

    Raises InputError if the data or the language model cannot be read or do not fit the
    configuration.
    """
    prepared = prepare_images(config, log)
    source = prepared.source
    samples = prepared.read_some()
    if source.is_procedural:
        # The others are not made yet. Their sentences are like those of these.
        sentences = [query.text for sample in samples for query in sample.queries]
        has_absent_targets = asks_for_absent_things(config.data.source, config.data.images)
    else:
        sentences = []
        has_absent_targets = False
        # Of a million queries only the sentences stay in memory.
        for index in range(len(source)):
            for query in source.queries_at(index):
                sentences.append(query.text)
                has_absent_targets |= not query.instance_ids

    texts = open_language_model(config)
    return TrainingData(
        prepared=prepared,
        build_example=make_example_builder(config, texts, sentences, log),
        texts=texts,
        names={group: texts.embeddings(words) for group, words in source.vocabulary.items()},
        sha256=prepared.sha256(sentences, samples),
        has_absent_targets=has_absent_targets,
    )


def prepare_images(config: Config, log: Log) -> PreparedSource:
    """Opens the training split, and prepares its images now if they are stored.

    Raises InputError if it cannot be read, or teaches nothing.
    """
    data = config.data
    source = open_data(config, "train", data.scenes)
    if not len(source):
        raise InputError(f"{data.source}: the training split is empty")
    if not source.is_procedural:
        warning = check_teaches(source, data.source)
        if warning:
            print(f"warning: {data.source}: {warning}", flush=True)

    if data.fresh and not source.is_procedural:
        raise InputError(
            f"--data.fresh: the images of {data.source} do not change; leave the flag out, or give "
            "scenes, compose or cutouts"
        )

    image_size = config.model.vision.image_size
    prepared = PreparedSource(
        source,
        image_size,
        config.model.mask_size,
        crop=data.crop,
        fresh=data.fresh,
    )
    is_kept = False
    if not data.keeps_nothing:
        process = (jax.process_index(), jax.process_count())
        is_kept = prepared.cache(data.cache_dir, process=process, wait=barrier)
    how = "" if is_kept else ", prepared anew at each visit"
    log(f"{len(prepared):,} training images{how}")
    return prepared


def open_language_model(config: Config) -> TextStates:
    """Opens the language model. Raises InputError if it cannot be read or has another width than
    the configuration says."""
    text = config.model.text
    texts = TextStates(
        text.name,
        layers=text.layers,
        max_tokens=text.max_tokens,
        cache_dir=config.data.cache_dir,
    )
    texts.encoder.weights = shard_locally(config.distributed.fsdp, texts.encoder.weights)
    if text.dim != texts.dim:
        raise InputError(
            f"--model.text.dim {text.dim}: {text.name} has token states of width {texts.dim}; "
            "give that"
        )
    return texts


def make_example_builder(
    config: Config, texts: TextStates, sentences: Sequence[str], log: Log
) -> ExampleBuilder:
    """What makes the rows of a batch, with the number of tokens that sentences are padded to.

    `sentences` are those of the images, or of some.
    """
    # Only a head that reads words learns from sentences without an image.
    has_text_head = config.model.head in LEARNED_HEADS
    num_text_only = config.data.text_only_queries if has_text_head else 0
    text_only = write_text_only_queries(num_text_only, seed=config.data.seed)

    token_ids = TokenIds(texts.tokenizer, None if config.data.keeps_nothing else {})
    lengths = token_ids.count(sentences)
    text_only_lengths = token_ids.count([query.text for query in text_only])
    tokens = quantile(lengths, FITTING_QUANTILE)
    type_tokens = max(tokens, quantile(text_only_lengths, FITTING_QUANTILE))
    share = np.mean([length > tokens for length in lengths])
    log(f"queries of more than {tokens} tokens are left out of training ({share:.1%})")

    data = config.data
    return ExampleBuilder(
        text_states=token_ids,
        tokens=tokens,
        queries=data.queries,
        instances=data.instances,
        slots=config.model.decoder.slots,
        mirror=data.mirror,
        token_drop=data.token_drop,
        colour_jitter=data.colour_jitter,
        has_text_head=has_text_head,
        text_only=[
            query
            for query, length in zip(text_only, text_only_lengths, strict=True)
            if length <= type_tokens
        ],
        type_tokens=type_tokens,
        count_tokens=token_ids.count,
    )


def make_batches(
    data: TrainingData, config: Config, features: Lookup | None = None
) -> grain.DatasetIterator:
    """This process's rows of every batch, with token ids where nothing is kept, else with the
    states of the language model.

    `features`: those of images by frozen encoders, where they are kept. They need the model, which
    is built after `TrainingData`, so that its builder of examples gets them only here.
    """
    batches = training_batches(
        data.prepared,
        replace(data.build_example, cached_features=features),
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        shard=(jax.process_index(), jax.process_count()),
        workers=config.data.workers,
    )
    if config.data.keeps_nothing:
        return batches
    # States on disk are shared by runs of any precision.
    precision = "float32" if config.data.cache_dir else config.train.matmul_precision
    encoder = BatchEncoder(data.texts, precision)
    # Devices that share the weights of the language model wait for each other in each of its
    # programs, and would do so for ever if two threads gave them programs in different orders.
    return encode_ahead(batches, encoder, in_thread=config.distributed.fsdp == 1)


def make_text_encoder(data: TrainingData, config: Config, mesh: Mesh) -> Callable[[Batch], Batch]:
    """What replaces the token ids of a batch by their states, where these are not kept."""
    if not config.data.keeps_nothing:
        return lambda batch: batch

    encoder = data.texts.encoder
    weights = place(mesh, encoder.weights)

    @partial(jax.jit, out_shardings=row_sharding(mesh))
    def states_of_ids(weights: nnx.State, ids: jax.Array) -> jax.Array:
        return encoder.states_of_ids(weights, ids, config.train.matmul_precision)

    def encode(batch: Batch) -> Batch:
        ids = {name: batch[name] for name in TEXT_FIELDS if name in batch}
        return batch | {name: states_of_ids(weights, ids[name]) for name in ids}

    return encode


def make_example(data: TrainingData, features: Lookup | None) -> Batch:
    """An example as a step reads it, with blank states, whose shapes are those of all."""
    build_example = replace(data.build_example, cached_features=features)
    example = VisitBuilder(data.prepared, build_example)(0, np.random.default_rng(0))
    encoder = data.texts.encoder
    for name in TEXT_FIELDS:
        if name in example:
            shape = (*example[name].shape, len(encoder.layers), encoder.sizes.dim)
            example[name] = np.zeros(shape, np.float16)
    return example


def print_parameters(params: nnx.State, constants: nnx.State, texts: TextStates) -> None:
    """Prints how many parameters each module has, and which are frozen."""
    table = Table("module", "parameters", title="parameters", title_justify="left")
    rows = {str(name): part for name, part in params.items()} | {"trainable": params}
    rows |= {
        "frozen: vision": constants.get("vision", {}),
        f"frozen: {texts.folder.name}": texts.weights,
    }
    for name, part in rows.items():
        if count := sum(leaf.size for leaf in jax.tree.leaves(part)):
            table.add_row(name, f"{count:,}", end_section=name == list(params)[-1])
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def load_initial(
    config: Config, params: nnx.State, constants: nnx.State, folder: Path
) -> tuple[nnx.State, nnx.State]:
    """Published weights, or those of another run (`--init RUN`), as the starting point.

    Prints where each published key went, and writes it to `published_weights.txt` in the run
    folder. Raises InputError if the run has another architecture, or the published weights do not
    fit.
    """
    if config.init is None:
        params, constants, matches = load_pretrained(config.model, params, constants)
        for name, found in matches.items():
            print(f"{name}: {found}", flush=True)
        lines = [line for name, found in matches.items() for line in (f"# {name}", *found.lines())]
        if lines and is_main_process():
            (folder / "published_weights.txt").write_text("\n".join(lines) + "\n", "utf-8")
        return params, constants
    if read_config(Path(config.init)).model != config.model:
        raise InputError(
            f"--init {config.init}: its model differs from the configuration; use the same --model "
            "flags"
        )
    stored = restore_weights(Path(config.init))
    print(f"weights from {config.init}", flush=True)
    return stored.params, stored.constants


class StopOnSignal:
    """Saves and ends the loop after the current step on Ctrl-C or SIGTERM. A second signal
    interrupts."""

    def __init__(self, mesh: Mesh) -> None:
        self._received = False
        self._any_process = AnyProcess(mesh)
        self._handlers = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _handle(self, number: int, frame: Any) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = True
        print(f"{signal.Signals(number).name}: saving after this step", flush=True)

    def requested(self) -> bool:
        """Whether a process received a signal; of several processes at the step before, so that no
        device waits."""
        return self._any_process(self._received)

    def end(self) -> bool:
        """Restores the signal handlers that were there before. Returns whether any process received
        a signal."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        return any(allgather(self._received))


def train(config: Config) -> Path:
    """Runs one experiment: data, model, optimizer, loop, report. Returns its run folder.

    Raises InputError for something that the user can put right; the message says how.
    """
    started = time.monotonic()

    def log(message: str) -> None:
        print(f"{message}, {time.monotonic() - started:.0f} s", flush=True)

    # Configuration: what this machine uses in place of `auto`, or what a resumed run used.
    resumed = None
    if config.resume:
        resumed = resolve_auto(read_config(resumed_folder(config)))
    config = resolve_auto(config, resumed)
    check_same_config(flatten_dict(to_json(config), sep="."))
    known = resumed
    if config.init:
        known = read_config(Path(config.init))
    config = replace(config, model=fill_sizes(config.model, known and known.model))
    mesh = make_mesh(config.train, config.distributed.fsdp)

    with ExitStack() as stack:
        # Run folder, which no other command may train in until this one ends.
        if resumed is None:
            folder = run_on_main(lambda: stack.enter_context(new_run(config)))
        else:
            folder = resumed_folder(config)
            run_on_main(lambda: stack.enter_context(lock_run(folder)))
            check_unchanged(folder, resumed, config)
        print(f"run folder {folder}", flush=True)

        # Data. What is wrong with a split is found now.
        data = prepare_data(config, log)
        run_on_main(lambda: check_inputs(folder, config, data.texts, data.sha256))
        dev = open_data(config, config.train.select_on, config.train.evaluate_samples)
        reported = open_reported(config)
        if is_main_process():
            others = {config.train.select_on: dev, **reported}
            warn_of_shared_pictures(data.prepared.source, others)

        # Model and optimizer: from a checkpoint, from published weights, from another run, or
        # random.
        graphdef, params, constants = split_model(config.model, config.train.seed)
        print_parameters(params, constants, data.texts)
        optimizer = make_optimizer(
            config.optimizer, config.train.steps, config.train.matmul_precision
        )
        make_state = partial(init_state, optimizer=optimizer, averaged=config.train.ema > 0)
        shapes = jax.eval_shape(make_state, params)
        checkpoints = Checkpoints(folder)
        position = None
        calibration = Calibration()
        if config.resume and checkpoints.steps:
            state, constants, calibration, position = checkpoints.restore(shapes, constants)
            state = place(mesh, state)
            print(f"resumed at step {int(state.step)}", flush=True)
        else:
            params, constants = load_initial(config, params, constants, folder)
            state_shardings = shardings(mesh, shapes)
            make_state = jax.jit(make_state, donate_argnums=0, out_shardings=state_shardings)
            state = make_state(place(mesh, params))
        del params  # so that no device holds a second copy
        constants = place(mesh, constants)
        names = place(mesh, data.names)
        train_step = jit_train_step(graphdef, optimizer, config, state)

        # Batches: images of which a frozen encoder has computed the features need not be encoded
        # again.
        features = None
        if can_precompute(config):
            weights = nnx.merge_state(state.params, constants)
            features = precompute(graphdef, weights, data.prepared, config)
        encode_text = make_text_encoder(data, config, mesh)
        batches = DeviceBatches(
            make_batches(data, config, features),
            lambda batch: encode_text(shard_batch(mesh, batch)),
        )
        stack.callback(batches.close)
        if position is not None:
            batches.set_state(position)

        # The step is compiled while the first batches are made.
        first_step = int(state.step) + 1
        if first_step <= config.train.steps:
            batches.start_prefetch()
            example = make_example(data, features)
            shapes = batch_shapes(mesh, example, config.train.batch_size)
            train_step = compile_step(train_step, state, constants, shapes, names)
            log("the first step is compiled")

        # Loop.
        logs = Logs(folder, config, start=int(state.step))
        stop = StopOnSignal(mesh)
        predictor = Predictor(
            config.model, graphdef, nnx.merge_state(state.weights, constants), data.texts
        )
        sentences = intent_sentences("calibration")
        images: dict[int, Any] = {}
        for step in range(first_step, config.train.steps + 1):
            index, batch = next(batches)
            # Those of the step before too, since `Logs.add` reads losses one step late.
            images = {step - 1: images.get(step - 1), step: index}
            state, values = train_step(state, constants, batch, names)
            if step < config.train.steps:
                batches.fill()

            is_last = step == config.train.steps or stop.requested()
            evaluates = step % config.train.evaluate_every == 0 or step == config.train.steps
            saves = evaluates or is_last or step % config.train.checkpoint_every == 0
            not_finite = logs.add(step, values, wait=saves)
            if not_finite is not None:
                checkpoints.close()
                save_not_finite(
                    folder,
                    state,
                    constants,
                    batches,
                    step=not_finite,
                    images=images[not_finite],
                )
            if step == first_step:
                jax.block_until_ready(values)
                trim_memory()

            giou = None
            if saves:
                # Calibration belongs to the weights: it is fitted now and saved with them. Between
                # evaluations masks keep that of the last one, so that saving takes no time.
                weights = nnx.merge_state(state.weights, constants)
                predictor = predictor.updated(weights=weights, calibration=calibration)
                fit = partial(calibrate, predictor, dev if evaluates else None, sentences)
                fitted = run_on_main(partial(fit, fit_absence=data.has_absent_targets))
                calibration = Calibration(*fitted)
                predictor = predictor.updated(calibration=calibration)
                if evaluates:
                    giou = run_on_main(
                        partial(evaluate_dev, predictor, dev, step, folder, logs),
                    )
                checkpoints.save(state, constants, batches, giou, calibration)
                # Neither evaluating nor saving is part of the speed.
                logs.restart_clock(step)
                if config.run is None and not config.resume and is_main_process():
                    point_latest(folder)
            if is_last:
                break

        stopped = stop.end()
        checkpoints.close()
        logs.close()

        # Report on the best checkpoint.
        if stopped:
            print(
                f"stopped at step {int(state.step)}; continue with "
                f"python -m r2sm_jax.train --resume --run {folder}",
                flush=True,
            )
        else:
            report_on_best(config, folder, predictor, reported, started)
    return folder


def evaluate_dev(predictor: Predictor, dev: Source, step: int, folder: Path, logs: Logs) -> float:
    """Logs the figures of a quick evaluation and saves a sheet of samples. Returns the gIoU."""
    results = evaluate_source(predictor, dev, name="dev").results
    figures = split_figures(results)
    logs.evaluation(step, figures)
    rows = example_rows(dev, sample_queries(results, SHEET_ROWS))
    save_sheet(folder / "samples" / f"step_{step:06d}.png", rows, title=f"step {step}")
    return float(figures["all"]["giou"] or 0)


def report_on_best(
    config: Config,
    folder: Path,
    predictor: Predictor,
    sources: Mapping[str, Source],
    started: float,
) -> None:
    """Evaluates the best checkpoint on every validation split and writes the report."""
    best = restore_weights(folder)
    weights = nnx.merge_state(best.params, best.constants)
    predictor = predictor.updated(weights=weights, calibration=best.calibration)
    spec = config.data.source

    def write() -> None:
        report, evaluated = evaluate(
            predictor,
            sources,
            {"val_r2sm": intent_sentences("val_r2sm")} if spec == "scenes" else {},
            trained=config,
            source=spec,
            step=best.step,
            selected_on=config.train.select_on,
            trained_on=spec,
        )
        report["meta"]["minutes"] = round((time.monotonic() - started) / 60, 2)
        write_report(report, evaluated, folder)
        lines = describe_result(report)
        lines.append(f"report: {folder / 'report.html'}")
        lines.append(f"next: {write_question(folder, next(iter(sources.values())))}")
        print("\n".join(lines), flush=True)

    run_on_main(write)


def write_question(folder: Path, source: Source) -> str:
    """Saves a picture of a split in the run folder; returns the command that asks about it."""
    index = next(index for index in range(len(source)) if source.queries_at(index))
    sample = source[index]
    # The amodal ones come first.
    query = min(sample.queries, key=lambda query: query.mask_type)
    picture = folder / "question.png"
    with atomic_write(picture) as part:
        Image.fromarray(sample.image).save(part, "PNG")
    arguments = [str(folder), str(picture), query.text]
    return shlex.join(["python", "-m", "r2sm_jax.predict", *arguments])


def main() -> None:
    """Command line. A resumed run keeps its configuration, except for flags that change fields of
    `MAY_CHANGE`."""
    enable_compilation_cache()
    args = sys.argv[1:]
    config = parse_config(args)
    has_config_file = bool(args) and not args[0].startswith("-")
    if config.resume and not has_config_file:
        resumed = read_config(resumed_folder(config))
        any_devices = replace(resumed.train, devices=0)
        config = parse_config(args, default=replace(resumed, train=any_devices))
    if config.train.deterministic:
        # XLA reads its flags when a device is first used.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    with running(config.distributed):
        if config.train.part == "completer":
            train_completer(config)
        elif config.train.part == "outliner":
            train_outliner(config)
        else:
            train(config)


if __name__ == "__main__":
    cli_main(main)
