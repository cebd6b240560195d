"""`python -m r2sm_jax.train [CONFIG.py] [--flags]`: trains a segmenter and reports on it, or trains
a completer or an outliner (`--train.part`).

A run folder holds everything (training/run_folder.py). `--resume` continues from the last
checkpoint. Its last parameters are bit for bit those of a run that never stopped, on the same
machine and devices.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from r2sm_jax.cli import check_first, cli_main, parse_config, to_json

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_first(lambda: parse_config(sys.argv[1:]))

import jax
from flax import nnx
from flax.traverse_util import flatten_dict
from PIL import Image

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.dataset import Source, hash_data, read_some
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.evaluation.crop_selection import completer_evaluation, outliner_evaluation
from r2sm_jax.evaluation.evaluator import evaluate
from r2sm_jax.evaluation.page import write_report
from r2sm_jax.evaluation.selection import segmenter_evaluation
from r2sm_jax.evaluation.tables import describe_result
from r2sm_jax.inference.load import enable_compilation_cache, load_part, load_run, load_weights
from r2sm_jax.inference.model_folder import find_folder, read_stored, write_trained_on
from r2sm_jax.models.pretrained import fill_sizes
from r2sm_jax.sources import (
    open_reported,
    open_selecting,
    open_training,
    warn_of_shared_pictures,
)
from r2sm_jax.synthetic.queries.sentences import target_sentences, write_text_only_queries
from r2sm_jax.training.completer import COMPLETER
from r2sm_jax.training.crops import crop_task
from r2sm_jax.training.loop import Task, fit
from r2sm_jax.training.outliner import OUTLINER
from r2sm_jax.training.processes import (
    check_same,
    describe_devices,
    make_mesh,
    run_on_main,
    running,
)
from r2sm_jax.training.run_folder import (
    check_run_folder,
    find_run,
    has_checkpoint,
    open_run,
    read_config,
    resolve_auto,
)
from r2sm_jax.training.segmenter import prepare_data, segmenter_task

CROP_PARTS = {
    "completer": (COMPLETER, completer_evaluation),
    "outliner": (OUTLINER, outliner_evaluation),
}
"""What is trained on crops, and what scores it."""

WRITTEN_TARGETS = 3
"""How many times each sentence whose target was labelled by hand is repeated among the generated
ones."""


def train(config: Config) -> Path:
    """Runs one experiment: data, model, loop, report. Returns its run folder.

    Raises InputError for something that the user can put right; the message says how.
    """
    config = resolve_auto(config)
    run_on_main(lambda: check_run_folder(config))
    earlier = find_run(config) if config.resume else config.init and find_folder(config.init)
    if config.train.part == "segmenter":
        known = read_config(earlier).model if earlier else None
        model = fill_sizes(config.model, known)
        if known is not None:
            # The constants of classifier and target head come with the weights, so that the earlier
            # run says whether there are any, whatever the flags say.
            model = replace(model, classifier=known.classifier, target=known.target)
        config = replace(config, model=model)
    check_same(flatten_dict(to_json(config), sep="."))
    mesh = make_mesh(config.train, config.distributed.fsdp)

    # What is wrong with a split or with weights is found now.
    source, selecting = open_training(config), open_selecting(config)
    print(f"{len(source):,} training images", flush=True)
    reported = open_reported(config) if config.train.part == "segmenter" else {}
    warn_of_shared_pictures(source, {config.train.select_on: selecting, **reported})
    # The loop reads the weights of a checkpoint.
    has_checkpoints = config.resume and has_checkpoint(find_run(config))
    published = not config.init and not has_checkpoints
    task, inputs = make_task(config, source, selecting, published=published)
    if config.init and not has_checkpoints:
        nnx.update(task.model, initial_weights(config.init, config))

    with open_run(config, inputs) as folder:
        print(f"run folder {folder}", flush=True)
        if not config.resume:
            before = [earlier] if earlier else []
            run_on_main(lambda: write_trained_on(folder, source.fingerprints(), before))
        seconds = fit(task, folder, config, mesh, keeps_start=config.init is not None)
        if seconds is None:
            print(f"continue with python -m r2sm_jax.train --resume --run {folder}", flush=True)
            return folder
        if read_stored(folder)["step"] == 0:
            print(
                f"no step was better on {config.train.select_on} than {config.init}, whose weights "
                "the run keeps; add photos with masks, or lower --optimizer.learning-rate and "
                "--optimizer.muon-learning-rate",
                flush=True,
            )
        if reported:
            run_on_main(lambda: report_on_best(config, folder, reported, seconds))
    return folder


def make_task(
    config: Config, source: Source, selecting: Source, *, published: bool
) -> tuple[Task, dict[str, Any]]:
    """Makes what is trained. Returns also the hashes of what it reads.

    `selecting`: the split that selects the best weights; `published`: whether the model gets
    its published weights and what is computed from the data; False where the caller puts the
    weights of a run or a checkpoint in their place.
    """
    if config.train.part != "segmenter":
        part, make_evaluation = CROP_PARTS[config.train.part]
        task = crop_task(
            part, config, source, make_evaluation(config, selecting), published=published
        )
        return task, {"data": {"sha256": hash_data(source, read_some(source))}}

    # Only heads that read words learn from sentences without an image.
    reads_words = config.model.head in LEARNED_HEADS or config.model.target
    num_text_only = config.data.text_only_queries if reads_words else 0
    text_only = write_text_only_queries(num_text_only, seed=config.data.seed)
    with_target = [*text_only, *WRITTEN_TARGETS * target_sentences("target_train")]
    data = prepare_data(config, source, text_only, with_target)
    fit_absence = data.has_absent_targets
    evaluation = segmenter_evaluation(config, data.texts, selecting, fit_absence=fit_absence)
    language_model = {"name": config.model.text.name, **data.texts.identity}
    inputs = {"language_model": language_model, "data": {"sha256": data.sha256}}
    return segmenter_task(config, data, evaluation, published=published), inputs


def initial_weights(name: str, config: Config) -> nnx.State:
    """Loads what `--init` names. Raises InputError if it has other sizes than are trained."""
    part = config.train.part
    if part == "segmenter":
        return load_weights(name, config.model)
    initial = load_part(name, part)
    if initial.config != getattr(config.model, part):
        raise InputError(
            f"--init {name}: its {part} has other sizes; give --model.{part} as in {initial.config}"
        )
    return initial.weights


def report_on_best(
    config: Config, folder: Path, sources: Mapping[str, Source], seconds: float
) -> None:
    """Evaluates the best weights on every reported split and writes the report."""
    run = load_run(folder, matmul_precision=config.train.matmul_precision)
    spec = config.data.source
    report, evaluated = evaluate(run, sources, spec, trained_on=spec)
    report["meta"]["minutes"] = round(seconds / 60, 2)
    write_report(report, evaluated, folder)
    lines = describe_result(report)
    lines.append(f"report: {folder / 'report.html'}")
    lines.append(f"next: {write_question(folder, next(iter(sources.values())))}")
    print("\n".join(lines), flush=True)


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
    config = parse_config(sys.argv[1:])
    if config.resume:
        resumed = read_config(find_run(config))
        any_devices = replace(resumed, train=replace(resumed.train, devices=0))
        config = parse_config(sys.argv[1:], default=any_devices)
    if config.train.deterministic:
        # XLA reads its flags when a device is first used.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    with running(config.distributed):
        print(describe_devices(), flush=True)
        # XLA calls it an error if compiling takes two minutes. What goes wrong is raised.
        jax.config.update("jax_logging_level", "CRITICAL")
        train(config)


if __name__ == "__main__":
    cli_main(main)
