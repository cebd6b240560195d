"""Small annotation files in the layouts of other projects."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, read_json
from r2sm_jax.tools.coco import PRESETS, MaskOptions, read_coco_like
from r2sm_jax.tools.records import Collector, collect, write_json

HEIGHT, WIDTH = 20, 30
SIZE = {"height": HEIGHT, "width": WIDTH}
REAL_DATA = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data"))


def real(name: str) -> Path:
    """A path of real data; skips the test if it is missing."""
    path = REAL_DATA / name
    if not path.exists():
        pytest.skip(f"there is no {path} (set R2SM_REAL_DATA)")
    return path


def mask(
    x0: int, y0: int, x1: int, y1: int, height: int = HEIGHT, width: int = WIDTH
) -> np.ndarray:
    block = np.zeros((height, width), bool)
    block[y0:y1, x0:x1] = True
    return block


FRONT = mask(2, 2, 12, 12)
BACK = mask(8, 6, 24, 18)
BACK_VISIBLE = BACK & ~FRONT


def square(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def points(*corners: float) -> list[list[float]]:
    flat = square(*corners)
    return [flat[i : i + 2] for i in range(0, 8, 2)]


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def photo(path: Path, height: int = HEIGHT, width: int = WIDTH, colour: str = "olive") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), colour).save(path)
    return path


def read_coco(
    *sources: Path,
    preset: str = "d2sa",
    max_bad: float = 0.01,
    images: Path | None = None,
    **options,
) -> Collector:
    """Collects COCO-like files; padded images go to a folder beside the first."""
    items = read_coco_like(
        sources,
        PRESETS[preset],
        MaskOptions(**options),
        images_dir=images,
        padded_dir=sources[0].parent / "padded",
    )
    return collect(items, max_bad)


def dataset_of(collector: Collector, folder: Path, images: Path | None = None) -> Dataset:
    """The dataset file of a conversion, written and read again."""
    collector.make_file_names_relative(folder / "out.json")
    write_json(folder / "out.json", collector.to_records("test"), overwrite=True)
    return read_json(folder / "out.json", images)


def instances() -> dict[str, Any]:
    """A file of COCO's own: the visible masks of the same two objects, and a crowd."""
    shared = {"image_id": 7, "category_id": 44, "iscrowd": 0}
    crowd = {**shared, "id": 33, "iscrowd": 1, "segmentation": masks.encode(~(FRONT | BACK))}
    annotations = [
        {**shared, "id": 31, "segmentation": masks.encode(FRONT)},
        {**shared, "id": 32, "segmentation": masks.encode(BACK_VISIBLE)},
        crowd,
    ]
    return coco(annotations=annotations)


def coco(**changes: Any) -> dict[str, Any]:
    """A COCO-cls file with one image: one object in front, one behind."""
    front = masks.encode(FRONT)
    rate = 1 - masks.area(BACK_VISIBLE) / masks.area(BACK)
    shared = {"image_id": 7, "category_id": 44, "iscrowd": 0}
    annotations = [
        {**shared, "id": 31, "segmentation": front, "visible_mask": front, "occlude_rate": 0.0},
        {
            **shared,
            "id": 32,
            "segmentation": masks.encode(BACK),
            "visible_mask": masks.encode(BACK_VISIBLE),
            "occlude_rate": rate,
        },
    ]
    content = {
        "images": [{"id": 7, "file_name": "a.jpg", **SIZE}],
        "annotations": annotations,
        "categories": [{"id": 44, "name": "bottle"}],
    }
    return content | changes


def renamed(content: dict[str, Any], **names: str) -> dict[str, Any]:
    """The file with other names for fields of its annotations."""
    for annotation in content["annotations"]:
        for old, new in names.items():
            annotation[new] = annotation.pop(old)
    return content


def many(count: int = 200) -> dict[str, Any]:
    """`coco` with so many annotations."""
    content = coco()
    front = content["annotations"][0]
    content["annotations"] += [front | {"id": number} for number in range(100, 98 + count)]
    return content


def check_pair(sample) -> None:
    """The two objects of `coco`, masks equal to the pixel."""
    front, back = sample.instances
    assert (front.modal == FRONT).all() and (front.amodal == FRONT).all()
    assert (back.modal == BACK_VISIBLE).all() and (back.amodal == BACK).all()


# Original COCOA, 40 x 60 pixels


def cocoa(image_id: int | None = 3, **changes: Any) -> dict[str, Any]:
    """A mug in front of a box, on a table (stuff). The mug hides a third of the box."""
    corners = {"Mug ": (10, 10, 30, 30), "box": (20, 12, 50, 28), "table": (0, 25, 60, 40)}
    covered = np.zeros((40, 60), bool)
    regions = []
    for order, (name, box) in enumerate(corners.items(), start=1):
        complete = masks.from_segmentation(square(*box), 40, 60)
        visible = complete & ~covered
        region = {
            "name": name,
            "segmentation": square(*box),
            "order": order,
            "isStuff": int(name == "table"),
            "occlude_rate": 1 - masks.area(visible) / masks.area(complete),
        }
        if order > 1:
            region["visible_mask"] = masks.encode(visible)
        covered |= complete
        regions.append(region)
    url = "https://example.org/x/photo.jpg"
    return {"image_id": image_id, "url": url, "regions": regions, **changes}


def save_cocoa(
    folder: Path, name: str = "one.json", image: str = "one.jpg", **changes: Any
) -> Path:
    photo(folder / image, 40, 60, "teal")
    return write(folder / name, cocoa(**changes))


# Questions


def mmr() -> list[dict[str, Any]]:
    """Four questions about a mug and its handle; the text answer of the last has too many
    `{seg}`."""
    cup = {"category_name": "mug", "segmentation": masks.encode(BACK)}
    handle = {"category_name": "mug:handle", "segmentation": masks.encode(FRONT)}
    image = {"image_id": 5, "file_name": "train2017/5.jpg", **SIZE}
    image["questions"] = ["Drink?", "Hold?", "Both?", "Lost?"]
    image["answers"] = [[cup], [handle], [cup, handle], [cup]]
    image["text_answers"] = ["the {seg}", "its {seg}", "{seg} and {seg}", "{seg} {seg}"]
    return [image]


def refs(**changes: Any) -> list[dict[str, Any]]:
    """RefCOCO: one reference of the split train, with changes, and the same of val."""
    sentences = [{"sent": "left one"}, {"sent": " "}]
    ref = {"ref_id": 1, "ann_id": 31, "image_id": 7, "split": "train", "sentences": sentences}
    return [ref | changes, ref | {"split": "val"}]


def lisa(**changes: Any) -> dict[str, Any]:
    """A LISA++ question about two instances of the image 1.jpg."""
    corners = {"1": (2, 2, 12, 12), "2": (20, 2, 25, 12)}
    shapes = {
        number: {"label name": "cup", "points": [points(*box)]} for number, box in corners.items()
    }
    answer = "instance id is 1, label name is cup; instance id is 2, label name is cup"
    question = {"English Question": "Which?", "English Answer": answer, "ID": ["1", "2"]}
    return {**question, "points": shapes, "img_path": "1.jpg", **changes}


def reasonseg(*shapes: dict[str, Any], text: str = "what can be eaten?") -> dict[str, Any]:
    return {"text": [text], "is_sentence": True, "shapes": list(shapes)}
