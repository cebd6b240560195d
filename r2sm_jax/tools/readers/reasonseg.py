"""Reads ReasonSeg (LISA, dvlab-research/LISA utils/data_processing.py): X.jpg with X.json beside it.

Polygons labelled "target" are the answer, those with "ignore" in their label are left out of loss and metrics; they are
painted in descending area, so that a smaller one wins where two overlap. Only the visible mask is known.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data.records import bad_record
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion, draw, need


def read_reasonseg(
    sources: Sequence[Path], images_dir: Path | None = None, explanatory: Path | None = None
) -> Conversion:
    """Reads ReasonSeg files, or folders of them, into records with modal queries.

    `explanatory` is the file `explanatory/train.json` with textual answers. Raises InputError for anything that is not
    right.
    """
    found = Conversion()
    answers = {} if explanatory is None else _answers(explanatory)
    for path in _files(sources):
        record = load_json(path, "a ReasonSeg annotation")
        texts = need(path, "the file", record, "text", list)
        shapes = need(path, "the file", record, "shapes", list)
        number, height, width = found.add_image(_image(path, images_dir or path.parent))
        painted = np.zeros((height, width), np.uint8)
        drawn = [_shape(path, f"shapes[{i}]", shape, (height, width)) for i, shape in enumerate(shapes)]
        for value, mask in sorted(filter(None, drawn), key=lambda pair: -int(pair[1].sum())):
            painted[mask] = value
        target = []
        if (painted == 1).any():
            target = [found.add_annotation(number, "target", modal=painted == 1, amodal=None)]
        if (painted == 255).any():
            found.add_annotation(number, "ignored", modal=painted == 255, amodal=None, ignore=True)
        task = "reasoning" if record.get("is_sentence") else "referring"
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise bad_record(path, "text", "a query is empty", "write one")
            answer = answers.get((found.images[-1]["file_name"], text))
            found.add_query(number, text, "modal", target, kind={"task": task}, answer=answer)
    if not found.images:
        raise InputError(f"{', '.join(map(str, sources))}: there is no ReasonSeg annotation here; give its JSON files")
    return found


def _files(sources: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        if not source.exists():
            raise InputError(f"{source}: there is no such file or folder; check the path")
        files += sorted(source.glob("*.json")) if source.is_dir() else [source]
    return files


def _image(path: Path, folder: Path) -> Path:
    for suffix in (".jpg", ".jpeg", ".png"):
        if (folder / (path.stem + suffix)).is_file():
            return folder / (path.stem + suffix)
    raise InputError(f"{path}: no image {path.stem}.jpg in {folder}; give its folder with --images DIR")


def _shape(path: Path, where: str, shape: Any, size: tuple[int, int]) -> tuple[int, np.ndarray] | None:
    label = need(path, where, shape, "label", str)
    if label == "flag":
        return None
    if label != "target" and "ignore" not in label:
        raise bad_record(path, where, f"its label {label!r} is neither target nor ignore", "correct it")
    points = need(path, where, shape, "points", list)
    flat = [x for point in points if isinstance(point, list) for x in point]
    return (255 if "ignore" in label else 1), draw(path, where, flat, *size)


def _answers(path: Path) -> dict[tuple[str, str], str]:
    listed = load_json(path, "ReasonSeg's explanatory/train.json")
    if not isinstance(listed, list):
        raise InputError(f"{path}: this is no list of answers; give ReasonSeg's explanatory/train.json")
    found = {}
    for index, record in enumerate(listed):
        image, query, answer = (need(path, f"[{index}]", record, key, str) for key in ("image", "query", "outputs"))
        found[(image, query)] = answer
    return found
