"""Questions with the objects that answer them: MMR, ReasonSeg, LISA++, RefCOCO, R2SM."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from annotation_files import (
    BACK,
    FRONT,
    SIZE,
    coco,
    dataset_of,
    lisa,
    mask,
    mmr,
    photo,
    points,
    read_coco,
    reasonseg,
    refs,
    square,
    write,
)
from hypothesis import HealthCheck, given, settings, strategies as st

from r2sm_jax.data import masks
from r2sm_jax.errors import InputError
from r2sm_jax.tools.r2sm import R2SMFields, read_r2sm
from r2sm_jax.tools.records import Collector, collect, write_json
from r2sm_jax.tools.referring import (
    read_lisa_plus_plus,
    read_mmr,
    read_reasonseg,
    read_refcoco,
)


def targets(collector: Collector) -> list[list[int]]:
    return [query["instance_ids"] for query in collector.queries]


# MMR


def test_mmr(tmp_path):
    collector = collect(read_mmr([write(tmp_path / "MMR_train.json", mmr())]), 0)
    kind = {"task": "reasoning", "level": "object", "multi": False}
    assert collector.queries[0] == {
        "id": 1,
        "image_id": 5,
        "text": "Drink?",
        "mask_type": "modal",
        "instance_ids": [1],
        "kind": kind,
        "answer": "the {seg}",
    }
    assert targets(collector) == [[1], [2], [1, 2]]
    assert [q["kind"]["level"] for q in collector.queries] == ["object", "part", "mixed"]
    assert len(collector.annotations) == 2 and collector.annotations[0]["segmentation"] is None
    assert "question 3: left out" in str(collector.notes[0])
    photo(tmp_path / "train2017" / "5.jpg")
    sample = dataset_of(collector, tmp_path, tmp_path)[0]
    assert sample.instances[0].amodal is None and (sample.instances[1].modal == FRONT).all()


def test_only_training_files_of_mmr_lose_questions(tmp_path):
    content = mmr()
    content[0]["text_answers"][0] = ""
    for name, num_queries in (("MMR_val.json", 4), ("MMR_train.json", 3)):
        collector = collect(read_mmr([write(tmp_path / name, content)]), 0)
        assert len(collector.queries) == num_queries
        assert len(collector.notes) == 4 - num_queries


def test_mmr_lists_of_masks_and_one_image_in_several_records(tmp_path):
    content = mmr()
    for answers in content[0]["answers"]:
        answers[0] = answers[0] | {"segmentation": [masks.encode(FRONT), masks.encode(BACK)]}
    collector = collect(read_mmr([write(tmp_path / "m.json", [*content, *mmr()])]), 0)
    assert len(collector.images) == 1 and len(collector.queries) == 8
    union = masks.decode(collector.annotations[0]["visible_mask"])
    assert (union == FRONT | BACK).all()


# ReasonSeg


def test_reasonseg(tmp_path):
    photo(tmp_path / "x.jpg")
    text = "what would caf\xe9 guests use?"
    target = {"label": "target", "points": points(2, 2, 20, 18)}
    ignored = {"label": "ignore this", "points": points(4, 4, 8, 8)}
    content = reasonseg(target, ignored, {"label": "flag", "points": []}, text=text)
    content_json = json.dumps(content, ensure_ascii=False)
    (tmp_path / "x.json").write_bytes(content_json.encode("cp1252"))
    answers = [{"image": "x.jpg", "query": text, "outputs": "the cup"}]
    explanatory = write(tmp_path / "more" / "train.json", answers)
    collector = collect(read_reasonseg([tmp_path], explanatory), 0)
    (query,) = collector.queries
    assert (query["text"], query["answer"], query["instance_ids"]) == (text, "the cup", [1])
    first, second = dataset_of(collector, tmp_path, tmp_path)[0].instances
    hole = mask(4, 4, 9, 9)  # the outline belongs to a mask
    assert second.ignore and (second.modal == hole).all()
    assert first.amodal is None and (first.modal == mask(2, 2, 21, 19) & ~hole).all()


def test_reasonseg_without_a_target(tmp_path):
    photo(tmp_path / "x.jpg")
    path = write(tmp_path / "x.json", reasonseg() | {"is_sentence": False})
    (query,) = collect(read_reasonseg([path]), 0).queries
    assert query["instance_ids"] == [] and query["kind"]["task"] == "referring"


def test_without_opencv_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    photo(tmp_path / "x.jpg")
    shapes = [{"label": "cup", "points": points(2, 3, 12, 9)}]
    path = write(tmp_path / "x.json", {"text": ["a cup"], "is_sentence": True, "shapes": shapes})
    with pytest.raises(InputError, match="pip install opencv-python-headless"):
        collect(read_reasonseg([path]))


def test_reasonseg_labels_and_small_shapes(tmp_path):
    photo(tmp_path / "x.jpg")
    shapes = [
        {"label": "Flag", "points": [[0, 0]]},
        {"label": "cup", "points": points(2, 3, 12, 9)},
        {"label": "IGNORE", "points": [[4, 5], [9, 5]]},
        {"label": "target", "points": [[20, 15]]},
        {"label": "target", "points": []},
    ]
    path = write(tmp_path / "x.json", {"text": ["a cup"], "is_sentence": True, "shapes": shapes})
    collector = collect(read_reasonseg([path]))
    target, ignored = (
        masks.decode(annotation["visible_mask"]) for annotation in collector.annotations
    )
    assert (ignored == mask(4, 5, 10, 6)).all()
    assert (target == (mask(2, 3, 13, 10) & ~ignored | mask(20, 15, 21, 16))).all()
    assert "shapes[4]: left out, it has no points" in str(collector.notes[0])


def test_a_spoilt_file_of_a_folder_is_a_bad_record(tmp_path):
    for number in range(120):
        photo(tmp_path / f"{number}.jpg")
        shapes = [{"label": "target", "points": points(2, 3, 12, 9)}]
        write(
            tmp_path / f"{number}.json", {"text": ["a cup"], "is_sentence": True, "shapes": shapes}
        )
    (tmp_path / "7.json").write_text("{")
    collector = collect(read_reasonseg([tmp_path]), 0.01)
    assert len(collector.queries) == 119 and "7.json: this is not JSON" in str(
        collector.bad_records[0]
    )
    write(
        tmp_path / "8.json",
        {"text": ["a cup"], "shapes": [{"label": "target", "points": [[1, 2, 3]]}]},
    )
    with pytest.raises(
        InputError, match=r"1 of 120 records are bad for this reason, 1 for other reasons"
    ):
        collect(read_reasonseg([tmp_path]), 0.01)


# LISA++


def test_lisa_questions_share_instances(tmp_path):
    photo(tmp_path / "1.jpg")
    other = lisa(ID=["1"], **{"English Answer": "instance id is 9"})
    collector = collect(read_lisa_plus_plus([write(tmp_path / "d.json", [lisa(), other])]), 0)
    assert len(collector.annotations) == 2 and targets(collector) == [[1, 2], [1]]
    assert "the answer names 9, ID 1" in str(collector.notes[0])


RINGS = [
    [points(2, 2, 12, 12)],
    [points(2, 2, 12, 12), [[1, 1], [2, 2]]],
    points(2, 2, 12, 12),
    [square(2, 2, 12, 12)],
    masks.encode(FRONT),
]


@pytest.mark.parametrize("shape", RINGS)
def test_lisa_masks(shape, tmp_path):
    photo(tmp_path / "1.jpg")
    shapes = lisa()["points"] | {"1": {"points": shape}}
    record = lisa(points=shapes, ID=[1, 2], img_path=" 1.jpg ")
    del record["English Answer"]
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    collector = collect(read_lisa_plus_plus([tmp_path / "d.jsonl"]), 0)
    assert (masks.decode(collector.annotations[0]["visible_mask"]) == FRONT).all()
    assert targets(collector) == [[1, 2]] and "answer" not in collector.queries[0]


NO_MASKS = [[], [[[5, 5], [6, 6]]], [points(40, 40, 50, 50)], {"size": [9, 9], "counts": [81]}]


@pytest.mark.parametrize("shape", NO_MASKS)
def test_a_bad_question_leaves_nothing_behind(shape, tmp_path):
    for name in ("1.jpg", "2.jpg"):
        photo(tmp_path / name)
    shapes = lisa()["points"] | {"1": {"label name": "cup", "points": shape}}
    bad = lisa(points=shapes, img_path="2.jpg", ID=["2", "1"])
    path = write(tmp_path / "d.json", [*[lisa()] * 200, bad])
    collector = collect(read_lisa_plus_plus([path]), 0.01)
    counts = len(collector.queries), len(collector.annotations), len(collector.images)
    assert counts == (200, 2, 1)
    (bad_record,) = collector.bad_records
    assert "[200].points.1: its points" in str(bad_record)


def test_lisa_ids_without_points(tmp_path):
    photo(tmp_path / "1.jpg")
    named = lisa(ID=["1", "99"], **{"English Answer": "instance id is 1, instance id is 99"})
    path = write(tmp_path / "d.json", [*[lisa()] * 200, lisa(ID=["1", "2", "99"]), named])
    collector = collect(read_lisa_plus_plus([path]), 0.01)
    assert targets(collector)[-1] == [1, 2] and len(collector.queries) == 201
    assert "[200]: ID 99 was left out" in str(collector.notes[0])
    assert "[201].points: its '99' is missing" in str(collector.bad_records[0])


@pytest.mark.parametrize("image_field", ["img_path", "image_path", "img_pth"])
@pytest.mark.parametrize("shape", [masks.encode(FRONT), [square(2, 2, 12, 12)]])
def test_lisa_with_info(image_field, shape, tmp_path):
    photo(tmp_path / "1.jpg")
    record = {
        "English Question": "Which?",
        "English Answer": "instance id is 7, label name is red cup; instance id is 9",
        "info": {"7": shape, "9": masks.encode(BACK)},
        "is_rle": isinstance(shape, dict),
        image_field: "1.jpg",
    }
    collector = collect(read_lisa_plus_plus([write(tmp_path / "d.json", [record])]), 0)
    assert list(collector.categories) == ["red cup", "object"] and targets(collector) == [[1, 2]]
    visible = [masks.decode(annotation["visible_mask"]) for annotation in collector.annotations]
    assert (visible[0] == FRONT).all() and (visible[1] == BACK).all()


# RefCOCO


def test_refcoco_and_grefcoco(tmp_path):
    instances = write(tmp_path / "instances.json", coco())
    (tmp_path / "refs(unc).p").write_bytes(pickle.dumps(refs()))
    collector = collect(read_refcoco([tmp_path / "refs(unc).p"], instances), 0)
    (query,) = collector.queries
    assert (query["text"], query["instance_ids"]) == ("left one", [1])
    assert (masks.decode(collector.annotations[0]["visible_mask"]) == FRONT).all()
    path = write(tmp_path / "grefs.json", [*refs(ann_id=[31, 32]), *refs(ann_id=[-1])])
    assert targets(collect(read_refcoco([path], instances), 0)) == [[1, 2], []]


def test_refcoco_splits(tmp_path):
    instances = write(tmp_path / "instances.json", coco())
    names = ("testA", "testB", "testAB", "test", "val")
    path = write(tmp_path / "refs.json", [refs(split=name)[0] for name in names])
    counts = {
        name: len(collect(read_refcoco([path], instances, name), 0).queries) for name in names
    }
    assert counts == {"testA": 2, "testB": 2, "testAB": 1, "test": 4, "val": 1}


def test_refcoco_strings_of_python_2(tmp_path):
    instances = write(tmp_path / "instances.json", coco())
    for raw in (b"caf\xc3\xa9", b"caf\xe9"):
        content = pickle.dumps(refs(sentences=[{"sent": "SENTENCE"}]), protocol=1)
        short_string = b"U" + bytes([len(raw)]) + raw  # SHORT_BINSTRING, a string of Python 2
        content = content.replace(b"X\x08\x00\x00\x00SENTENCE", short_string)
        (tmp_path / "refs.p").write_bytes(content)
        collector = collect(read_refcoco([tmp_path / "refs.p"], instances), 0)
        assert collector.queries[0]["text"] == "caf\xe9"


# R2SM


def dataset_file(folder: Path) -> Path:
    collector = read_coco(write(folder / "c.json", coco()))
    return write(folder / "over.json", collector.to_records("test"))


def r2sm_line(**changes: Any) -> dict[str, Any]:
    line = {"image_id": 7, "text": "the  cup", "mask_type": "modal", "instance_ids": [32]}
    return line | changes


def test_r2sm_queries_by_ids_or_answer(tmp_path):
    records = json.loads(dataset_file(tmp_path).read_text())
    answer = "instance id is [31], class name is bottle; Instance id is 32, class name is bottle."
    second = {"image_id": "dir/a.jpg", "text": "both", "mask_type": "amodal", "answer": answer}
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, [r2sm_line(), second])))
    collector = collect(read_r2sm([path], records), 0, records)
    assert targets(collector) == [[2], [1, 2]] and collector.queries[0]["text"] == "the cup"
    assert collector.to_records("") == records | {"queries": collector.queries}

    other = write(tmp_path / "q.json", [{"img": 7, "sentence": "x", "ids": [31]}])
    fields = R2SMFields(image="img", text="sentence", instances="ids")
    (query,) = collect(read_r2sm([other], records, fields, "amodal"), 0, records).queries
    assert query["mask_type"] == "amodal"
    # Without a `source_id` the annotation's own id counts.
    records["annotations"][0]["source_id"] = None
    records["annotations"][1]["source_id"] = [1]
    path.write_text(json.dumps(r2sm_line(instance_ids=[2, 1])))
    assert targets(collect(read_r2sm([path], records), 0, records)) == [[2, 1]]


def test_r2sm_ids_as_strings_or_alone_and_tags_around_the_sentence(tmp_path):
    records = json.loads(dataset_file(tmp_path).read_text())
    lines = [
        r2sm_line(instance_ids=["32"]),
        r2sm_line(instance_ids=32),
        r2sm_line(text="<Q>the cup</Q>"),
    ]
    collector = collect(read_r2sm([write(tmp_path / "q.json", lines)], records), 0, records)
    assert targets(collector) == [[2]] * 3
    assert {query["text"] for query in collector.queries} == {"the cup"}


def test_r2sm_images_of_one_name_in_two_folders(tmp_path):
    images = [{"id": i, "file_name": f"{i}/a.jpg", "height": 9, "width": 9} for i in (1, 2)]
    records = {"images": images, "annotations": [], "categories": [], "queries": []}
    lines = [r2sm_line(image_id=name, instance_ids=[]) for name in ("2/a.jpg", "1/a.jpg", "a.jpg")]
    collector = collect(read_r2sm([write(tmp_path / "q.json", lines)], records), 1, records)
    assert [query["image_id"] for query in collector.queries] == [2, 1]
    assert "or several have this name" in str(collector.bad_records[0])


def own_masks(**changes: Any) -> dict[str, Any]:
    """A query that carries the masks of its instances."""
    line = {"image_id": "a.jpg", "text": "all of it", "mask_type": "amodal", "instance_ids": [3]}
    line["visible_masks"] = {"3": masks.encode(BACK & ~FRONT)}
    line["amodal_masks"] = [masks.encode(BACK)]
    return line | changes


def test_r2sm_queries_with_masks_of_their_own(tmp_path):
    photo(tmp_path / "a.jpg")
    answer = "instance id is [3], class name is [box]; instance id is [4], class name is [mug]"
    two = own_masks(mask_type="modal", instance_ids=None, answer=answer, amodal_masks=None)
    two["visible_masks"] = [[square(8, 12, 24, 18)], masks.encode(FRONT)]
    path = write(tmp_path / "q.json", [own_masks(), own_masks(text="again"), two])
    collector = collect(read_r2sm([path], None), 0)
    assert targets(collector) == [[1], [1], [2, 3]] and len(collector.images) == 1
    assert list(collector.categories) == ["object", "box", "mug"]
    complete, visible_only, _ = dataset_of(collector, tmp_path)[0].instances
    assert (complete.modal == BACK & ~FRONT).all() and (complete.amodal == BACK).all()
    assert visible_only.amodal is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_id": 7}, "--over"),
        ({"visible_masks": {}}, "mask of instance 3 in visible_masks cannot be used"),
        ({"visible_masks": None}, "it has no 'visible_masks'"),
        ({"amodal_masks": []}, "0 masks for 1 instances"),
        ({"instance_ids": [[3]]}, "is no id"),
    ],
)
def test_bad_masks_of_r2sm_queries(changes, reason, tmp_path):
    photo(tmp_path / "a.jpg")
    path = write(tmp_path / "q.json", [own_masks(**changes)])
    (bad_record,) = collect(read_r2sm([path], None)).bad_records
    assert reason in str(bad_record)


BAD_LINES = [
    (r2sm_line(instance_ids=[99]), "has no instance 99"),
    (r2sm_line(instance_ids=[True]), "has no instance True"),
    (r2sm_line(mask_type="full"), "mask type is 'full'"),
    (r2sm_line(instance_ids=None), "neither instance_ids nor answer"),
]
for _answer in ("instance ids are 31 and 32", "instance id: 31", "instance id is 31, 32"):
    BAD_LINES.append((r2sm_line(instance_ids=None, answer=_answer), "ids in its answer"))


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_bad_r2sm_queries(line, reason, tmp_path):
    records = json.loads(dataset_file(tmp_path).read_text())
    path = write(tmp_path / "q.json", [line])
    collector = collect(read_r2sm([path], records), 1, records)
    assert collector.queries == [] and reason in str(collector.bad_records[0])


# Files that do not fit


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    (tmp_path / "refs.p").write_bytes(pickle.dumps([Path("x")]))
    with pytest.raises(InputError, match=r"holds more than plain data.*write it again as JSON"):
        collect(read_refcoco([tmp_path / "refs.p"], write(tmp_path / "i.json", coco())))


@pytest.mark.parametrize(
    ("read", "content", "sentence"),
    [
        (
            read_mmr,
            [mmr()[0] | {"text_answers": 1}],
            "'text_answers' is a whole number, not a list",
        ),
        (read_mmr, [*mmr(), mmr()[0] | {"width": 31}], "image 5 has another size before"),
        (read_mmr, [mmr()[0] | {"file_name": "../x.jpg"}], "leads out of the image folder"),
        (read_mmr, {}, "this is not a list"),
        (read_lisa_plus_plus, [lisa()], "1.jpg is not in"),
        (read_reasonseg, reasonseg({"label": 1}), "x.jpg or"),
    ],
)
def test_files_that_do_not_fit(read, content, sentence, tmp_path):
    with pytest.raises(InputError) as error:
        collect(read([write(tmp_path / "x.json", content)]), 0)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "split", "sentence"),
    [
        ({"image_id": 8}, "train", "annotation 31 is not of its image"),
        ({"ann_id": 99}, "train", "ann_id 99 is not in the file"),
        ({}, "test", "no split 'test'; --split is one of train, val"),
    ],
)
def test_refs_that_do_not_fit(changes, split, sentence, tmp_path):
    images = [{"id": i, "file_name": f"{i}.jpg", **SIZE} for i in (7, 8)]
    instances = write(tmp_path / "i.json", coco(images=images))
    path = write(tmp_path / "refs.json", refs(**changes))
    with pytest.raises(InputError) as error:
        collect(read_refcoco([path], instances, split), 0)
    assert sentence in str(error.value)


SHAPE = {"label": "target", "points": points(1, 1, 9, 9)}
READERS = {
    "coco": (lambda path: read_coco(path, max_bad=1), coco()),
    "mmr": (lambda path: collect(read_mmr([path])), mmr()),
    "reasonseg": (lambda path: collect(read_reasonseg([path])), reasonseg(SHAPE)),
    "lisa++": (lambda path: collect(read_lisa_plus_plus([path])), [lisa(img_path="fuzz.jpg")]),
    "refcoco": (lambda path: collect(read_refcoco([path], path.parent / "i.json")), refs()),
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**12) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "size", "counts"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def spoil(content: Any, data: st.DataObject) -> Any:
    """The same with one value, at any depth, replaced by junk."""
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
    read, good = READERS[name]
    photo(tmp_path / "fuzz.jpg")
    write(tmp_path / "i.json", coco())
    path = write(tmp_path / "fuzz.json", spoil(good, data))
    try:
        write_json(tmp_path / "out.json", read(path).to_records("fuzz"), overwrite=True)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) > 20


def test_reasonseg_points_that_are_not_where_the_image_is(tmp_path):
    photo(tmp_path / "a.jpg")
    for corners in ((0.1, 0.1, 0.5, 0.5), (500, 500, 600, 600)):
        shape = {"label": "target", "points": points(*corners)}
        path = write(tmp_path / "a.json", reasonseg(shape))
        (bad_record,) = collect(read_reasonseg([path])).bad_records
        assert "its points are not where the image is" in str(bad_record)
    (note,) = collect(read_reasonseg([write(tmp_path / "a.json", reasonseg())])).notes
    assert "there is no target" in str(note)
