"""Every format of annotations, on small files made here, and damaged ones."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import InputError
from r2sm_jax.tools.coco import PRESETS, MaskOptions, read_coco_like
from r2sm_jax.tools.convert import Conversion, Files, write_json
from r2sm_jax.tools.referring import (
    AmodalQAFields,
    read_amodal_qa,
    read_lisa_plus_plus,
    read_mmr,
    read_reasonseg,
    read_refcoco,
)

HEIGHT, WIDTH = 20, 30
SIZE = {"height": HEIGHT, "width": WIDTH}


def mask(
    x0: int, y0: int, x1: int, y1: int, height: int = HEIGHT, width: int = WIDTH
) -> np.ndarray:
    drawn = np.zeros((height, width), bool)
    drawn[y0:y1, x0:x1] = True
    return drawn


FRONT, BACK = mask(2, 2, 12, 12), mask(8, 6, 24, 18)
SEEN = BACK & ~FRONT


def square(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def points(*corners: float) -> list[list[float]]:
    flat = square(*corners)
    return [flat[i : i + 2] for i in range(0, 8, 2)]


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def photo(path: Path, height: int = HEIGHT, width: int = WIDTH) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), "olive").save(path)
    return path


def to_read(*sources: Path, images: Path | None = None, out: Path = Path("out.json")) -> Files:
    return Files(out, images, sources=sources)


def finished(found: Conversion, tmp_path: Path, images: Path) -> Any:
    """The conversion, written and read again."""
    found.name_images(tmp_path / "out.json")
    write_json(tmp_path / "out.json", found.records("test"), overwrite=True)
    return read_json(tmp_path / "out.json", images)


def coco(**changes: Any) -> dict[str, Any]:
    """A COCO-cls file with one image: one object in front, one behind."""
    rate = 1 - masks.area(SEEN) / masks.area(BACK)
    front, back = masks.encode(FRONT), masks.encode(BACK)
    both = {"image_id": 7, "category_id": 44, "iscrowd": 0}
    return {
        "images": [{"id": 7, "file_name": "a.jpg", **SIZE}],
        "annotations": [
            both | {"id": 31, "segmentation": front, "visible_mask": front, "occlude_rate": 0.0},
            both
            | {
                "id": 32,
                "segmentation": back,
                "visible_mask": masks.encode(SEEN),
                "occlude_rate": rate,
            },
        ],
        "categories": [{"id": 44, "name": "bottle"}],
    } | changes


def check_pair(sample) -> None:
    """The two objects of `coco`, masks kept to the pixel."""
    front, back = sample.instances
    assert (front.modal == FRONT).all() and (front.amodal == FRONT).all()
    assert (back.modal == SEEN).all() and (back.amodal == BACK).all()


def test_cocoa_cls(tmp_path):
    photo(tmp_path / "a.jpg")
    found = read_coco_like(to_read(write(tmp_path / "c.json", coco())), PRESETS["cocoa-cls"])
    assert found.notes == [] and [a["source_id"] for a in found.annotations] == [31, 32]
    dataset = finished(found, tmp_path, tmp_path)
    assert dataset.image_ids == (7,) and dataset.vocabulary["category"] == ("bottle",)
    check_pair(dataset[0])


def test_d2sa_order_rates_and_colliding_ids(tmp_path):
    content = coco()
    for annotation, depth in zip(content["annotations"], (5, 3), strict=True):
        annotation |= {"occl_depth": depth, "occlude_rate": 0.9, "iscrowd": False}
    paths = [write(tmp_path / f"{n}.json", content) for n in "ab"]
    found = read_coco_like(to_read(*paths), PRESETS["d2sa"])
    assert list(found.images) == [7, 8]
    notes = "\n".join(map(str, found.notes))
    assert "image ids collide" in notes and "1 was added" in notes
    assert "1 of 1 overlapping pairs are seen in another order than occl_depth" in notes
    assert "annotation 31: occlude_rate 0.900 is stored, but the masks give 0.000" in notes
    assert not any("ignore" in a for a in found.annotations)


def test_d2sa_masks_larger_than_the_image(tmp_path):
    big = mask(10, 10, 34, 24, 24, 34)
    content = coco()
    content["annotations"][0] |= {
        "segmentation": masks.encode(big),
        "visible_mask": masks.encode(big),
    }
    path, image = write(tmp_path / "c.json", content), photo(tmp_path / "photos" / "a.jpg")
    with pytest.raises(
        InputError, match=r"masks reach 24 x 34 but it is 20 x 30; choose --oversize"
    ):
        read_coco_like(to_read(path), PRESETS["d2sa"])
    cropped = read_coco_like(to_read(path), PRESETS["d2sa"], MaskOptions("crop"))
    assert masks.area(masks.decode(cropped.annotations[0]["segmentation"])) == 20 * 10
    files = to_read(path, images=image.parent, out=tmp_path / "out.json")
    padded = read_coco_like(files, PRESETS["d2sa"], MaskOptions("pad"))
    sample = finished(padded, tmp_path, tmp_path)[0]
    assert (
        sample.image.shape == (24, 34, 3)
        and not sample.image[HEIGHT:].any()
        and sample.image[0, 0].any()
    )
    assert (sample.instances[0].amodal == big).all() and masks.area(
        sample.instances[1].amodal
    ) == masks.area(BACK)


def test_padded_images_whose_names_differ_in_the_suffix_alone(tmp_path):
    big, content = masks.encode(mask(10, 10, 34, 24, 24, 34)), coco()
    content["images"] = [
        content["images"][0] | {"id": n, "file_name": f"a.{s}"} for n, s in ((7, "bmp"), (8, "png"))
    ]
    first = content["annotations"][0] | {"segmentation": big, "visible_mask": big}
    content["annotations"] = [first, first | {"id": 32, "image_id": 8}]
    for image, colour in zip(content["images"], ("red", "blue"), strict=True):
        Image.new("RGB", (WIDTH, HEIGHT), colour).save(tmp_path / image["file_name"])
    files = to_read(write(tmp_path / "c.json", content), images=tmp_path, out=tmp_path / "out.json")
    dataset = finished(
        read_coco_like(files, PRESETS["d2sa"], MaskOptions("pad")), tmp_path, tmp_path
    )
    assert [sample.image[0, 0].tolist() for sample in dataset] == [[255, 0, 0], [0, 0, 255]]


@pytest.mark.parametrize("names", [("segmentation", "inmodal_seg"), ("a_segm", "i_segm")])
def test_kins(names, tmp_path):
    amodal, modal = names
    content = coco(categories=[])
    for annotation in content["annotations"]:
        annotation |= {
            "category_id": 4,
            amodal: annotation.pop("segmentation"),
            modal: annotation.pop("visible_mask"),
        }
    content["annotations"][0][amodal] = [square(2, 2, 12, 12)]
    found = read_coco_like(to_read(write(tmp_path / "k.json", content)), PRESETS["kins"])
    photo(tmp_path / "a.jpg")
    check_pair(finished(found, tmp_path, tmp_path)[0])
    assert found.categories == {"car": 1}


def test_own_field_names(tmp_path):
    content = coco()
    for annotation in content["annotations"]:
        annotation |= {
            "whole": annotation.pop("segmentation"),
            "seen": annotation.pop("visible_mask"),
        }
    files, names = (
        to_read(write(tmp_path / "m.json", content)),
        MaskOptions("refuse", "whole", "seen"),
    )
    found = read_coco_like(files, PRESETS["muva"], names)
    photo(tmp_path / "a.jpg")
    check_pair(finished(found, tmp_path, tmp_path)[0])
    with pytest.raises(
        InputError,
        match=r"no annotation has .* or segmentation; there are .*, seen, whole; .*amodal",
    ):
        read_coco_like(files, PRESETS["muva"])


def mmr() -> list[dict[str, Any]]:
    cup, handle = (
        {"category_name": n, "segmentation": masks.encode(m)}
        for n, m in (("mug", BACK), ("mug:handle", FRONT))
    )
    image = {
        "image_id": 5,
        "file_name": "train2017/5.jpg",
        **SIZE,
        "questions": ["Drink?", "Hold?", "Both?", "Lost?"],
    }
    image["answers"] = [[cup], [handle], [cup, handle], [cup]]
    image["text_answers"] = ["the {seg}", "its {seg}", "{seg} and {seg}", "{seg} {seg}"]
    return [image]


def test_mmr_keeps_questions_with_their_answers(tmp_path):
    found = read_mmr(to_read(write(tmp_path / "MMR_train.json", mmr())))
    assert [q["instance_ids"] for q in found.queries] == [[1], [2], [1, 2]]
    assert [q["kind"]["level"] for q in found.queries] == ["object", "part", "mixed"]
    assert len(found.annotations) == 2 and found.annotations[0]["segmentation"] is None
    assert "question 3: left out, its text answer has another number of {seg}" in str(
        found.notes[0]
    )
    photo(tmp_path / "train2017" / "5.jpg")
    sample = finished(found, tmp_path, tmp_path)[0]
    assert sample.instances[0].amodal is None and (sample.instances[1].modal == FRONT).all()


def test_reasonseg_keeps_ignored_regions(tmp_path):
    photo(tmp_path / "x.jpg")
    shapes = [
        {"label": "target", "points": points(2, 2, 20, 18)},
        {"label": "ignore this", "points": points(4, 4, 8, 8)},
        {"label": "flag", "points": []},
    ]
    text = "what would caf\xe9 guests use?"
    (tmp_path / "x.json").write_bytes(
        json.dumps(
            {"text": [text], "is_sentence": True, "shapes": shapes}, ensure_ascii=False
        ).encode("cp1252")
    )
    answers = write(
        tmp_path / "more" / "train.json", [{"image": "x.jpg", "query": text, "outputs": "the cup"}]
    )
    found = read_reasonseg(to_read(tmp_path), explanatory=answers)
    (query,) = found.queries
    assert (query["text"], query["answer"], query["instance_ids"]) == (text, "the cup", [1])
    target, ignored = finished(found, tmp_path, tmp_path)[0].instances
    assert (
        ignored.ignore and (ignored.modal == mask(4, 4, 9, 9)).all()
    )  # the outline belongs to a mask
    assert (target.modal == mask(2, 2, 21, 19) & ~mask(4, 4, 9, 9)).all() and target.amodal is None


def test_reasonseg_without_a_target(tmp_path):
    photo(tmp_path / "x.jpg")
    write(tmp_path / "x.json", {"text": ["a dog"], "is_sentence": False, "shapes": []})
    (query,) = read_reasonseg(to_read(tmp_path / "x.json")).queries
    assert query["instance_ids"] == [] and query["kind"]["task"] == "referring"


def test_lisa_plus_plus_shares_instances_between_questions(tmp_path):
    photo(tmp_path / "img" / "1.jpg")
    shape = {"label name": "cup", "points": [points(2, 2, 12, 12)]}
    one = {
        "English Question": "Drink from what?",
        "English Answer": "instance id is 123, label name is cup",
        "ID": ["123"],
    }
    one |= {"points": {"123": shape}, "img_path": "img/1.jpg"}
    path = write(tmp_path / "d.json", [one, one | {"English Answer": "instance id is 9"}])
    found = read_lisa_plus_plus(to_read(path))
    assert len(found.annotations) == 1 and [q["instance_ids"] for q in found.queries] == [[1], [1]]
    assert "the answer names 9, ID 123" in str(found.notes[0])
    assert (finished(found, tmp_path, tmp_path)[0].instances[0].modal == FRONT).all()


@pytest.mark.parametrize(
    "shape", [[points(2, 2, 12, 12)], [square(2, 2, 12, 12)], masks.encode(FRONT)]
)
def test_masks_are_polygons_of_points_or_numbers_or_rle(shape, tmp_path):
    photo(tmp_path / "1.jpg")
    record = {"English Question": "What?", "English Answer": "it", "ID": [1], "img_path": "1.jpg"}
    record["points"] = {"1": {"label name": "cup", "points": shape}}
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    found = read_lisa_plus_plus(to_read(tmp_path / "d.jsonl"))
    assert (masks.decode(found.annotations[0]["visible_mask"]) == FRONT).all()


def refs(**changes: Any) -> list[dict[str, Any]]:
    ref = {
        "ref_id": 1,
        "ann_id": 31,
        "image_id": 7,
        "split": "train",
        "sentences": [{"sent": "left one"}, {"sent": " "}],
    }
    return [ref | changes, ref | {"split": "val"}]


def test_refcoco_and_grefcoco(tmp_path):
    instances = write(tmp_path / "instances.json", coco())
    (tmp_path / "refs(unc).p").write_bytes(pickle.dumps(refs()))
    found = read_refcoco(to_read(tmp_path / "refs(unc).p"), instances)
    assert [q["text"] for q in found.queries] == ["left one"] and found.queries[0][
        "instance_ids"
    ] == [1]
    photo(tmp_path / "a.jpg")
    assert (finished(found, tmp_path, tmp_path)[0].instances[0].modal == FRONT).all()
    path = write(tmp_path / "grefs.json", [*refs(ann_id=[31, 32]), *refs(ann_id=[-1])])
    assert [q["instance_ids"] for q in read_refcoco(to_read(path), instances).queries] == [
        [1, 2],
        [],
    ]
    content = coco(images=[{"id": n, "file_name": f"{n}.jpg", **SIZE} for n in (7, 8)])
    other = write(tmp_path / "two.json", content)
    with pytest.raises(
        InputError,
        match=r"\[0\]: annotation 31 is not of its image; give files that belong together",
    ):
        read_refcoco(to_read(write(tmp_path / "r.json", refs(image_id=8))), other)
    with pytest.raises(InputError, match=r"no split 'test'; --split is one of train, val"):
        read_refcoco(to_read(path), instances, split="test")


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    (tmp_path / "refs.p").write_bytes(pickle.dumps([Path("x")]))
    with pytest.raises(InputError, match=r"holds more than plain data.*write it again as JSON"):
        read_refcoco(to_read(tmp_path / "refs.p"), write(tmp_path / "i.json", coco()))


def test_amodal_questions_and_answers(tmp_path):
    photo(tmp_path / "a.jpg")
    thing = {"label": "book", "seen": masks.encode(SEEN), "whole": masks.encode(BACK)}
    record = {"file": "a.jpg", "q": "What is under it?", "a": "the book", "things": [thing, thing]}
    fields = AmodalQAFields("file", "q", "a", "things", "label", "seen", "whole")
    found = read_amodal_qa(to_read(write(tmp_path / "q.json", [record])), fields)
    sample = finished(found, tmp_path, tmp_path)[0]
    assert (sample.instances[0].modal == SEEN).all() and (sample.instances[0].amodal == BACK).all()
    (query,) = sample.queries
    assert (query.mask_type, query.instance_ids, query.kind["answer"]) == (
        "amodal",
        (1,),
        "the book",
    )


READERS = {
    "coco": lambda path: read_coco_like(to_read(path), PRESETS["d2sa"]),
    "mmr": lambda path: read_mmr(to_read(path)),
    "reasonseg": lambda path: read_reasonseg(to_read(path, images=path.parent)),
    "lisa++": lambda path: read_lisa_plus_plus(to_read(path)),
    "refcoco": lambda path: read_refcoco(to_read(path), path.parent / "i.json"),
    "amodal-qa": lambda path: read_amodal_qa(to_read(path), AmodalQAFields()),
}
SEEDS = {
    "coco": coco(),
    "mmr": mmr(),
    "reasonseg": {
        "text": ["a"],
        "is_sentence": True,
        "shapes": [{"label": "target", "points": points(1, 1, 9, 9)}],
    },
    "lisa++": [
        {
            "English Question": "q",
            "English Answer": "a",
            "ID": ["1"],
            "img_path": "fuzz.jpg",
            "points": {"1": {"label name": "x", "points": [points(1, 1, 9, 9)]}},
        }
    ],
    "refcoco": refs(),
    "amodal-qa": [
        {
            "image": "fuzz.jpg",
            "question": "q",
            "answer": "a",
            "objects": [
                {"visible_mask": masks.encode(SEEN), "amodal_mask": masks.encode(BACK), "name": "x"}
            ],
        }
    ],
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**12) | st.floats() | st.text(max_size=3),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "size", "counts"]), x, max_size=2)
    ),
    max_leaves=5,
)


def spoil(content: Any, data: st.DataObject) -> Any:
    """The same with one place, at any depth, replaced by junk."""
    if isinstance(content, dict) and content and data.draw(st.integers(0, 9)) > 0:
        key = data.draw(st.sampled_from(sorted(content)))
        return content | {key: spoil(content[key], data)}
    if isinstance(content, list) and content and data.draw(st.integers(0, 9)) > 0:
        index = data.draw(st.integers(0, len(content) - 1))
        return [*content[:index], spoil(content[index], data), *content[index + 1 :]]
    return data.draw(JUNK)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_spoilt_file_is_an_error_or_a_valid_result(name, tmp_path, data):
    photo(tmp_path / "fuzz.jpg")
    write(tmp_path / "i.json", coco())
    path = write(tmp_path / "fuzz.json", spoil(SEEDS[name], data))
    try:
        found = READERS[name](path)
        write_json(tmp_path / "out.json", found.records("fuzz"), overwrite=True)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) > 20


def test_an_image_of_a_billion_rows_and_a_name_of_two_lines_are_one_sentence(tmp_path):
    content = coco()
    content["images"][0]["height"] = 1_611_794_015
    with pytest.raises(InputError, match=r"its size is not possible .* more than"):
        read_coco_like(to_read(write(tmp_path / "c.json", content)), PRESETS["d2sa"])
    path = write(tmp_path / "m.json", [mmr()[0] | {"file_name": "two\nlines.jpg"}])
    with pytest.raises(InputError, match=r"two lines.jpg is not in") as error:
        read_mmr(to_read(path, images=tmp_path))
    assert "\n" not in str(error.value)


def test_answers_that_are_no_list_are_named(tmp_path):
    with pytest.raises(InputError, match=r"'text_answers' is a whole number, not a list"):
        read_mmr(to_read(write(tmp_path / "m.json", [mmr()[0] | {"text_answers": 1}])))


def test_a_mask_of_a_billion_pixels_is_refused(tmp_path):
    content = coco()
    content["images"][0] |= {"height": 40_000, "width": 40_000}
    for annotation in content["annotations"]:
        annotation["segmentation"] = {"size": [40_000, 40_000], "counts": [1_600_000_000]}
        annotation["visible_mask"] = [square(0, 0, 39_000, 39_000)]
    with pytest.raises(InputError, match="more than"):
        read_coco_like(to_read(write(tmp_path / "c.json", content)), PRESETS["cocoa-cls"])
