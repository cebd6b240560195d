"""`python -m r2sm_jax.evaluate RUN [--data SPEC] [--split val]`: the figures of a trained segmenter.

`--predictions FILE --data SPEC` scores the masks of any other system by the same code, and `--compare A B ...` puts
reports side by side.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown
from scipy.special import expit

from r2sm_jax.cli import parse_flags
from r2sm_jax.config import LEARNED_HEADS, Config, DataConfig, ProcessConfig
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.sources import REPORTED, SourceSpec, intent_sentences, open_dataset, split_names
from r2sm_jax.errors import InputError, cli_main, writing
from r2sm_jax.evaluation import compare
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import make_report, sentence_figures, write_report
from r2sm_jax.evaluation.scorer import QueryTruth, Scored, truths_at
from r2sm_jax.evaluation.tables import markdown, page, render
from r2sm_jax.inference.predictor import BATCH_ROWS, Predictor, Request
from r2sm_jax.inference.run import enable_compilation_cache, load
from r2sm_jax.models.mask_type_heads import REFERENCES
from r2sm_jax.models.matmul import tune_malloc
from r2sm_jax.query import Sentence
from r2sm_jax.training.sharding import gather, is_first, running

Evaluated = dict[str, tuple[Source, Scored]]
"""Source and scores of every split."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Scores a run, or the masks of any other system, on a data set."""

    run: Annotated[str | None, tyro.conf.Positional] = None
    """Run folder, export, or hf:owner/name of one on the Hugging Face hub; none with --predictions."""
    predictions: str | None = None
    """File or folder of masks to score, see docs/metrics.md."""
    format: str = "auto"
    """Format of the predictions: coco, png or logits; auto: found from the file or folder."""
    data: str | None = None
    """scenes, compose:FILE, cutouts:DIR, json:FILE or tfds:DIR; default: what the run was trained on."""
    split: str | None = None
    """One split, or several with commas. Default, or all: every val split of scenes, composed photos and cut-outs; the
    whole of one file; all but train and dev of a folder or of TFDS. A run without --data reports val of one file. With
    --predictions one split."""
    images: str | None = None
    """Folder of the images of a json source. --predictions are scored without images too."""
    backgrounds: str | None = None
    """Folder of photos to lay cut-outs over; default: drawn backdrops."""
    samples: int | None = None
    """Procedural or composed scenes a split; default: as in the run's report."""
    compare: tuple[str, ...] = ()
    """Folders of reports (runs, or what --out wrote) to put side by side; the others are compared with the first."""
    verbose: bool = False
    """Print how many programs were compiled, and how long that took."""
    out: str | None = None
    """Folder for report.json, report.md, report.html and queries.csv. Default: the run folder if RUN is no export and
    --data, --samples, --split and --checkpoint are left out; else nothing is written."""
    checkpoint: str = "best"
    """best (highest gIoU on the split --train.select-on), latest, or the number of a step."""
    distributed: ProcessConfig = field(default_factory=ProcessConfig)


def score_source(predictor: Predictor, source: Source) -> Scored:
    """Answers every query of a source that can be scored, and scores the answers.

    The decision of the model selects the mask. Masks are compared at the images' own resolution. Several processes
    divide the images, `BATCH_ROWS` at a time, and each gets the scores of all: the same as one process would compute.
    """
    images = [index for index in range(len(source)) if source.queries_at(index)]
    parts = [images[start : start + BATCH_ROWS] for start in range(0, len(images), BATCH_ROWS)]
    process, processes = jax.process_index(), jax.process_count()
    mine = parts[process::processes]
    reads_truth = predictor.config.head == "oracle"
    predictor.text_encoder.encode(
        query.text for part in mine for index in part for query in source.queries_at(index)
    )

    def score_part(part: list[int]) -> Scored:
        # The truth of an image is read when its request is made, and used when its predictions come.
        truths: list[list[QueryTruth]] = []

        def requests() -> Iterator[Request]:
            for index in part:
                sample = source[index]
                truths.append([t for t in truths_at(source, index, sample) if t.scored])
                queries = [truth.query for truth in truths[-1]]
                mask_types = [query.mask_type for query in queries] if reads_truth else None
                yield Request(sample.image, [query.text for query in queries], mask_types)

        scored = Scored()
        predictions = predictor.predict_batches(requests(), with_candidates=True)
        for number, of_image in enumerate(predictions):
            for truth, prediction in zip(truths[number], of_image, strict=True):
                scored.add(truth, prediction)
        return scored

    of_processes = gather([score_part(part) for part in mine])
    whole = Scored()
    for number in range(len(parts)):
        whole.merge(of_processes[number % processes][number // processes])
    return whole


def evaluate(
    predictor: Predictor,
    sources: dict[str, Source],
    *,
    spec: str,
    step: int,
    trained: Config,
    selected: bool = True,
) -> tuple[dict[str, Any], Evaluated]:
    """The report on a segmenter, and the scores that it was made from. `trained` is how it was trained, `selected`
    whether the checkpoint was selected by its figures."""
    is_same_data = SourceSpec.parse(spec).is_same_data(SourceSpec.parse(trained.data.source))
    evaluated = {
        name: (source, score_source(predictor, source)) for name, source in sources.items()
    }
    report = make_report(
        evaluated,
        {"val_r2sm": decide(predictor, intent_sentences("val_r2sm"))} if spec == "scenes" else {},
        source=spec,
        step=step,
        threshold=predictor.config.mask_threshold,
        head=predictor.config.head,
        weights_sha256=predictor.weights_sha256,
        language_model_sha256=predictor.text_encoder.sha256,
        selected_on=trained.train.select_on if selected else None,
        trained_on=spec if is_same_data else trained.data.source,
        **{
            name: getattr(trained.train, name)
            for name in ("matmul_precision", "accumulate", "devices")
        },
    )
    return report, evaluated


def decide(predictor: Predictor, sentences: Sequence[Sentence]) -> dict[str, Any]:
    """The figures of the decisions about sentences without an image; None where the head needs an image."""
    head = predictor.config.head
    if head in REFERENCES:
        said = [
            REFERENCES[head](sentence.text, sentence.mask_type) == "amodal"
            for sentence in sentences
        ]
        return sentence_figures(sentences, np.array(said, float), calibrated=False)
    if head not in LEARNED_HEADS:
        return sentence_figures((), np.zeros(0), calibrated=False)
    logits = predictor.amodal_logits([sentence.text for sentence in sentences])
    return sentence_figures(sentences, expit(logits), calibrated=True)


def show(text: str) -> None:
    """Prints Markdown."""
    Console(width=None if sys.stdout.isatty() else 150).print(Markdown(text))


def count_compilations() -> Callable[[], str]:
    """Counts the programs that are compiled from now on; call the result for a line with their number and seconds."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: f"{len(seconds)} programs compiled in {sum(seconds):.1f} s"


def main() -> None:
    """Command line."""
    tune_malloc()
    enable_compilation_cache()
    args = parse_flags(EvaluateConfig, sys.argv[1:], prog="python -m r2sm_jax.evaluate")
    if sum(map(bool, (args.run, args.predictions, args.compare))) != 1:
        raise InputError(
            "give one of them: a run folder, --predictions FILE --data SPEC, or --compare REPORT REPORT"
        )
    if args.samples is not None and args.samples < 1:
        raise InputError(
            f"--samples {args.samples}: a split needs scenes; give 1 or more, or leave the flag out"
        )
    if args.compare:
        return _compare([Path(folder) for folder in args.compare], args.out)
    if (
        args.out
        and args.data
        and SourceSpec.parse(args.data).is_same_data(
            SourceSpec(SourceSpec.parse(args.data).kind, Path(args.out))
        )
    ):
        raise InputError(
            f"--out {args.out}: report.json would look like a split of the data; give another folder"
        )
    with running(args.distributed):
        report, evaluated, out = _evaluate_run(args) if args.run else _evaluate_predictions(args)
        show(markdown(report, brief=True))
        if out is not None and is_first():
            write_report(report, evaluated, out)
            print(f"wrote {out / 'report.html'}, report.md, report.json and queries.csv")


def _evaluate_run(args: EvaluateConfig) -> tuple[dict[str, Any], Evaluated, Path | None]:
    folder, compiled = Path(args.run or ""), count_compilations()
    run = load(folder, checkpoint=args.checkpoint)
    trained = run.config.data
    data = DataConfig(source=args.data, seed=trained.seed) if args.data else trained
    split, selected = args.split or ("all" if args.data else REPORTED), args.checkpoint == "best"
    data = replace(
        data, images=args.images or data.images, backgrounds=args.backgrounds or data.backgrounds
    )
    count = args.samples or run.config.train.report_samples
    size = run.config.model.vision.image_size
    sources = {
        name: open_dataset(data, name, image_size=size, count=count)
        for name in split_names(data.source, split)
    }
    report, evaluated = evaluate(
        run.predictor,
        sources,
        spec=data.source,
        step=run.step,
        trained=run.config,
        selected=selected,
    )
    if not any(scored.results for _, scored in evaluated.values()):
        raise InputError(
            f"{data.source}: there are no queries; write some with python -m r2sm_jax.data queries"
        )
    if args.verbose:
        print(compiled())
    as_trained = selected and split == REPORTED and not (args.samples or run.is_export)
    return report, evaluated, Path(args.out) if args.out else folder if as_trained else None


def _evaluate_predictions(args: EvaluateConfig) -> tuple[dict[str, Any], Evaluated, Path | None]:
    path = Path(args.predictions or "")
    if args.data is None:
        raise InputError("--predictions are for some data; give it as --data json:FILE")
    split, *others = split_names(args.data, args.split or "all")
    if others:
        raise InputError(
            f"--predictions are for one split; give one --split of {', '.join((split, *others))}"
        )
    data = DataConfig(source=args.data, images=args.images, backgrounds=args.backgrounds)
    count = args.samples or 256
    source = open_dataset(data, split, image_size=96, count=count, need_images=False)
    scored = score_predictions(path, source, args.format)
    if not scored.results:
        raise InputError(
            f"{args.data}: no query of the split {split} can be scored; give queries with true masks"
        )
    evaluated: Evaluated = {split: (source, scored)}
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    about = {"predictions": path.name, "predictions_sha256": digest, "missing": scored.missing}
    return (
        make_report(evaluated, source=args.data, **about),
        evaluated,
        Path(args.out) if args.out else None,
    )


def _compare(folders: list[Path], out: str | None) -> None:
    compared = compare.compare(folders)
    text = compare.markdown(compared)
    show(text)
    if out is not None:
        file = Path(out) / "compare.html"
        with writing(file) as part:
            part.write_text(page("R2SM evaluations side by side", render(text)), "utf-8")
            file.with_suffix(".json").write_text(json.dumps(compared, indent=1) + "\n", "utf-8")
            file.with_suffix(".md").write_text(text, "utf-8")
        print(f"wrote {file}, compare.md and compare.json")


if __name__ == "__main__":
    cli_main(main)
