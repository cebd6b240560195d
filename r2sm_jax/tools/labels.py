"""`data labels`: the masks of a data set as segmentation labels of YOLO."""

import json
from collections import Counter
from pathlib import Path, PurePath

import numpy as np
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import number_classes
from r2sm_jax.data.readers.coco import read_coco
from r2sm_jax.errors import InputError, atomic_write, refuse_overwrite
from r2sm_jax.query import MaskType


def labels(data: Positional[str], /, mask: MaskType, out: Path, overwrite: bool = False) -> None:
    """Writes the masks of a data set as YOLO's segmentation labels, with a data.yaml.

    Args:
        data: A dataset file, or a COCO file.
        mask: The mask of each object: modal, what shows of it, or amodal, the whole of it.
        out: The folder to write.
        overwrite: Replace labels that exist.
    """
    refuse_overwrite(out / "data.yaml", overwrite)
    collector = Collector(is_strict=True)
    truths = list(read_coco(Path(data.removeprefix("json:")), collector=collector))
    classes = number_classes(truths, collector.categories).values()
    names = [record["name"] for record in sorted(classes, key=lambda record: record["id"])]
    files = [PurePath(truth.file_name).with_suffix(".txt") for truth in truths]
    for file, count in Counter(files).most_common(1):
        if count > 1:
            raise InputError(
                f"{data}: {count} images would have the labels {file}; give them other names"
            )
    num_objects = num_left_out = 0
    texts = []
    for truth in truths:
        height, width = truth.size
        lines = []
        for instance in truth.instances:
            rle = instance.modal if mask == "modal" else instance.amodal
            corners = np.empty((0, 2))
            if rle is not None and not instance.ignore:
                corners = masks.one_polygon(masks.expand(rle))
            if not len(corners):
                num_left_out += 1
                continue
            shares = (corners / (width, height)).clip(0, 1).ravel()
            words = [str(names.index(instance.category)), *(f"{share:.6f}" for share in shares)]
            lines.append(" ".join(words) + "\n")
        num_objects += len(lines)
        texts.append("".join(lines))
    if not num_objects:
        raise InputError(f"{data}: it has no {mask} masks; data complete draws amodal ones")
    for text, file in zip(texts, files, strict=True):
        with atomic_write(out / "labels" / file) as part:
            part.write_text(text, "utf-8")
    # JSON is YAML.
    described = {"train": "images", "val": "images", "names": names}
    with atomic_write(out / "data.yaml") as part:
        part.write_text(json.dumps(described, indent=1) + "\n", "utf-8")
    print(f"wrote {out}: {num_objects} {mask} masks of {len(truths)} images")
    if num_left_out:
        print(f"{num_left_out} are left out: ignored, or without {mask} mask")
    print(f"put the images into {out / 'images'}; data.yaml has all of them in train and in val")
