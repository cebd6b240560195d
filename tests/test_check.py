"""`data check`: every problem at once, the repaired copy, and leaks."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import InputError
from r2sm_jax.tools.check import check_file, find_leaks, repair

HEIGHT, WIDTH = 12, 16


def mask(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    drawn = np.zeros((HEIGHT, WIDTH), bool)
    drawn[y0:y1, x0:x1] = True
    return drawn


def rle(*corners: int) -> dict[str, Any]:
    return masks.encode(mask(*corners))


def good() -> dict[str, Any]:
    """Two images with two objects each, one of them occluded, and a query for every object."""
    annotations = []
    for image_id in (1, 2):
        for front in (True, False):
            annotation = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": 1,
                "iscrowd": 0,
            }
            annotation["segmentation"] = rle(1, 1, 6, 6) if front else rle(4, 4, 12, 10)
            if not front:
                annotation["visible_mask"] = masks.encode(mask(4, 4, 12, 10) & ~mask(1, 1, 6, 6))
            annotations.append(annotation)
    return {
        "images": [
            {"id": i, "file_name": f"{i}.png", "height": HEIGHT, "width": WIDTH} for i in (1, 2)
        ],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "cup"}],
        "queries": [
            {
                "id": a["id"],
                "image_id": a["image_id"],
                "text": "the cup",
                "mask_type": "amodal",
                "instance_ids": [a["id"]],
            }
            for a in annotations
        ],
    }


def save(folder: Path, records: Any, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        pixels = np.random.default_rng((seed, number)).integers(
            0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8
        )
        Image.fromarray(pixels).save(folder / f"{number}.png")
    path = folder / "data.json"
    path.write_text(json.dumps(records))
    return path


def changed(key: str, index: int, **changes: Any) -> dict[str, Any]:
    records = good()
    records[key][index] |= changes
    return records


def test_a_good_file_has_no_problem(tmp_path):
    assert check_file(save(tmp_path, good()))[1] == []


CASES = {
    "dangling image": (changed("annotations", 1, image_id=9), "annotation 2: image_id is 9"),
    "dangling category": (
        changed("annotations", 1, category_id=9),
        "annotation 2: category_id is 9",
    ),
    "visible outside amodal": (
        changed("annotations", 1, visible_mask=rle(10, 4, 14, 6)),
        "annotation 2: 4 pixels of visible_mask lie outside",
    ),
    "size": (
        changed("annotations", 1, segmentation=masks.encode(np.ones((3, 3), bool))),
        "[3, 3]}; give an RLE of",
    ),
    "empty": (
        changed("annotations", 0, segmentation=rle(0, 0, 0, 0)),
        "annotation 1: its segmentation is empty",
    ),
    "two points": (
        changed("annotations", 0, segmentation=[[1, 1, 5, 5]]),
        "a polygon needs at least three points",
    ),
    "damaged RLE": (
        changed("annotations", 0, segmentation={"size": [HEIGHT, WIDTH], "counts": "1"}),
        "annotation 1: its segmentation cannot be",
    ),
    "duplicate id": (changed("annotations", 1, id=1), "annotations id 1: it occurs twice"),
    "id 0": (changed("annotations", 1, id=0), "annotation 0: its id is 0"),
    "mask type": (changed("queries", 0, mask_type="full"), "query 1: mask_type is 'full'"),
    "empty text": (changed("queries", 0, text="  "), "query 1: text is '  '"),
    "missing image": (changed("images", 1, file_name="x.png"), "image 2: x.png is not in"),
    "outside": (changed("images", 1, file_name="../2.png"), "image 2: file_name is '../2.png'"),
    "other image": (changed("queries", 0, instance_ids=[3]), "query 1: instance_ids is [3]; give"),
    "image size": (
        changed("images", 0, height=HEIGHT + 1),
        "image 1: 1.png is 12 x 16, not 13 x 16",
    ),
    "no queries": (
        {k: v for k, v in good().items() if k != "queries"},
        "the list 'queries' is missing",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_found_and_repaired(case, tmp_path):
    records, sentence = CASES[case]
    path = save(tmp_path, records)
    loaded, problems = check_file(path)
    assert any(sentence in str(problem) for problem in problems), [str(p) for p in problems]
    steps = repair(path, loaded, problems)
    assert steps and all(isinstance(step, str) for step in steps)
    mended = save(tmp_path, loaded)
    assert check_file(mended)[1] == []
    read_json(mended)


def test_all_problems_are_reported_at_once(tmp_path):
    records = changed("queries", 0, text="", mask_type=3)
    records["annotations"][2]["category_id"] = 5
    records["images"][0]["width"] = 0
    (found,) = [check_file(save(tmp_path, records))[1]]
    names = [problem.where for problem in found]
    assert names.count("query 1") == 2 and "annotation 3" in names and "image 1" in names


def test_what_repair_keeps_and_drops(tmp_path):
    records = changed("annotations", 1, visible_mask=rle(10, 4, 14, 6))
    path = save(tmp_path, records)
    loaded, problems = check_file(path)
    (step,) = repair(path, loaded, problems)
    assert "added to the complete mask" in step
    mended = loaded["annotations"][1]
    amodal, visible = masks.decode(mended["segmentation"]), masks.decode(mended["visible_mask"])
    assert (
        not (visible & ~amodal).any() and (amodal == mask(4, 4, 12, 10) | mask(10, 4, 14, 6)).all()
    )
    assert mended["area"] == masks.area(amodal) and len(loaded["queries"]) == 4

    records = changed("images", 0, file_name="gone.png")
    path = save(tmp_path, records)
    loaded, problems = check_file(path)
    repair(path, loaded, problems)
    assert [len(loaded[key]) for key in ("images", "annotations", "queries")] == [1, 2, 2]

    records = changed("annotations", 1, id=0)
    records["queries"][1]["instance_ids"] = [0]
    path = save(tmp_path, records)
    loaded, problems = check_file(path)
    repair(path, loaded, problems)
    assert loaded["annotations"][1]["id"] == 5 and loaded["queries"][1]["instance_ids"] == [5]


def test_an_image_size_that_all_masks_agree_with_is_mended(tmp_path):
    records = good()
    records["images"][0]["height"] = 99
    path = save(tmp_path, records)
    loaded, problems = check_file(path)
    assert len(problems) == 4  # the image, and three masks that do not fit it
    repair(path, loaded, problems)
    assert loaded == good()


def test_a_file_that_nothing_can_be_made_of(tmp_path):
    path = save(tmp_path, {"images": []})
    loaded, problems = check_file(path)
    with pytest.raises(InputError, match="cannot be repaired"):
        repair(path, loaded, problems)


def test_leaks_by_id_and_by_pixels(tmp_path):
    one, other = read_json(save(tmp_path / "a", good(), seed=0)), good()
    for number, image in enumerate(other["images"], start=11):
        image["id"] = number
    for key in ("annotations", "queries"):
        for record in other[key]:
            record["image_id"] += 10
    assert find_leaks(one, read_json(save(tmp_path / "b", other, seed=1))) == []
    same_pixels = find_leaks(one, read_json(save(tmp_path / "c", other, seed=0)))
    assert same_pixels == [
        "1.png and 1.png have the same pixels",
        "2.png and 2.png have the same pixels",
    ]
    by_id = ["image id 1 is in both (1.png)", "image id 2 is in both (2.png)"]
    assert find_leaks(one, read_json(save(tmp_path / "d", good(), seed=2))) == by_id
    assert find_leaks(one, one) == by_id  # an image that is the same in both ways counts once


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "1.png"]),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "size", "counts"]), x, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_change_is_a_problem_or_harmless(tmp_path, data):
    """Whatever stands in a field: no traceback, and the repaired file reads."""
    records = deepcopy(good())
    key = data.draw(st.sampled_from(["images", "annotations", "categories", "queries"]))
    record = data.draw(st.sampled_from(records[key]))
    record[data.draw(st.sampled_from([*record, "visible_mask", "attributes", "kind"]))] = data.draw(
        JSON
    )
    path = save(tmp_path, records)
    loaded, problems = check_file(path)
    repair(path, loaded, problems)
    assert check_file(save(tmp_path, loaded))[1] == []


def test_a_repair_that_would_leave_nothing_is_refused(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(good()))  # without its images
    records, problems = check_file(path)
    with pytest.raises(InputError, match=r"no image would be left .*--images DIR"):
        repair(path, records, problems)
