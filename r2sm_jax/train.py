"""`python -m r2sm_jax.train [CONFIG.py] [--flags]`: trains a segmenter and reports on it, or trains
a completer or an outliner (`--train.part`).

A run folder holds everything (training/run_folder.py). `--resume` continues from the last
checkpoint. Its last parameters are bit for bit those of a run that never stopped, on the same
machine and devices.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from r2sm_jax.cli import check_first, cli_main, parse_config, to_json

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_first(lambda: parse_config(sys.argv[1:]))

import jax
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from PIL import Image

from r2sm_jax.config import LEARNED_HEADS, Config
from r2sm_jax.data.dataset import Sample, Source, hash_data, read_some
from r2sm_jax.data.sheet import save_sheet
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.evaluation.calibration import calibrate
from r2sm_jax.evaluation.completion import (
    REFERENCE_METHODS,
    choose_threshold,
    mean_iou,
    outliner_figures,
    print_figures,
    score_completion,
    scored_objects,
)
from r2sm_jax.evaluation.evaluator import evaluate, evaluate_source
from r2sm_jax.evaluation.page import example_rows, sample_queries, write_report
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.evaluation.tables import describe_result
from r2sm_jax.inference.crop_models import MaskCompleter, MaskOutliner
from r2sm_jax.inference.load import enable_compilation_cache, load, load_part, load_weights
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.pretrained import fill_sizes
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.synthetic.queries.sentences import intent_sentences, write_text_only_queries
from r2sm_jax.synthetic.sources import (
    open_reported,
    open_selecting,
    open_training,
    warn_of_shared_pictures,
)
from r2sm_jax.training.crop_models import CropTask
from r2sm_jax.training.loop import Evaluate, Evaluation, Task, fit
from r2sm_jax.training.processes import check_same, make_mesh, run_on_main, running
from r2sm_jax.training.run_folder import (
    find_run,
    has_checkpoint,
    open_run,
    read_config,
    resolve_auto,
)
from r2sm_jax.training.segmenter import SegmenterTask, TrainingData, prepare_data

SHEET_ROWS = 6


def train(config: Config) -> Path:
    """Runs one experiment: data, model, loop, report. Returns its run folder.

    Raises InputError for something that the user can put right; the message says how.
    """
    resumed = read_config(find_run(config)) if config.resume else None
    config = resolve_auto(config, resumed)
    known = resumed or (read_config(Path(config.init)) if config.init else None)
    config = replace(config, model=fill_sizes(config.model, known and known.model))
    check_same(flatten_dict(to_json(config), sep="."))
    mesh = make_mesh(config.train, config.distributed.fsdp)

    # What is wrong with a split or with weights is found now.
    is_segmenter = config.train.part == "segmenter"
    source, dev = open_training(config), open_selecting(config)
    print(f"{len(source):,} training images", flush=True)
    reported = open_reported(config) if is_segmenter else {}
    warn_of_shared_pictures(source, {config.train.select_on: dev, **reported})
    make_task = segmenter_task if is_segmenter else crop_task
    is_new = not (config.resume and has_checkpoint(find_run(config)))
    task, inputs = make_task(config, source, dev, mesh, is_new)

    with open_run(config, inputs) as folder:
        print(f"run folder {folder}", flush=True)
        fitted = fit(task, folder, config.train)
        if not fitted.is_complete:
            print(f"continue with python -m r2sm_jax.train --resume --run {folder}", flush=True)
        elif reported:
            run_on_main(lambda: report_on_best(config, folder, reported, fitted.seconds))
    return folder


# Tasks, with the hashes of what they are trained with


def segmenter_task(
    config: Config, source: Source, dev: Source, mesh: Mesh, is_new: bool
) -> tuple[Task, dict[str, Any]]:
    """Makes the task of the segmenter.

    Args:
        dev: selects the best weights.
        is_new: whether no checkpoint gives the weights.
    """
    # Only a head that reads words learns from sentences without an image.
    num_text_only = config.data.text_only_queries if config.model.head in LEARNED_HEADS else 0
    text_only = write_text_only_queries(num_text_only, seed=config.data.seed)
    data = prepare_data(config, source, text_only)
    task = SegmenterTask(config, data, mesh, SegmenterEvaluation(config, data, dev))
    if is_new and config.init:
        task.set_weights(load_weights(config.init, config.model))
    elif is_new:
        task.load_pretrained()
    language_model = {"name": config.model.text.name, **data.texts.identity}
    return task, {"language_model": language_model, "data": {"sha256": data.sha256}}


class SegmenterEvaluation:
    """Calibrates and scores a segmenter on the split that selects, and saves a sheet of samples."""

    def __init__(self, config: Config, data: TrainingData, dev: Source):
        graphdef, _ = nnx.split(abstract_model(config.model))
        self._open = partial(Predictor, config.model, graphdef, text_encoder=data.texts)
        self._predictor: Predictor | None = None  # compiles once
        self._fits_absence = data.has_absent_targets
        self._dev = dev

    def __call__(self, weights: nnx.State, step: int, folder: Path) -> Evaluation:
        """Evaluates the weights of a step."""
        # They may be divided among devices and processes; predicting uses one device.
        weights = jax.device_put(weights, jax.local_devices()[0])
        predictor = self._predictor = self._predictor or self._open(weights=weights)
        predictor = predictor.updated(weights=weights)
        sentences = intent_sentences("calibration")
        calibration = calibrate(predictor, self._dev, sentences, fit_absence=self._fits_absence)
        predictor = predictor.updated(calibration=calibration)
        results = evaluate_source(predictor, self._dev, name="dev").results
        rows = example_rows(self._dev, sample_queries(results, SHEET_ROWS))
        save_sheet(folder / "samples" / f"step_{step:06d}.png", rows, title=f"step {step}")

        split = split_figures(results)
        figures = {
            "giou": split["all"]["giou"],
            "modal": split["modal"]["giou"],
            "amodal": split["amodal"]["giou"],
            "occluded_iou": split["all"]["occluded_iou"],
            "type_accuracy": split["mask_type"]["accuracy"],
        }
        shown = [f"{name} {value:.3f}" for name, value in figures.items() if value is not None]
        print(f"step {step}  dev: {'  '.join(shown)}", flush=True)
        return Evaluation(
            float(figures["giou"] or 0), figures, {"calibration": calibration._asdict()}
        )


def crop_task(
    config: Config, source: Source, dev: Source, mesh: Mesh, is_new: bool
) -> tuple[Task, dict[str, Any]]:
    """Makes the task of a completer or outliner. Arguments as in `segmenter_task`."""
    part = config.train.part
    sizes = getattr(config.model, part)
    samples = [dev[index] for index in range(len(dev))]
    make_evaluation = completer_evaluation if part == "completer" else outliner_evaluation
    evaluation = make_evaluation(config, samples)
    task = CropTask(config, source, mesh, evaluation)
    if is_new and config.init:
        initial = load_part(config.init, part)
        if initial.config != sizes:
            raise InputError(
                f"--init {config.init}: its {part} has other sizes; give --model.{part} as in "
                f"{initial.config}"
            )
        task.set_weights(initial.weights)
    elif is_new:
        task.load_pretrained()
    return task, {"data": {"sha256": hash_data(source, read_some(source))}}


def completer_evaluation(config: Config, samples: Sequence[Sample]) -> Evaluate:
    """Makes what scores a completer beside rules that learn nothing, and chooses its threshold.
    Raises InputError if nothing is hidden in the samples."""
    references = score_completion(REFERENCE_METHODS, samples)
    if not references["visible mask"]["hidden"]["objects"]:
        raise InputError(
            f"{config.data.source}: the split dev has no hidden object whose complete shape is "
            "known; give compose:FILE, which hides objects, or data with amodal masks"
        )
    sizes = config.model.completer
    untrained = MaskCompleter(sizes, nnx.State({}))

    def evaluate_weights(weights: nnx.State, step: int, folder: Path) -> Evaluation:
        completer = untrained.updated(weights=weights)
        threshold, figures = choose_threshold(
            lambda threshold: completer.updated(threshold=threshold), samples
        )
        print_figures(references | figures)
        stored = {"config": to_json(sizes), "threshold": threshold}
        return Evaluation(mean_iou(figures), references | figures, {"completer": stored})

    return evaluate_weights


def outliner_evaluation(config: Config, samples: Sequence[Sample]) -> Evaluate:
    """Makes what scores an outliner. Raises InputError if no object is large enough."""
    if not any(scored_objects(sample) for sample in samples):
        raise InputError(
            f"{config.data.source}: the split dev has no object of 64 or more visible pixels; give "
            "more images"
        )
    sizes = config.model.outliner
    untrained = MaskOutliner(sizes, nnx.State({}))

    def evaluate_weights(weights: nnx.State, step: int, folder: Path) -> Evaluation:
        figures = outliner_figures(untrained.updated(weights=weights), samples)
        shown = [f"{name} {values['iou']:.3f}" for name, values in figures.items()]
        print(f"modal IoU of {figures['box']['objects']} objects: {', '.join(shown)}", flush=True)
        score = figures["box"]["iou"] + figures["click"]["iou"]
        return Evaluation(score, figures, {"outliner": {"config": to_json(sizes)}})

    return evaluate_weights


# The report


def report_on_best(
    config: Config, folder: Path, sources: Mapping[str, Source], seconds: float
) -> None:
    """Evaluates the best weights on every reported split and writes the report."""
    run = load(folder, matmul_precision=config.train.matmul_precision)
    spec = config.data.source
    report, evaluated = evaluate(
        run.predictor,
        sources,
        {"val_r2sm": intent_sentences("val_r2sm")} if spec == "scenes" else {},
        trained=config,
        source=spec,
        step=run.step,
        selected_on=config.train.select_on,
        trained_on=spec,
    )
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
    args = sys.argv[1:]
    config = parse_config(args)
    has_config_file = bool(args) and not args[0].startswith("-")
    if config.resume and not has_config_file:
        resumed = read_config(find_run(config))
        any_devices = replace(resumed.train, devices=0)
        config = parse_config(args, default=replace(resumed, train=any_devices))
    if config.train.deterministic:
        # XLA reads its flags when a device is first used.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    with running(config.distributed):
        train(config)


if __name__ == "__main__":
    cli_main(main)
