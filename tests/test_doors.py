"""One file of masks through every door: `data check`, `data convert`, `data complete`, `compose:`.

What is wrong with a file is found by the one reader, so every door says it in the same words.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from PIL import Image
from run_files import save_completer

from r2sm_jax.config import CompleterConfig, Crowds
from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.synthetic.photos import Photos

SIZE = HEIGHT, WIDTH = 48, 64
CONFIG = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
BOXES = [[6, 8, 20, 22], [32, 12, 20, 22]]
"""x, y, width and height of the two objects of each image."""


def rectangle(x: float, y: float, width: float, height: float) -> list:
    return [[x, y, x + width, y, x + width, y + height, x, y + height]]


def good() -> dict[str, Any]:
    """Two images with two objects each, as every tool writes them."""
    annotations = []
    for number in range(4):
        x, y, width, height = BOXES[number % 2]
        annotation = {"id": number + 1, "image_id": 1 + number // 2, "category_id": 3, "iscrowd": 0}
        annotation |= {"segmentation": rectangle(x, y, width, height)}
        annotations.append(annotation | {"bbox": [x, y, width, height], "area": width * height})
    size = {"height": HEIGHT, "width": WIDTH}
    return {
        "images": [{"id": n, "file_name": f"{n}.png", **size} for n in (1, 2)],
        "annotations": annotations,
        "categories": [{"id": 3, "name": "box"}],
    }


def with_each(key: str, **fields: Any) -> dict[str, Any]:
    """The file with other fields in all records of a list."""
    records = good()
    for record in records[key]:
        record |= {name: make(record) if callable(make) else make for name, make in fields.items()}
    return records


def without(key: str, name: str) -> dict[str, Any]:
    """The file without a field of the records of a list."""
    records = good()
    for record in records[key]:
        del record[name]
    return records


def inverted(annotation: dict[str, Any]) -> Any:
    mask = masks.from_segmentation(annotation["segmentation"], *SIZE)
    return masks.encode(~mask)


REFUSED = {
    "share their file with another": with_each("images", file_name="1.png"),
    "its id 1 is no whole number, or occurs twice": with_each("images", id=1),
    "its id occurs twice": with_each("annotations", id=lambda a: a["image_id"]),
    "inverted": with_each("annotations", segmentation=inverted, bbox=None, area=None),
    "bboxes contradict": with_each("annotations", bbox=[40, 1, 9, 40]),
    "cannot be called 'hidden'": with_each("annotations", attributes={"hidden": "no"}),
    "cannot be called 'a/b'": with_each("annotations", attributes={"a/b": "no"}),
    "iscrowd is 'maybe'": with_each("annotations", iscrowd="maybe"),
    r'annotation "a": .*\$\.id': with_each("annotations", id="a"),
    r"annotation 1.5: .*\$\.id": with_each("annotations", id=1.5),
    r"annotation 1: image \[1\] is not in the file": with_each("annotations", image_id=[1]),
    "its id 'a' is no whole number": with_each("images", id="a"),
    r"images\[0\]: 'id' is missing": without("images", "id"),
    r"categories\[0\] is no class .* `name`": without("categories", "name"),
    r"categories\[0\] is no class .*\$\.name": with_each("categories", name=None),
    r"annotations\[0\]: it is no object": good() | {"annotations": [good()["annotations"]]},
    "'images' is no list": good() | {"images": {}},
}
"""What is said of a file that no door lets in."""
doubled = good()["annotations"] + [a | {"id": 10 + a["id"]} for a in good()["annotations"][:2]]
NOTED = {
    "2 of 6 annotations cover another of the same class": good() | {"annotations": doubled},
    "2 of 4 bboxes contradict": with_each(
        "annotations", bbox=lambda a: a["bbox"] if a["id"] < 3 else [40, 1, 9, 40]
    ),
    "1 of 4 objects are ignored|1 crowds or ignored|1 of them ignored": with_each(
        "annotations", iscrowd=lambda a: a["id"] == 4
    ),
    "objects of a category without a name": with_each("categories", name="\u200b"),
    "": with_each("annotations", score=float("nan")),
}
"""What is said of a file that every door lets in."""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with two photos and a completer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (2, *SIZE, 3), np.uint8)
    for number, image in enumerate(pixels, start=1):
        Image.fromarray(image).save(tmp_path / "photos" / f"{number}.png")
    _, weights = nnx.split(make_completer(CONFIG, rngs=nnx.Rngs(0)))
    save_completer(tmp_path / "completer", MaskCompleter(CONFIG, weights))
    return tmp_path


@pytest.fixture
def doors(place, command, capsys) -> Callable[..., dict[str, tuple[int, str]]]:
    """Takes a file through every door. Returns the exit code of each, and what was said."""

    def take(content: Any, crowds: Crowds = "ignore") -> dict[str, tuple[int, str]]:
        (place / "file.json").write_text(json.dumps(content))
        images = "--images", "photos", *(["--crowds", crowds] if crowds == "objects" else [])
        model = "--model", "completer"
        said = {}
        for name, words in {
            "check": ("check", "file.json", *images),
            "convert": ("convert", "coco", "file.json", *images, "--out", "converted.json"),
            "complete": ("complete", "file.json", *images, *model, "--out", "draft.json"),
        }.items():
            end = command(main, *words)
            said[name] = end.code, end.out + end.err
        try:
            Photos("file.json", "photos", crowds).path_of(0)
            said["compose"] = 0, capsys.readouterr().err
        except InputError as error:
            said["compose"] = 2, str(error)
        return said

    return take


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_no_door_lets_in(sentence, doors, place):
    for door, (code, said) in doors(REFUSED[sentence]).items():
        assert code == 2 and re.search(sentence, said), (door, said)
        assert "Traceback" not in said, door
    assert not list(place.glob("*ed.json")) and not (place / "draft.json").exists()


@pytest.mark.parametrize("sentence", NOTED)
def test_what_every_door_says_and_lets_in(sentence, doors):
    for door, (code, said) in doors(NOTED[sentence]).items():
        assert code == 0 and re.search(sentence, said), (door, said)


def test_crowds_can_be_objects_at_every_door(doors):
    crowds = with_each("annotations", iscrowd=1)
    for door, (code, said) in doors(crowds).items():
        assert code == (0 if door == "convert" else 2) and "--crowds objects" in said, (door, said)
    (place_of_out,) = Path().glob("converted.json")
    place_of_out.unlink()
    for door, (code, said) in doors(crowds, "objects").items():
        assert code == 0 and "ignored in" not in said, (door, said)


def test_names_of_coco_2014_are_found_by_every_door(doors):
    names = with_each("images", file_name=lambda i: f"COCO_val2014_{i['file_name']}")
    assert {code for code, _ in doors(names).values()} == {0}


def test_files_that_add_no_photo_are_refused(place):
    """Beside another file, too, where they would pass without a word."""
    for name, content in (("file.json", good()), ("empty.json", good() | {"annotations": []})):
        (place / "photos" / name).write_text(json.dumps(content))
    file, empty = place / "photos" / "file.json", place / "photos" / "empty.json"
    other = place / "photos" / "other.json"
    other.write_text(json.dumps(good()))
    with pytest.raises(InputError, match=r"/file\.json: this file is given twice"):
        Photos([other, file, file])
    with pytest.raises(InputError, match=r"empty\.json: it has no annotations"):
        Photos([file, empty])


def test_what_is_odd_in_many_files_is_said_once(place, capsys):
    odd = good()
    odd["annotations"][0]["iscrowd"] = 1
    files = [place / "photos" / f"{number}.json" for number in range(20)]
    for file in files:
        file.write_text(json.dumps(odd))
    for _ in ("train", "dev"):
        Photos(files)
    assert capsys.readouterr().err.count("are ignored in") == 20
