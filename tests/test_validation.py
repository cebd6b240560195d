"""The dataset format: the faults of records, and what they state twice and differently."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from r2sm_jax import train
from r2sm_jax.data import masks
from r2sm_jax.data.contradictions import Contradiction, compare_records
from r2sm_jax.data.dataset import read_json, write_records
from r2sm_jax.data.validation import is_text, parse, problems
from r2sm_jax.errors import InputError

HEIGHT, WIDTH = 60, 100
BOXES = [(50, 5, 20, 10), (70, 30, 12, 24), (5, 20, 8, 30), (40, 40, 25, 9)]
"""x, y, width, height of four objects."""


def box_mask(x: int, y: int, width: int, height: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y : y + height, x : x + width] = True
    return mask


def make_records(segmentations: list, boxes: list | None = None, **fields) -> dict:
    """One image with four objects, whose true boxes are stated unless others are given."""
    annotations = []
    for number, segmentation in enumerate(segmentations):
        box = list((boxes or BOXES)[number])
        annotation = {"id": number + 1, "image_id": 1, "category_id": 1, "bbox": box}
        annotations.append(annotation | {"segmentation": segmentation} | fields)
    return {
        "images": [{"id": 1, "file_name": "a.png", "height": HEIGHT, "width": WIDTH}],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "box"}],
        "queries": [],
    }


def polygon(x: float, y: float, width: float, height: float) -> list:
    return [[x, y, x + width, y, x + width, y + height, x, y + height]]


def swapped(box: tuple) -> list:
    x, y, width, height = box
    return polygon(y, x, height, width)


def row_by_row(box: tuple) -> dict:
    runs = np.flatnonzero(np.diff(box_mask(*box).ravel().astype(int), prepend=0))
    counts = np.diff([0, *runs, HEIGHT * WIDTH]).tolist()
    return {"size": [HEIGHT, WIDTH], "counts": counts}


def inverted(box: tuple) -> dict:
    return masks.encode(~box_mask(*box))


def halved(box: tuple) -> list:
    return polygon(*(side / 2 for side in box))


def find_problems(records: dict) -> list[str]:
    return list(problems(json.dumps(records).encode()))


def find_contradictions(records: dict) -> list[Contradiction]:
    return list(compare_records(parse(Path("x.json"), json.dumps(records).encode())))


SMALL = masks.encode(np.ones((5, 5), bool))
FAULTS = {
    r"list 'queries' is missing": {"queries": None},
    r"list 'images' is missing": {"images": {}},
    r"images\[0\]: .*`id`": ("images", 0, {"id": None}),
    r"annotation 2: the id 2 occurs twice": ("annotations", 0, {"id": 2}),
    r"category 1: .*`name`": ("categories", 0, {"name": None}),
    r"image 1: file_name ''": ("images", 0, {"file_name": ""}),
    r"'\.\./1\.png' is no path inside": ("images", 0, {"file_name": "../1.png"}),
    r"'/etc/x\.png' is no path inside": ("images", 0, {"file_name": "/etc/x.png"}),
    r"'C:.*' is no path inside": ("images", 0, {"file_name": "C:\\x.png"}),
    r"image 1: .*>= 1 - at `\$\.height`": ("images", 0, {"height": 0}),
    r"image 1: .*`bool` - at `\$\.width`": ("images", 0, {"width": True}),
    r"image 1: .* are more than": ("images", 0, {"width": 10**9}),
    r"annotation 1: image_id 77 is no image": ("annotations", 0, {"image_id": 77}),
    r"annotation 1: category_id 5 is no category": ("annotations", 0, {"category_id": 5}),
    r"annotation 1: .*at `\$\.category_id`": ("annotations", 0, {"category_id": []}),
    r"annotation 1: it has neither": ("annotations", 0, {"segmentation": None}),
    r"visible_mask has the size 5 x 5, its": ("annotations", 0, {"visible_mask": SMALL}),
    r"segmentation is neither": ("annotations", 0, {"segmentation": "x"}),
    r"segmentation is neither an RLE nor": ("annotations", 0, {"segmentation": []}),
    r"segmentation is no RLE": ("annotations", 0, {"segmentation": {"counts": ""}}),
    r"annotation 1: .*`\$\.attributes": ("annotations", 0, {"attributes": "red"}),
    r"cannot be called 'hidden'": ("annotations", 0, {"attributes": {"hidden": "yes"}}),
    r"cannot be called 'a/b'": ("annotations", 0, {"attributes": {"a/b": "yes"}}),
    r"annotation 1: ignore is 'maybe'": ("annotations", 0, {"ignore": "maybe"}),
    r"query 1: text '  '": ("queries", 0, {"text": "  "}),
    r"query 1: .*'whole'": ("queries", 0, {"mask_type": "whole"}),
    r"query 1: instance_ids: 99 is no": ("queries", 0, {"instance_ids": [99]}),
    r"query 1: .*`\$\.kind`": ("queries", 0, {"kind": "hard"}),
    r"query 1: image_id 8 is no image": ("queries", 0, {"image_id": 8, "instance_ids": []}),
}
"""What is wrong -> the record that is changed and its new fields; None = left out."""


def spoil(records: dict, fault: object) -> None:
    if isinstance(fault, dict):
        record, values = records, fault
    else:
        key, index, values = fault
        record = records[key][index]
    for name, value in values.items():
        record[name] = value
        if value is None:
            del record[name]


@pytest.mark.parametrize("sentence", FAULTS)
def test_faults_are_named(tmp_path, sentence):
    records = make_records([polygon(*box) for box in BOXES])
    query = {"id": 1, "image_id": 1, "text": "the box", "mask_type": "modal", "instance_ids": [1]}
    records["queries"].append(query)
    assert not find_problems(records)
    spoil(records, FAULTS[sentence])
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records))
    with pytest.raises(InputError, match=sentence) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(InputError, match=sentence):
        write_records(tmp_path / "again.json", records)
    assert not (tmp_path / "again.json").exists()
    assert any(re.search(sentence, problem) for problem in find_problems(records))


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe{", "[" * 100_000])
def test_files_that_are_no_dataset(tmp_path, content):
    (tmp_path / "x.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"x\.json: no dataset file"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("wrong", [swapped, row_by_row, inverted, halved])
def test_masks_that_contradict_their_boxes(wrong):
    contradiction, *_ = find_contradictions(make_records([wrong(box) for box in BOXES]))
    assert contradiction.count == contradiction.compared == 4
    assert contradiction.is_systematic and "bboxes contradict" in str(contradiction)


def test_one_wrong_object_of_four_is_counted_but_not_systematic():
    segmentations = [swapped(BOXES[0]), *(polygon(*box) for box in BOXES[1:])]
    (contradiction,) = find_contradictions(make_records(segmentations))
    assert str(contradiction).startswith("1 of 4 bboxes")
    assert not contradiction.is_systematic


def as_corners(box: tuple) -> tuple:
    x, y, width, height = box
    return x, y, x + width, y + height


@pytest.mark.parametrize(
    "records",
    [
        make_records([polygon(*box) for box in BOXES]),
        make_records([masks.encode(box_mask(*box)) for box in BOXES]),
        make_records([polygon(*box) for box in BOXES], [as_corners(box) for box in BOXES]),
        make_records([polygon(*box) for box in BOXES], [(0, 0, 0, 0)] * 4),
        make_records([polygon(*box) for box in BOXES], [(0, 0, 1, 1)] * 4),
        make_records([polygon(*box) for box in BOXES], area=1),
        # The stated box is that of the visible half.
        make_records(
            [polygon(0, 0, WIDTH, HEIGHT)], visible_mask=masks.encode(box_mask(*BOXES[0]))
        ),
    ],
)
def test_no_false_alarm(records):
    assert not find_contradictions(records)


def test_areas_are_compared_where_boxes_agree():
    records = make_records([polygon(*box) for box in BOXES], area=9000)
    (contradiction,) = find_contradictions(records)
    assert "4 of 4 areas" in str(contradiction)


def test_exchanged_masks():
    small = masks.encode(box_mask(*BOXES[0]))
    large = masks.encode(np.ones((HEIGHT, WIDTH), bool))
    records = make_records([small] * 4, [BOXES[0]] * 4, visible_mask=large)
    (contradiction,) = find_contradictions(records)
    assert "larger" in str(contradiction) and contradiction.is_systematic


def test_masks_of_different_objects():
    visible, complete = [masks.encode(box_mask(*box)) for box in BOXES[:2]]
    records = make_records([complete] * 4, [BOXES[1]] * 4, visible_mask=visible)
    (contradiction,) = find_contradictions(records)
    assert "beside their complete masks" in str(contradiction) and contradiction.is_systematic


def test_the_visible_mask_of_another_format_is_not_passed_over():
    records = make_records([polygon(*box) for box in BOXES])
    records["annotations"][0]["inmodal_seg"] = polygon(*BOXES[0])
    (problem,) = problems(json.dumps(records).encode())
    assert problem.startswith("annotation 1: inmodal_seg is not read here")


@pytest.mark.parametrize("name", ["a.png", "./a.png", ".\\a.png"])
def test_images_that_share_a_file(name):
    records = make_records([polygon(*box) for box in BOXES])
    records["images"].append(records["images"][0] | {"id": 2, "file_name": name})
    (contradiction,) = find_contradictions(records)
    assert "a.png" in str(contradiction) and contradiction.count == 2


def test_case_tells_two_files_apart():
    records = make_records([polygon(*box) for box in BOXES])
    records["images"].append(records["images"][0] | {"id": 2, "file_name": "A.png"})
    assert not find_contradictions(records)


def test_reading_refuses_a_file_that_contradicts_itself(tmp_path: Path):
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "a.png")
    path = tmp_path / "data.json"
    path.write_text(json.dumps(make_records([polygon(*box) for box in BOXES])))
    assert len(read_json(path)) == 1
    path.write_text(json.dumps(make_records([swapped(box) for box in BOXES])))
    with pytest.raises(InputError, match=r"data\.json: 4 of 4 bboxes "):
        read_json(path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("the café", True),
        ("the caf\udce9", False),  # half of a character, as JSON and shells may hold it
        ("", False),
        (" \n\u200b\u2060\xad", False),  # characters that nobody sees
        ("\u200b.", True),
        (3, False),
    ],
)
def test_text_has_a_visible_character_and_no_half_ones(value, expected):
    assert is_text(value) is expected


def test_polygons_outside_of_their_image():
    records = make_records([polygon(*(2 * side for side in box)) for box in BOXES])
    records["annotations"] = [a | {"bbox": None} for a in records["annotations"]]
    (contradiction,) = find_contradictions(records)
    assert (contradiction.count, contradiction.compared) == (3, 4)
    assert "no pixel" in str(contradiction)


def test_training_names_the_splits_that_share_its_pictures(tmp_path, capsys):
    splits = {}
    for name, file_name in (("train", "a.png"), ("val", "./a.png"), ("test", "b.png")):
        records = make_records([polygon(*box) for box in BOXES])
        records["images"][0]["file_name"] = file_name
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(records))
        splits[name] = read_json(path, need_images=False)
    train.warn_of_shared_pictures(splits.pop("train"), splits)
    (line,) = capsys.readouterr().out.splitlines()
    assert "1 of 1 pictures are in both" in line and "train and val" in line
