"""`data check`: every problem of a dataset file at once, and images that two files share."""

import gzip
import json
from codecs import BOM_UTF8
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.validation import problems
from r2sm_jax.tools.check import find_unusable

HEIGHT, WIDTH = 12, 16
LISTS = ["images", "annotations", "categories", "queries"]


def box_mask(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def box_rle(*corners: int) -> dict[str, Any]:
    return masks.encode(box_mask(*corners))


def good() -> dict[str, Any]:
    """Two images with two objects each, one of them occluded, and a query for every object."""
    visible = masks.encode(box_mask(4, 4, 12, 10) & ~box_mask(1, 1, 6, 6))
    annotations, queries = [], []
    for number in (1, 2, 3, 4):
        image_id = 1 if number <= 2 else 2
        annotation = {"id": number, "image_id": image_id, "category_id": 1, "iscrowd": 0}
        if number % 2:
            annotation["segmentation"] = box_rle(1, 1, 6, 6)
        else:
            annotation |= {"segmentation": box_rle(4, 4, 12, 10), "visible_mask": visible}
        annotations.append(annotation)
        query = {
            "id": number,
            "image_id": image_id,
            "text": f"cup {number}",
            "mask_type": "modal" if number == 4 else "amodal",
        }
        queries.append(query | {"instance_ids": [number]})
    size = {"height": HEIGHT, "width": WIDTH}
    return {
        "images": [{"id": i, "file_name": f"{i}.png", **size} for i in (1, 2)],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "cup"}],
        "queries": queries,
    }


def save(folder: Path, records: Any, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        rng = np.random.default_rng((seed, number))
        pixels = rng.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    path = folder / "data.json"
    path.write_text(json.dumps(records))
    return path


def changed(key: str, index: int, **changes: Any) -> dict[str, Any]:
    records = good()
    records[key][index] |= changes
    return records


def problems_of(path: Path) -> list[str]:
    found = [str(problem) for problem in problems(path.read_bytes())]
    return found or list(find_unusable(read_json(path, need_images=False)))


def test_a_good_file(tmp_path, command):
    end = command(main, "check", save(tmp_path, good()))
    assert end.code == 0 and end.err == ""
    assert "2 images, 4 annotations, 4 queries" in end.out


def with_id_0() -> dict[str, Any]:
    records = changed("annotations", 1, id=0)
    records["queries"][1]["instance_ids"] = [0]
    return records


DAMAGED_RLE = {"size": [HEIGHT, WIDTH], "counts": "1"}
# test_validation.py has those that reading finds as well.
CASES = [
    (
        changed("annotations", 0, segmentation=box_rle(0, 0, 0, 0)),
        "annotation 1: its mask is empty",
    ),
    (changed("annotations", 0, segmentation=[[1, 1, 5, 5]]), "at least three points"),
    (changed("annotations", 0, segmentation=DAMAGED_RLE), "annotation 1: its segmentation cannot"),
    (with_id_0(), "annotation 0: its id is 0"),
    (changed("images", 1, file_name="x.png"), "image x.png is not in"),
    (changed("images", 0, height=HEIGHT + 1), "its image 13 x 16"),
    (changed("annotations", 0, segmentation=[[1, 1, 9, float("nan"), 9, 9]]), "no dataset file"),
]


@pytest.mark.parametrize(("records", "sentence"), CASES)
def test_each_problem(records, sentence, tmp_path):
    problems = problems_of(save(tmp_path, records))
    assert any(sentence in problem for problem in problems), problems


def test_all_problems_at_once(tmp_path, command):
    records = changed("queries", 0, text="", mask_type=3)
    records["annotations"][2]["category_id"] = 5
    records["images"][0]["width"] = 0
    end = command(main, "check", save(tmp_path, records))
    assert end.code == 2 and "Traceback" not in end.err
    listed = [line.partition(":")[0] for line in end.err.splitlines()]
    assert {"query 1", "annotation 3", "image 1"} <= set(listed)
    assert listed[-1] == "error"


def without_queries(**fields: Any) -> dict[str, Any]:
    records = good()
    del records["queries"]
    for record in records["annotations"]:
        record |= fields
    return records


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (without_queries(image_id=7), "4 problems"),
        (
            without_queries(segmentation=[], visible_mask=None, bbox=[1, 1, 5, 5]),
            "a box and no mask",
        ),
        ({"shapes": [], "imageHeight": 3}, "no dataset file: it has shapes, imageHeight"),
        ([{"image_id": 1}], "a list, as COCO results are"),
    ],
)
def test_a_file_of_masks_alone_is_read_as_other_commands_read_it(
    records, sentence, tmp_path, command
):
    end = command(main, "check", save(tmp_path, records))
    assert end.code == 2 and sentence in end.err, end


@pytest.mark.parametrize("words", [["check"], ["convert", "coco"]])
def test_json_without_an_end_of_brackets_is_no_traceback(words, tmp_path, refused):
    path = tmp_path / "deep.json"
    path.write_text('{"images": ' + 3000 * "[" + 3000 * "]" + "}")
    out = ["--out", tmp_path / "out.json"] if words[0] == "convert" else []
    assert "deep.json: this is not JSON (maximum recursion" in refused(main, *words, path, *out)


def test_results_are_read_as_data_complete_reads_them(tmp_path, command):
    boxes = [{"image_id": n, "category_id": 1, "score": 0.9} for n in (1, 2)]
    corners = [box | {"bbox": [WIDTH // 2, 1, WIDTH, HEIGHT]} for box in boxes]
    inside = [box | {"bbox": [1, 1, 9, 9]} for box in boxes]
    for entries, code, said in (
        (corners, 2, "2 of 2 boxes end outside of their image"),
        (inside, 0, "nothing wrong with 2 images, 2 annotations"),
        ([inside], 2, "results[0]: it is no object"),
    ):
        end = command(main, "check", save(tmp_path, entries), "--images", tmp_path)
        assert end.code == code and said in end.out + end.err, end


@pytest.mark.parametrize("records", [without_queries(), good() | {"queries": []}])
def test_good_masks_without_queries_are_no_fault(records, tmp_path, command):
    end = command(main, "check", save(tmp_path, records))
    assert end.code == 0 and "nothing wrong with 2 images, 4 annotations" in end.out
    assert "queries" in end.out


def fully_visible(records: dict[str, Any]) -> dict[str, Any]:
    for annotation in records["annotations"]:
        annotation.pop("visible_mask", None)
    return records


def with_flags(*flags: dict[str, Any]) -> dict[str, Any]:
    records = good()
    for annotation, flag in zip(records["annotations"], flags, strict=False):
        annotation |= flag
    return records


def with_queries(*indices: int) -> dict[str, Any]:
    records = good()
    return records | {"queries": [records["queries"][index] for index in indices]}


def without_targets(records: dict[str, Any]) -> dict[str, Any]:
    for query in records["queries"]:
        query["instance_ids"] = []
    return records


CROWD = {"iscrowd": 1}
ONLY_VISIBLE = {"segmentation": None, "visible_mask": box_rle(1, 1, 6, 6)}
WARNINGS = [
    (with_flags({"ignore": True}), "1 of 4 annotations are ignored"),
    (with_flags(CROWD, CROWD), "2 of 4 annotations are ignored"),
    (with_flags(CROWD), "1 of 4 queries mean ignored annotations only"),
    (changed("annotations", 0, **ONLY_VISIBLE), "1 of 3 amodal queries are about objects whose"),
    (fully_visible(good()), "no object is hidden anywhere"),
    (with_queries(0, 1), "all queries ask for amodal masks"),
    (with_queries(0, 2), "no amodal query is about an object of which a part is hidden"),
    (
        changed("annotations", 1, segmentation=box_rle(1, 1, 6, 6), visible_mask=None),
        "1 of 4 annot",
    ),
    (changed("queries", 1, text="Cup  1", instance_ids=[1]), "1 of 4 queries repeat another"),
    (changed("queries", 1, text="cup 1"), "1 sentences have queries about one image that ask"),
]


@pytest.mark.parametrize(("records", "sentence"), WARNINGS)
def test_warnings(records, sentence, tmp_path, command):
    end = command(main, "check", save(tmp_path, records))
    assert end.code == 0 and "nothing wrong" in end.out
    assert any(line.startswith("warning: ") and sentence in line for line in end.err.splitlines())


def test_boxes_in_the_place_of_masks(tmp_path, command):
    records = good()
    for number in range(10, 30):
        annotation = records["annotations"][0] | {"id": number}
        annotation["segmentation"] = box_rle(1, 1, 2 + number % 12, 3 + number % 7)
        records["annotations"].append(annotation)
    end = command(main, "check", save(tmp_path, records))
    assert end.code == 0 and "24 of 24 complete masks are rectangles" in end.err


MISSING = [
    (good() | {"queries": [], "annotations": []}, "no annotations"),
    (with_flags(*[CROWD] * 4), "all annotations are ignored"),
    (without_targets(good()), "no query has a target"),
    (with_flags(CROWD) | {"queries": good()["queries"][:1]}, "ignored annotations only"),
]


@pytest.mark.parametrize(("records", "word"), MISSING)
def test_files_that_teach_nothing(records, word, tmp_path, refused):
    assert word in refused(main, "check", save(tmp_path, records))


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ({"ignore": 1}, True),
        ({"ignore": "true"}, True),
        ({"iscrowd": True}, True),
        ({"iscrowd": "1"}, True),
        ({"iscrowd": "0", "ignore": "false"}, False),
        ({"iscrowd": 0.0, "ignore": None}, False),
    ],
)
def test_one_meaning_of_ignore_and_iscrowd(flags, ignored, tmp_path):
    path = save(tmp_path, changed("annotations", 0, **flags))
    assert problems_of(path) == []
    assert read_json(path)[0].instances[0].ignore is ignored


def test_leaks(tmp_path, command):
    """By pixels, of dataset files and of COCO files without queries."""
    of_masks = good()
    del of_masks["queries"]
    save(tmp_path / "b", good(), seed=1)
    for name, records in (("a", good()), ("c", of_masks)):
        file = save(tmp_path / name, records, seed=0)
        end = command(main, "check", file, "--against", file)
        assert end.code == 2 and "1.png is in" in end.err and "2 problems" in end.err
        other = tmp_path / "b" / "data.json"
        assert command(main, "check", file, "--against", other).code == 0


def test_pictures_of_another_split(tmp_path, command):
    """By name. Other files of the folder are no splits; a mark before the text is none of it."""
    save(tmp_path, good()).rename(tmp_path / "train.json")
    (tmp_path / "notes.json").write_text("[]")
    (tmp_path / "val.json").write_bytes(BOM_UTF8 + json.dumps(good()).encode())
    for name in ("train", "val"):
        end = command(main, "check", tmp_path / f"{name}.json")
        assert end.code == 0 and "pictures are in both (1.png" in end.err and "notes" not in end.err


def test_an_image_that_exif_turns(tmp_path, command):
    path = save(tmp_path, good())
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "1.png", exif=exif)
    assert "turned by its EXIF" in "".join(problems_of(path))
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "1.png", exif=exif)  # annotated upright
    assert command(main, "check", path).err == ""


@pytest.mark.parametrize("content", [gzip.compress(b"{}", mtime=0), b"", b'{"images": [{"id": 1'])
def test_files_that_are_something_else(content, tmp_path, refused):
    path = tmp_path / "data.json"
    path.write_bytes(content)
    assert "data.json" in refused(main, "check", path)
    assert "data.json" in refused(main, "convert", "muva", path, "--out", tmp_path / "out.json")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "1.png"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "size", "counts"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_in_a_field_is_a_problem_or_harmless(tmp_path, data):
    records = deepcopy(good())
    record = data.draw(st.sampled_from(records[data.draw(st.sampled_from(LISTS))]))
    field = data.draw(st.sampled_from([*record, "visible_mask", "attributes", "kind"]))
    record[field] = data.draw(JSON)
    path = save(tmp_path, records)
    if not problems_of(path):
        list(read_json(path))
