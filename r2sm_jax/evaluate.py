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
from r2sm_jax.data.masks import union
from r2sm_jax.data.queries import keyword_mask_type
from r2sm_jax.data.schema import Query, Sample
from r2sm_jax.data.sheet import Panel, prediction_row
from r2sm_jax.data.sources import SPLITS, Source, is_procedural, open_source
from r2sm_jax.data.transforms import Letterbox
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.huge_pages import use_huge_pages
from r2sm_jax.metrics.report import QueryResult, markdown, score_query, split_figures, write_report
from r2sm_jax.models.heads import NO_HEAD
from r2sm_jax.predictor import Predictor
from r2sm_jax.runs import open_run

ROWS = 8
"""Images a batch; fixed, like the queries a row, so that nothing is compiled twice."""
QUERIES = 8


@dataclass(frozen=True)
class EvaluateConfig:
    """Scores a run on a data set."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder."""
    data: str | None = None
    """scenes, cutouts:DIR or json:FILE; default: what the run was trained on."""
    split: str = "all"
    """One split, several joined by commas, or all that the data has."""
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
    return modal, modal | union((i.modal if i.amodal is None else i.amodal for i in meant), shape)


def evaluate_split(
    predictor: Predictor, source: Source, *, sheet_rows: int = 0
) -> tuple[list[QueryResult], list[list[Panel]]]:
    """Results of every query, and panels of the first few for a sample sheet."""
    results: list[QueryResult] = []
    panels: list[list[Panel]] = []
    rows: list[Row] = []
    for row in rows_of(source):
        rows.append(row)
        if len(rows) == ROWS:
            _score(predictor, rows, results, panels, sheet_rows)
            rows = []
    if rows:
        _score(predictor, rows, results, panels, sheet_rows)
    return results, panels


def _score(
    predictor: Predictor, rows: list[Row], results: list[QueryResult], panels: list[list[Panel]], sheet_rows: int
) -> None:
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
        ignored = [i.modal if i.amodal is None else i.amodal for i in sample.instances if i.ignore]
        ignore = union(ignored, sample.image.shape[:2]) if ignored else None
        probabilities = predictor.probabilities(
            answers.probability[b, :count], texts[b][:count], [q.mask_type for q in row.queries]
        )
        modal, amodal = box.undo(answers.modal[b, :count]) > 0, box.undo(answers.amodal[b, :count]) > 0
        shown = len(panels) % count if len(panels) < sheet_rows else None  # one query an image
        for k, query in enumerate(row.queries):
            truth, predicted = truth_of(sample, query), (modal[k], modal[k] | amodal[k])
            probability = None if predictor.config.head == NO_HEAD else float(probabilities[k])
            results.append(
                score_query(
                    query_id=query.id,
                    image_id=sample.image_id,
                    mask_type=query.mask_type,
                    probability=probability,
                    keyword=keyword_mask_type(query.text),
                    predicted=predicted,
                    truth=truth,
                    ignore=ignore,
                )
            )
            if k == shown:
                amodal_probability = 0.5 if probability is None else probability
                panels.append(
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


def make_report(predictor: Predictor, sources: dict[str, Source], *, spec: str, step: int) -> dict[str, Any]:
    """Evaluates every split. See DESIGN: `report.json`."""
    splits = {}
    for name, source in sources.items():
        predictor.texts.add(q.text for row in rows_of(source) for q in row.queries)
        splits[name] = split_figures(evaluate_split(predictor, source)[0])
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
    """Prints the tables."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(Markdown(markdown(report)))


def main() -> None:
    """Command line."""
    use_huge_pages()
    args = parse_flags(EvaluateConfig, sys.argv[1:], prog="python -m r2sm_jax.evaluate")
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
    if out:
        try:
            write_report(report, out)
        except OSError as error:
            raise InputError(f"{out}: the report cannot be written ({error.strerror}); pass another --out") from None
        print(f"wrote {out / 'report.json'} and report.md")


if __name__ == "__main__":
    exit_cleanly(main)
