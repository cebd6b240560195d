"""Reads segmentation labels of YOLO: a data.yaml that names folders of images, and for each image a
text file with a line `class x1 y1 x2 y2 ...` an object, in shares of the image's size.

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

    `images_dir` stands in the place of the folders that the file names. Raises InputError for a
    file that is not of the kind.
    """
    try:
        stated = yaml.safe_load(read_bytes(path))
        names = stated["names"]
        names = names if isinstance(names, dict) else dict(enumerate(names))
        for number, name in names.items():
            collector.add_category(str(name), {"id": number + 1})
        places = stated[split] if images_dir is None else str(images_dir.resolve())
        root = path.parent / (stated.get("path") or "")
    except (yaml.YAMLError, TypeError, KeyError):
        raise InputError(f"{path}: it has no names, or no {split}; give a data.yaml") from None
    places = places if isinstance(places, list) else [places]
    files = [file for place in places for file in list_images(path, root, place)]
    numbers = count(1)
    for image_id, file in enumerate(files, start=1):
        with collector.record(str(file)):
            size = image_size(file)
            found = tuple(read_labels(label_file(file), size, names, numbers, collector))
            yield ImageTruth(image_id, str(file.resolve()), size, found, ())


def list_images(path: Path, root: Path, place: Any) -> list[Path]:
    """The images of a folder, or of a text file with a path a line. Raises InputError if it is
    neither."""
    # Roboflow writes ../train/images for a folder beside data.yaml.
    candidates = [root / str(place), path.parent / str(place).removeprefix("../")]
    for found in candidates:
        if found.is_dir():
            return images_below(found)
        if found.is_file():
            return [found.parent / line for line in read_bytes(found).decode().split("\n") if line]
    raise InputError(f"{path}: there is no {candidates[0]}; correct `path`, or give --images DIR")


def label_file(image: Path) -> Path:
    """Where the labels of an image are: in `labels` in the place of the last folder `images`."""
    parts = list(image.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts).with_suffix(".txt")


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
