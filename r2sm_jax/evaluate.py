"""`python -m r2sm_jax.evaluate RUN [--data SPEC] [--split val]`: the figures of a trained segmenter.

Free-running: the predicted mask type picks the mask. At original resolution: masks are compared with the truth as
it was annotated, not as the model saw it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown

import r2sm_jax
from r2sm_jax.config import parse_flags
from r2sm_jax.data import masks
from r2sm_jax.data.masks import union
from r2sm_jax.data.queries import keyword_mask_type
from r2sm_jax.data.schema import Dataset, Instance, Query, Sample
from r2sm_jax.data.sheet import Panel, prediction_row
from r2sm_jax.data.sources import SPLITS, Source, is_procedural, open_source
from r2sm_jax.data.transforms import Letterbox
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.huge_pages import use_huge_pages
from r2sm_jax.metrics.instances import InstanceScores
from r2sm_jax.metrics.pages import markdown
from r2sm_jax.metrics.predictions import score_predictions
from r2sm_jax.metrics.report import split_figures, write_report
from r2sm_jax.metrics.scoring import QueryResult, score_query
from r2sm_jax.models.heads import NO_HEAD
from r2sm_jax.predictor import Predictor
from r2sm_jax.runs import open_run

ROWS = 8
"""Images a batch; fixed, like the queries a row, so that nothing is compiled twice."""
QUERIES = 8


@dataclass(frozen=True)
class EvaluateConfig:
    """Scores a run, or the masks of any other system, on a data set."""

    run: Annotated[str | None, tyro.conf.Positional] = None
    """Run folder; none with --predictions."""
    predictions: str | None = None
    """File or folder of masks to score, see docs/metrics.md."""
    format: str = "auto"
    """Of the predictions: coco, png or logits; auto tells by what is there."""
    data: str | None = None
    """scenes, cutouts:DIR, json:FILE or tfds:DIR; default: what the run was trained on."""
    split: str = "all"
    """One split, several joined by commas, or all that the data has. Predictions are of one; all: of a whole file."""
    images: str | None = None
    """Folder of the images of a json source."""
    backgrounds: str | None = None
    """Folder of photos to lay cut-outs over; default: drawn backdrops."""
    samples: int | None = None
    """Procedural or composed scenes a split; default: as in the run's report."""
    out: str | None = None
    """Folder for report.json and report.md; default: the run folder, if the data are the run's own and all splits
    are evaluated, else nothing is written."""
    checkpoint: str = "best"
    """best (dev gIoU), latest, or a step."""


class Row(NamedTuple):
    """Up to `QUERIES` queries of one image."""

    sample: Sample
    queries: Sequence[Query]


def rows_of(source: Source) -> Iterator[Row]:
    """Every query of a source once, without those whose requested mask is not annotated."""
    for index in range(len(source)):
        sample = source[index]
        unknown = {i.id for i in sample.instances if i.amodal is None}
        queries = [q for q in sample.queries if q.mask_type == "modal" or not unknown & set(q.instance_ids)]
        for start in range(0, len(queries), QUERIES):
            yield Row(sample, queries[start : start + QUERIES])


def truth_of(sample: Sample, query: Query) -> tuple[np.ndarray, np.ndarray]:
    """Modal and amodal mask of everything that a query means."""
    shape = sample.image.shape[:2]
    meant = [i for i in sample.instances if i.id in query.instance_ids]
    modal = union((i.modal for i in meant), shape)
    return modal, modal | union((_complete(i) for i in meant), shape)


def _complete(instance: Instance) -> np.ndarray:
    """The complete mask, or what is known of it."""
    return instance.modal if instance.amodal is None else instance.amodal


class Evaluated(NamedTuple):
    """What came out of one split."""

    results: list[QueryResult]
    instances: InstanceScores
    panels: list[list[Panel]]
    """The first few queries, for a sample sheet."""


def evaluate_split(predictor: Predictor, source: Source, *, sheet_rows: int = 0) -> Evaluated:
    """Results of every query of a source."""
    found = Evaluated([], InstanceScores(), [])
    rows: list[Row] = []
    for row in rows_of(source):
        rows.append(row)
        if len(rows) == ROWS:
            _score(predictor, rows, found, sheet_rows)
            rows = []
    if rows:
        _score(predictor, rows, found, sheet_rows)
    return found


def _score(predictor: Predictor, rows: list[Row], found: Evaluated, sheet_rows: int) -> None:
    size = predictor.config.vision.image_size
    shapes = [row.sample.image.shape for row in rows]
    boxes = [Letterbox(height, width, size) for height, width, _ in shapes]
    padding = ROWS - len(rows)
    frames = [box.image(row.sample.image) for box, row in zip(boxes, rows, strict=True)]
    valid = [box.valid() for box in boxes]
    texts = [[q.text for q in row.queries] + [""] * (QUERIES - len(row.queries)) for row in rows]
    texts += [[""] * QUERIES] * padding
    answers = predictor.answer(np.stack(frames + frames[:1] * padding), np.stack(valid + valid[:1] * padding), texts)
    for b, (row, box) in enumerate(zip(rows, boxes, strict=True)):
        sample, count = row.sample, len(row.queries)
        ignored = [_complete(i) for i in sample.instances if i.ignore]
        ignore = union(ignored, sample.image.shape[:2]) if ignored else None
        crowd = [] if ignore is None else [masks.encode(ignore)]
        encoded = {i.id: (masks.encode(i.modal), masks.encode(_complete(i))) for i in sample.instances}
        probabilities = predictor.probabilities(
            answers.probability[b, :count], texts[b][:count], [q.mask_type for q in row.queries]
        )
        modal, amodal = box.undo(answers.modal[b, :count]) > 0, box.undo(answers.amodal[b, :count]) > 0
        shown = len(found.panels) % count if len(found.panels) < sheet_rows else None  # one query an image
        for k, query in enumerate(row.queries):
            truth, predicted = truth_of(sample, query), (modal[k], modal[k] | amodal[k])
            probability = None if predictor.config.head == NO_HEAD else float(probabilities[k])
            found.results.append(
                score_query(
                    query_id=query.id,
                    image_id=sample.image_id,
                    mask_type=query.mask_type,
                    probability=probability,
                    keyword=keyword_mask_type(query.text),
                    predicted=predicted,
                    truth=truth,
                    ignore=ignore,
                    known=all(i.amodal is not None for i in sample.instances if i.id in query.instance_ids),
                    kind=query.kind,
                )
            )
            slots = [
                x[b, k] for x in (answers.slot_modal, answers.slot_amodal, answers.slot_presence, answers.slot_iou)
            ]
            wanted = [encoded[i][query.mask_type == "amodal"] for i in dict.fromkeys(query.instance_ids)]
            _add_instances(found.instances, query.id, box, slots, found.results[-1].said == "amodal", wanted, crowd)
            if k == shown:
                amodal_probability = 0.5 if probability is None else probability
                found.panels.append(
                    prediction_row(
                        sample.image,
                        query.text,
                        query.mask_type,
                        (truth[0], truth[1] & ~truth[0]),
                        "amodal" if amodal_probability > 0.5 else "modal",
                        amodal_probability,
                        (predicted[0], predicted[1] & ~predicted[0]),
                    )
                )


def _add_instances(
    instances: InstanceScores, query_id: int, box: Letterbox, slots: Sequence[np.ndarray], amodal: bool,
    wanted: Sequence[masks.RLE], crowd: Sequence[masks.RLE],
) -> None:  # fmt: skip
    """The slots of one query as detections, ranked by presence times predicted IoU, against the instances it means."""
    modal, whole, presence, iou = slots
    drawn = box.undo(modal) > 0
    drawn = drawn | (box.undo(whole) > 0) if amodal else drawn
    ranked = [
        (masks.encode(mask), float(score))
        for mask, score in zip(drawn, presence * iou[:, int(amodal)], strict=True)
        if mask.any()
    ]
    instances.add(
        query_id, [m for m, _ in ranked], [s for _, s in ranked], [*wanted, *crowd],
        [False] * len(wanted) + [True] * len(crowd),
    )  # fmt: skip


def make_report(predictor: Predictor, sources: dict[str, Source], *, spec: str, step: int) -> dict[str, Any]:
    """Evaluates every split. See DESIGN: `report.json`."""
    splits = {}
    for name, source in sources.items():
        predictor.texts.add(q.text for row in rows_of(source) for q in row.queries)
        found = evaluate_split(predictor, source)
        splits[name] = split_figures(found.results, found.instances)
    meta = {
        "source": spec,
        "step": step,
        "variant": "lisa",
        "resolution": "original",
        "threshold": predictor.config.mask_threshold,
        "head": predictor.config.head,
        "images": {n: len(s) for n, s in sources.items()},
        "language_model_sha256": predictor.texts.sha256,
        "version": r2sm_jax.__version__,
    }
    return {"splits": splits, "meta": meta}


def open_splits(spec: str, split: str, **options: Any) -> dict[str, Source]:
    """The sources of the splits that were asked for. `options` are those of `open_source`.

    Raises:
        InputError: a split does not exist.
    """
    if split != "all":
        return {name: open_source(spec, name, **options) for name in split.split(",")}
    if is_procedural(spec):
        return {name: open_source(spec, name, **options) for name in SPLITS if name.startswith("val")}
    kind, _, name = spec.partition(":")
    path = Path(name)
    if kind == "json" and name and path.is_dir():
        names = sorted(f.stem for f in path.glob("*.json") if f.stem != "train")
        if not names:
            raise InputError(f"{path}: no split but train; name one with --split")
        return {name: open_source(spec, name, **options) for name in names}
    return {"val": open_source(spec, "val", **options)}


def show_report(report: dict[str, Any]) -> None:
    """Prints the main tables."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(Markdown(markdown(report, brief=True)))


def main() -> None:
    """Command line."""
    use_huge_pages()
    args = parse_flags(EvaluateConfig, sys.argv[1:], prog="python -m r2sm_jax.evaluate")
    if args.predictions is not None:
        _evaluate_predictions(args)
        return
    if args.run is None:
        raise InputError("nothing to evaluate; give a run folder, or --predictions FILE --data SPEC")
    run = open_run(Path(args.run), checkpoint=args.checkpoint)
    data = run.config.data
    spec = args.data or data.source
    own = args.data is None and args.split == "all" and args.samples is None and args.checkpoint == "best"
    images = args.images if args.data else args.images or data.images
    samples = args.samples or run.config.train.report_samples
    size = run.config.model.vision.image_size
    backgrounds = args.backgrounds if args.data else args.backgrounds or data.backgrounds
    sources = open_splits(
        spec, args.split, count=samples, seed=data.seed, size=size, images_dir=images, backgrounds=backgrounds
    )
    report = make_report(run.predictor, sources, spec=spec, step=run.step)
    show_report(report)
    out = Path(args.out) if args.out else (Path(args.run) if own else None)
    _write(report, out)


def _write(report: dict[str, Any], out: Path | None) -> None:
    if out is None:
        return
    try:
        write_report(report, out)
    except OSError as error:
        raise InputError(f"{out}: the report cannot be written ({error.strerror}); pass another --out") from None
    print(f"wrote {out / 'report.json'} and report.md")


def _evaluate_predictions(args: EvaluateConfig) -> None:
    """Scores a file or folder of masks."""
    if args.run is not None:
        raise InputError(f"--predictions: the masks are scored alone; leave {args.run} out, or --predictions")
    if args.data is None:
        raise InputError("--predictions: the data that they are for are missing; give --data json:FILE")
    if "," in args.split:
        raise InputError(f"--split {args.split}: predictions are for one split; name one")
    path = Path(args.predictions or "")
    source = open_source(
        args.data, args.split, count=args.samples or 256, images_dir=args.images, backgrounds=args.backgrounds
    )
    scored = score_predictions(path, source, args.format)
    if not scored.results:
        raise InputError(f"{args.data}: there are no queries in the split {args.split}; give data with queries")
    meta = {
        "source": args.data,
        "predictions": path.name,
        "variant": "lisa",
        "resolution": "original",
        "images": {args.split: len(source)},
        "missing": scored.missing,
        "data_sha256": source.sha256 if isinstance(source, Dataset) else None,
        "version": r2sm_jax.__version__,
    }
    report = {"splits": {args.split: split_figures(scored.results, scored.instances)}, "meta": meta}
    show_report(report)
    _write(report, Path(args.out) if args.out else None)


if __name__ == "__main__":
    exit_cleanly(main)
