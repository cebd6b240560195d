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
from collections import deque
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
    MAX_KEPT_BYTES,
    Batch,
    ExampleBuilder,
    Examples,
    training_batches,
)
from r2sm_jax.data.dataset import Dataset, Source, hash_data, read_some
from r2sm_jax.data.sheet import save_sheet
from r2sm_jax.data.split_summary import check_teaches
from r2sm_jax.data.splits import WHOLE_TRAIN
from r2sm_jax.data.text_states import TextStates
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
    open_dataset,
    split_names,
    spread_evenly,
)
from r2sm_jax.train_completer import train_completer
from r2sm_jax.train_outliner import train_outliner
from r2sm_jax.training.checkpoints import Checkpoints, save_not_finite
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
    check_same_config,
    is_main_process,
    make_mesh,
    place,
    run_on_main,
    running,
    shard_batch,
    shard_locally,
    shardings,
)
from r2sm_jax.training.step import compile_step, init_state, jit_train_step, split_model

SHEET_ROWS = 6
DEVICE_BATCHES = 2
"""How many batches wait on the devices."""
FITTING_QUANTILE = 0.99
"""The longest 1 % of the sentences are not trained on. The rest is padded to its longest sentence,
and attention takes time for padding too."""

Log = Callable[[str], None]
"""Prints a message with the seconds since the start."""


class TrainingData(NamedTuple):
    """What training reads."""

    examples: Examples
    texts: TextStates
    names: dict[str, np.ndarray]
    """Embeddings of each attribute's values."""
    sha256: str
    has_absent_targets: bool
    """Whether some queries are for something that is not in the picture."""


def open_training(config: Config) -> Source:
    """Opens the training split.

    Procedural sources write as many queries for each picture as a step asks about it; of a file,
    `dev` is trained on too unless it selects the checkpoint. Raises InputError if it cannot be
    read, or teaches nothing.
    """
    data = config.data
    spec = SourceSpec.parse(data.source)
    if data.fresh and not spec.is_procedural:
        raise InputError(
            f"--data.fresh: the images of {data.source} do not change; leave the flag out, or give "
            "scenes, compose or cutouts"
        )
    is_whole = config.train.select_on != "dev" and not spec.is_procedural
    all_photos = data.fresh and spec.kind == "compose"
    source = open_dataset(
        data,
        WHOLE_TRAIN if is_whole else "train",
        image_size=config.model.vision.image_size,
        count=None if all_photos else data.scenes,
        queries=data.queries,
    )
    if not len(source):
        raise InputError(f"{data.source}: the training split is empty")
    if not spec.is_procedural:
        warning = check_teaches(source, data.source)
        if warning:
            print(f"warning: {data.source}: {warning}", flush=True)
    return source


def open_selecting(config: Config) -> Source:
    """Opens the split that selects checkpoints: at most `evaluate_samples` images, evenly
    spread."""
    count = config.train.evaluate_samples
    size = config.model.vision.image_size
    source = open_dataset(config.data, config.train.select_on, image_size=size, count=count)
    return spread_evenly(source, count)


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
    data = config.data
    source = open_training(config)
    log(f"{len(source):,} training images")
    samples = read_some(source)
    if source.is_procedural:
        # The others are not made yet. Their sentences are like those of these.
        queries = [query for sample in samples for query in sample.queries]
    else:
        queries = [query for index in range(len(source)) for query in source.queries_at(index)]

    texts = open_language_model(config)
    examples = Examples(
        source,
        make_example_builder(config, texts, [query.text for query in queries], log),
        image_size=config.model.vision.image_size,
        mask_size=config.model.mask_size,
        crop=data.crop,
        fresh=data.fresh,
        max_kept_bytes=MAX_KEPT_BYTES // max(1, data.workers),
    )
    return TrainingData(
        examples=examples,
        texts=texts,
        names={group: texts.embeddings(words) for group, words in source.vocabulary.items()},
        sha256=hash_data(source, samples),
        has_absent_targets=any(not query.instance_ids for query in queries),
    )


def open_language_model(config: Config) -> TextStates:
    """Opens the language model. Raises InputError if it cannot be read or has another width than
    the configuration says."""
    text = config.model.text
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    texts.weights = shard_locally(config.distributed.fsdp, texts.weights)
    if text.dim != texts.sizes.dim:
        raise InputError(
            f"--model.text.dim {text.dim}: {text.name} has token states of width "
            f"{texts.sizes.dim}; give that"
        )
    return texts


def make_example_builder(
    config: Config, texts: TextStates, sentences: Sequence[str], log: Log
) -> ExampleBuilder:
    """Makes what builds the rows of a batch, with the number of tokens that sentences are padded
    to.

    `sentences` are those of the images, or of some.
    """
    data = config.data
    # Only a head that reads words learns from sentences without an image.
    has_text_head = config.model.head in LEARNED_HEADS
    num_text_only = data.text_only_queries if has_text_head else 0
    text_only = write_text_only_queries(num_text_only, seed=data.seed)

    lengths = texts.tokenizer.count(sentences)
    text_only_lengths = texts.tokenizer.count([sentence.text for sentence in text_only])
    tokens = longest_fitting(lengths)
    type_tokens = max(tokens, longest_fitting(text_only_lengths))
    share = np.mean([length > tokens for length in lengths])
    log(f"queries of more than {tokens} tokens are left out of training ({share:.1%})")
    return ExampleBuilder(
        tokenizer=texts.tokenizer,
        tokens=tokens,
        queries=data.queries,
        instances=data.instances,
        slots=config.model.decoder.slots,
        mirror=data.mirror,
        token_drop=data.token_drop,
        colour_jitter=data.colour_jitter,
        has_text_head=has_text_head,
        text_only=[
            sentence
            for sentence, length in zip(text_only, text_only_lengths, strict=True)
            if length <= type_tokens
        ],
        type_tokens=type_tokens,
    )


def longest_fitting(lengths: Sequence[int]) -> int:
    """The number of tokens that `FITTING_QUANTILE` of the sentences do not exceed."""
    return int(np.quantile(lengths, FITTING_QUANTILE, method="higher")) if lengths else 1


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
        dev = open_selecting(config)
        reported = open_reported(config)
        if is_main_process():
            others = {config.train.select_on: dev, **reported}
            warn_of_shared_pictures(data.examples.source, others)

        # Model and optimizer: from a checkpoint, from published weights, from another run, or
        # random.
        graphdef, params, constants = split_model(config.model, config.train.seed)
        print_parameters(params, constants, data.texts)
        optimizer = make_optimizer(config.optimizer, config.train.steps, config.model.vision)
        make_state = partial(init_state, optimizer=optimizer, averaged=config.train.ema > 0)
        shapes = jax.eval_shape(make_state, params)
        checkpoints = Checkpoints(folder)
        calibration = Calibration()
        if config.resume and checkpoints.steps:
            state, constants, calibration = checkpoints.restore(shapes, constants)
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

        # Batches. The last ones wait on the devices: while these compute a step, the next batch has
        # then arrived. No thread puts them there: processes that share devices must give them their
        # programs in the same order.
        first_step = int(state.step) + 1
        batches = training_batches(
            data.examples,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            start=int(state.step),
            shard=(jax.process_index(), jax.process_count()),
            workers=config.data.workers,
        )
        stack.callback(batches.close)
        waiting: deque[tuple[np.ndarray, Batch]] = deque()

        def put_next() -> None:
            batch = next(batches)
            filled = data.texts.fill(batch, config.train.matmul_precision)
            waiting.append((batch["index"], shard_batch(mesh, filled)))

        if first_step <= config.train.steps:
            put_next()
            train_step = compile_step(train_step, state, constants, waiting[0][1], names)
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
            index, batch = waiting.popleft()
            # Those of the step before too, since `Logs.add` reads losses one step late.
            images = {step - 1: images.get(step - 1), step: index}
            state, values = train_step(state, constants, batch, names)
            while step < config.train.steps and len(waiting) < DEVICE_BATCHES:
                put_next()

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
                checkpoints.save(state, constants, giou, calibration)
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
