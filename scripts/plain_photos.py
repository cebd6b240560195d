"""Figures of a model on photographs with nothing laid over them, which no command shows:
`python scripts/plain_photos.py photos-small --data compose:A.json,B.json [--images DIR]`.

    sentences    written about each photo, as `evaluate` writes them about composed ones
    class_names  "the CLASS": what shows of all objects of a class
    box, click   what shows of one object, as in `evaluate` (docs/metrics.md)
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np
import tyro

import r2sm_jax
from r2sm_jax.cli import cli_main, parse_flags
from r2sm_jax.config import DataConfig
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import iou, prompt_figures, scored_objects
from r2sm_jax.evaluation.evaluator import evaluate_source
from r2sm_jax.evaluation.iou import interval, mean, mean_ratio
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.sources import SourceSpec, open_split
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.photos import Photo, PhotoObject
from r2sm_jax.synthetic.queries.nouns import display_name


@dataclass
class PlainPhotosConfig:
    """Measures a model on photographs as they are."""

    model: Annotated[str, tyro.conf.Positional]
    """Run folder, export or released model."""
    data: str
    """compose:FILE, of one or more files with commas."""
    images: str | None = None
    """Folder of the photos; default: beside each file."""
    photos: int = 150
    """Photos of val, evenly chosen."""


def main() -> None:
    """Command line."""
    args = parse_flags(PlainPhotosConfig, sys.argv[1:], prog="scripts/plain_photos.py")
    if args.photos < 1:
        raise InputError(f"--photos {args.photos}: give 1 or more")
    predictor = r2sm_jax.load(args.model)
    data = DataConfig(args.data, images=args.images)
    photos = open_photos(data, predictor.config.vision.image_size, args.photos)
    print(json.dumps(figures_of(predictor, photos), indent=1))


def open_photos(data: DataConfig, size: int, count: int) -> Source:
    """Opens photos of `val`, at most `count` of them. Raises InputError for another source."""
    if SourceSpec.parse(data.source).kind != "compose":
        raise InputError(f"--data {data.source}: give photos with masks, as compose:FILE")
    source = cast(ComposeSource, open_split(data, "val", size=size, count=None))
    source.paster.paste = paste_nothing
    chosen = np.linspace(0, len(source) - 1, min(count, len(source)))
    return source.subset(chosen.round().astype(int).tolist())


def paste_nothing(rng: np.random.Generator, photo: Photo, index: int) -> list[PhotoObject]:
    """Takes the place of `Paster.paste`: the photo stays as it is."""
    return []


def figures_of(predictor: Predictor, photos: Source) -> dict[str, Any]:
    """Computes all figures."""
    of_split = split_figures(evaluate_source(predictor, photos).rows)
    of_all = of_split["all"]
    samples = [photos[index] for index in range(len(photos))]
    figures = {
        "photos": len(photos),
        "sentences": {name: of_all[name] for name in ("queries", "giou", "right_object")},
        "interval": {name: of_all["interval"][name] for name in ("giou", "right_object")},
        "class": of_split["breakdowns"].get("class"),
        "class_names": class_figures(predictor, samples),
    }
    outliner = predictor.parts.outliner
    if outliner is not None:
        figures["filled_box"] = filled_box_iou(samples)
        figures |= prompt_figures(outliner, samples)
    return figures


def filled_box_iou(samples: Iterable[Sample]) -> float | None:
    """Computes the mean IoU of the box around each object, filled, with what shows of it."""
    ious = []
    for sample in samples:
        for instance in scored_objects(sample):
            x0, y0, x1, y1 = masks.box(instance.modal)
            ious.append(masks.area(instance.modal) / ((x1 - x0) * (y1 - y0)))
    return mean(ious)


def class_figures(predictor: Predictor, samples: Iterable[Sample]) -> dict[str, Any]:
    """Computes the mean IoU of "the CLASS" with what shows of all objects of the class, outside of
    ignored regions, and its interval by photo."""
    numbers, ious = [], []
    for number, sample in enumerate(samples):
        size = sample.image.shape[:2]
        counted = ~masks.union((i.modal for i in sample.instances if i.ignore), size)
        visible: dict[str, list[masks.Mask]] = {}
        for instance in sample.instances:
            if not instance.ignore:
                visible.setdefault(display_name(instance.category), []).append(instance.modal)
        texts = [f"the {name}" for name in visible]
        answers = predictor.predict(texts, mask_type="modal", image=sample.image)
        for answer, of_class in zip(answers, visible.values(), strict=True):
            numbers.append(number)
            ious.append(iou(answer.mask & counted, masks.union(of_class, size) & counted))
    bounds = interval(np.array(numbers), mean_ratio(np.array(ious)))
    return {"names": len(ious), "iou": mean(ious), "interval": bounds}


if __name__ == "__main__":
    cli_main(main)
