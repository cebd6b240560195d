"""Reads segmentation labels of YOLO: a data.yaml that names a folder of images, and for each image
a text file with a line `class x1 y1 x2 y2 ...` an object, in shares of the image's size.

The labels of `images/a.jpg` are `labels/a.txt`, as in ultralytics' own loader.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import ImageTruth, Instance
from r2sm_jax.data.images import image_size, images_below
from r2sm_jax.errors import InputError, read_bytes

MAX_SHARE = 1.5
"""Of the image's size, by which an outline may reach out of it."""


def read_yolo(
    path: Path, images_dir: Path | None, split: str, collector: Collector
) -> Iterator[ImageTruth]:
    """Reads the visible masks of a split; file names are paths. An image without a file of labels
    has no objects.

    `images_dir` stands in the place of the folder that the file names. Raises InputError for a
    file that is not of the kind.
    """
    try:
        stated = yaml.safe_load(read_bytes(path))
        names = stated["names"]
        names = names if isinstance(names, dict) else dict(enumerate(names))
        for number, name in names.items():
            collector.add_category(str(name), {"id": number + 1})
        place = str(stated[split] if images_dir is None else images_dir.resolve())
        root = path.parent / (stated.get("path") or "")
    except (yaml.YAMLError, TypeError, KeyError):
        raise InputError(f"{path}: it has no names, or no {split}; give a data.yaml") from None
    # Roboflow writes ../train/images for a folder beside data.yaml.
    folder = next(
        (f for f in (root / place, path.parent / place.removeprefix("../")) if f.is_dir()), None
    )
    if folder is None:
        raise InputError(
            f"{path}: {root / place} is no folder; correct `path`, or give --images DIR"
        )
    numbers = count(1)
    for image_id, file in enumerate(images_below(folder), start=1):
        with collector.record(str(file)):
            size = image_size(file)
            found = tuple(read_labels(label_file(file), size, names, numbers, collector))
            yield ImageTruth(image_id, str(file.resolve()), size, found, ())


def label_file(image: Path) -> Path:
    """Where the labels of an image are: in `labels` in the place of the last folder `images`."""
    head, found, tail = image.as_posix().rpartition("/images/")
    return Path(f"{head}/labels/{tail}" if found else image).with_suffix(".txt")


def read_labels(
    file: Path,
    size: tuple[int, int],
    names: Mapping[int, Any],
    numbers: Iterator[int],
    collector: Collector,
) -> Iterator[Instance[masks.RLE]]:
    """The objects of a file of labels."""
    lines = read_bytes(file).decode().splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        with collector.record(f"{file}: line {number}"):
            kind, *shares = map(float, line.split())
            if len(shares) == 4:
                raise ValueError("it is a box and no mask")
            if len(shares) < 6 or len(shares) % 2 or max(map(abs, shares)) > MAX_SHARE:
                raise ValueError("give shares x y of the image's size, from 0 to 1")
            if kind not in names:
                raise ValueError(f"class {kind:g} is none of `names`")
            corners = np.reshape(shares, (-1, 2)) * size[::-1]
            rle = masks.compressed([corners.ravel().tolist()], *size)
            if not any(masks.areas([rle])):
                raise ValueError("its mask has no pixel in the image")
            yield Instance(next(numbers), str(names[int(kind)]), rle, None)
