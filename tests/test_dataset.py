"""Dataset files: what is written is read back, faults are named, files are split by
image."""

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from listed_source import ListedSource
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from sample_records import to_records

from r2sm_jax.data import dataset, masks
from r2sm_jax.data.dataset import ImageTruth, Instance, Sample, read_json, write_records
from r2sm_jax.data.split_summary import check_teaches
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.query import Query
from r2sm_jax.sources import load_json_split

HEIGHT, WIDTH = 12, 20


def sample(image_id: int = 1, name: str = "a.png") -> Sample:
    amodal = np.zeros((HEIGHT, WIDTH), bool)
    amodal[2:8, 3:13] = True
    modal = amodal.copy()
    modal[2:4] = False
    front = np.zeros_like(amodal)
    front[0:4, 3:13] = True
    image = np.full((HEIGHT, WIDTH, 3), 40 * (image_id % 5), np.uint8)
    return Sample(
        image_id,
        name,
        image,
        (
            Instance(7, "mug", modal, amodal, {"colour": "red"}),
            Instance(9, "box", front, None),
            Instance(3, "crowd", front, front, ignore=True),
        ),
        (
            Query(
                5, "the whole mug", "amodal", (7,), {"task": "referring", "answer": "It is [7]."}
            ),
            Query(6, "everything", "modal", (9, 7)),
            Query(8, "a cow", "modal", ()),
        ),
    )


def write(folder: Path, count: int = 1, name: str = "data.json", images: str = ".") -> Path:
    samples = [sample(number, f"{number}.png") for number in range(1, count + 1)]
    (folder / images).mkdir(parents=True, exist_ok=True)
    for one in samples:
        Image.fromarray(one.image).save(folder / images / one.file_name)
    write_records(folder / name, to_records(samples, {"description": "made up"}))
    return folder / name


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    path = write(tmp_path, 2)
    reads, read_bytes = [], Path.read_bytes
    with (
        monkeypatch.context() as patch
    ):  # read once, so that the hash is that of the records whatever is written then
        patch.setattr(Path, "read_bytes", lambda file: (reads.append(file), read_bytes(file))[1])
        dataset = read_json(path)
    assert reads == [path]
    assert len(dataset) == 2 and dataset.image_ids == (1, 2)
    assert dataset.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert dataset.vocabulary == {"category": ("mug", "box", "crowd"), "colour": ("red",)}
    assert len(list(dataset)) == 2
    for number, got in enumerate(dataset, start=1):
        expected = sample(number)
        np.testing.assert_array_equal(got.image, expected.image)
        assert len({i.id for i in got.instances}) == 3
        for mine, theirs in zip(got.instances, expected.instances, strict=True):
            assert (mine.category, mine.ignore) == (theirs.category, theirs.ignore)
            assert dict(mine.attributes) == dict(theirs.attributes)
            np.testing.assert_array_equal(mine.modal, theirs.modal)
            assert (mine.amodal is None) == (theirs.amodal is None)
            if theirs.amodal is not None:
                np.testing.assert_array_equal(mine.amodal, theirs.amodal)
        ids = [i.id for i in got.instances]
        assert [q.instance_ids for q in got.queries] == [(ids[0],), (ids[1], ids[0]), ()]
        assert [(q.text, q.mask_type, q.kind) for q in got.queries] == [
            (q.text, q.mask_type, q.kind) for q in expected.queries
        ]
    assert not {i.id for i in dataset[0].instances} & {i.id for i in dataset[1].instances}


def test_coco_leaves_ignored_regions_out(tmp_path, capsys):
    """pycocotools reads them as crowds with a mask: what lies in one costs nothing."""
    path = write(tmp_path)
    records = json.loads(path.read_text())
    region = np.zeros((HEIGHT, WIDTH), bool)
    region[9:, :] = True
    ignored = Instance(8, "crowd", masks.encode(region), None, ignore=True)
    truth = ImageTruth(1, "1.png", (HEIGHT, WIDTH), (ignored,), ())
    (more,) = dataset.to_records([truth])["annotations"]
    records["annotations"].append(more | {"category_id": records["annotations"][0]["category_id"]})
    write_records(path, records, overwrite=True)

    coco = COCO(path)
    assert {a["id"] for a in coco.loadAnns(coco.getAnnIds(iscrowd=True))} == {3, 8}
    np.testing.assert_array_equal(coco.annToMask(coco.anns[8]), region)
    (mug,) = [a for a in records["annotations"] if a["id"] == 7]
    found = {"image_id": 1, "category_id": mug["category_id"]}
    results = [
        found | {"segmentation": mug["segmentation"], "score": 0.5},
        found | {"segmentation": more["segmentation"], "score": 0.9},  # surer, and in the region
    ]
    evaluation = COCOeval(coco, coco.loadRes(results), "segm")
    evaluation.params.catIds = [mug["category_id"]]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    capsys.readouterr()
    assert evaluation.stats[[0, 8]] == pytest.approx([1, 1])  # AP and AR
    again = read_json(path).truth_at(0).instances
    assert [i.amodal is None for i in again if i.ignore] == [False, True]


def test_images_beside_in_images_and_elsewhere(tmp_path):
    assert len(read_json(write(tmp_path / "one", images="images"))[0].instances) == 3
    path = write(tmp_path / "two", images="../photos")
    with pytest.raises(InputError, match=r"1\.png is not in .*two or .*images; .*--data\.images"):
        read_json(path)
    assert read_json(path, tmp_path / "photos")[0].image_id == 1
    with pytest.raises(InputError, match="no such image folder"):
        read_json(path, tmp_path / "nowhere")


def test_polygons_and_visible_masks_outside_the_amodal_one(tmp_path):
    path = write(tmp_path)
    records = json.loads(path.read_text())
    visible = np.zeros((HEIGHT, WIDTH), bool)
    visible[1:5, 2:6] = True
    records["annotations"][0] |= {
        "segmentation": [[3, 2, 13, 2, 13, 8, 3, 8]],
        "visible_mask": masks.encode(visible),
    }
    write_records(path, records, overwrite=True)
    instance = read_json(path)[0].instances[0]
    assert instance.amodal is not None and not (instance.modal & ~instance.amodal).any()
    assert masks.area(instance.amodal) == 60 + 7


def test_missing_file_and_wrong_images(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_json(tmp_path / "x.json")
    dataset = read_json(write(tmp_path))
    Image.new("RGB", (9, 9)).save(tmp_path / "1.png")
    with pytest.raises(InputError, match=r"9 pixels high and 9 wide, but .* says 12 and 20"):
        _ = dataset[0]


def test_nothing_is_overwritten(tmp_path):
    path = write(tmp_path)
    before = path.read_bytes()
    records = json.loads(before)
    with pytest.raises(InputError, match="exists already"):
        write_records(path, records)
    assert path.read_bytes() == before
    records["info"] = {}
    write_records(path, records, overwrite=True)
    assert json.loads(path.read_text()) == records
    assert not list(tmp_path.glob("*.part"))
    half = pytest.raises(InputError, match=r"a\.json: .*half of a character")
    with half, atomic_write(tmp_path / "a.json") as part:
        part.write_text("mug \ud800", encoding="utf-8")


def test_splits_of_a_file_are_parsed_once_and_a_new_file_again(tmp_path, monkeypatch):
    path = write(tmp_path, 12)
    reads = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: (reads.append(file), read_bytes(file))[1])
    sizes = [len(load_json_split(path, split)) for split in ("train", "dev", "val", "all")]
    assert sizes[-1] == 12 and sum(sizes[:-1]) == 12
    assert reads == [path]

    path.unlink()
    write(tmp_path, 13)
    reads.clear()
    assert len(load_json_split(path, "all")) == 13
    assert reads == [path]


def test_folders_have_one_file_a_split(tmp_path):
    write(tmp_path, 2, "train.json")
    write(tmp_path, 1, "val_hard.json")
    assert len(load_json_split(tmp_path, "train")) == len(load_json_split(tmp_path, "dev")) == 1
    assert len(load_json_split(str(tmp_path), "val_hard")) == 1
    with pytest.raises(InputError, match=r"no val\.json; the folder has train, val_hard"):
        load_json_split(tmp_path, "val")
    with pytest.raises(InputError, match="has the splits train, dev, val and all, not 'test'"):
        load_json_split(tmp_path / "train.json", "test")


def test_a_copy_reads_the_file_again(tmp_path):
    part = read_json(write(tmp_path, 3)).subset([2, 0])
    content = pickle.dumps(part)
    assert b"segmentation" not in content
    copied = pickle.loads(content)
    assert copied.image_ids == (3, 1) and copied.truth_at(0) == part.truth_at(0)


def with_queries(*queries: Query) -> ListedSource:
    return ListedSource([replace(sample(), queries=queries)])


@pytest.mark.parametrize(
    ("queries", "sentence"),
    [
        ((), "no queries"),
        ((Query(1, "the whole box", "amodal", (9,)),), "the mask that it asks for"),
    ],
)
def test_a_split_that_teaches_nothing_is_refused(queries, sentence):
    with pytest.raises(InputError, match=f"json:d: .*{sentence}"):
        check_teaches(with_queries(*queries), "json:d")


def test_a_split_without_complete_masks_gets_a_warning():
    """tests/test_check.py has the other ones."""
    query = Query(1, "the mug", "modal", (7,))
    mug, box, _ = sample().instances
    unknown = replace(sample(), instances=(replace(mug, amodal=None), box), queries=(query,))
    (warning,) = check_teaches(ListedSource([unknown]), "d")
    assert "no complete mask" in warning
