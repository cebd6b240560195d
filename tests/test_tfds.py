"""`data build` and the `tfds:DIR` source: nothing is lost on the way."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_check import good, save

from r2sm_jax.config import DataConfig
from r2sm_jax.data.tfds import write_tfds
from r2sm_jax.errors import InputError
from r2sm_jax.sources import load_json_split, open_split


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tfds")
    records = good()
    records["annotations"][0] |= {"attributes": {"colour": "red"}, "ignore": True}
    records["annotations"][2] |= {
        "visible_mask": records["annotations"][2]["segmentation"],
        "segmentation": None,
    }
    records["queries"][3]["instance_ids"] = []
    records["queries"][2] |= {"kind": {"task": "reasoning"}, "answer": "a cup"}
    path = save(folder, records)
    counts = write_tfds(
        {name: load_json_split(path, name) for name in ("train", "val")}, folder / "out"
    )
    assert counts == {"train": 1, "val": 1}
    return path, folder / "out"


def test_samples_come_back_as_they_were(built):
    path, folder = built
    sources = [open_split(DataConfig(f"tfds:{folder}"), split) for split in ("train", "val")]
    for source in sources:
        assert len(source) == 1 and source.vocabulary == {"category": ("cup",), "colour": ("red",)}
    by_id = {source[0].image_id: source[0] for source in sources}
    for sample in load_json_split(path, "all"):
        other = by_id[sample.image_id]
        assert (other.image == sample.image).all() and other.file_name == sample.file_name
        assert other.queries == sample.queries
        assert (
            next(s for s in sources if s[0].image_id == sample.image_id).queries_at(0)
            == sample.queries
        )
        for one, two in zip(sample.instances, other.instances, strict=True):
            assert (one.id, one.category, one.attributes, one.ignore) == (
                two.id,
                two.category,
                two.attributes,
                two.ignore,
            )
            assert (one.modal == two.modal).all()
            assert (one.amodal is None) == (two.amodal is None)
            assert one.amodal is None or np.array_equal(one.amodal, two.amodal)
    fingerprints = [*sources[0].fingerprints(), *sources[1].fingerprints()]
    assert sorted(fingerprints) == sorted(load_json_split(path, "all").fingerprints())


def test_errors(built, tmp_path):
    _, folder = built
    with pytest.raises(InputError, match="no split 'test'; the data set has"):
        open_split(DataConfig(f"tfds:{folder}"), "test")
    with pytest.raises(InputError, match="reserved"):
        write_tfds({"all": load_json_split(folder.parent / "data.json", "all")}, tmp_path)
    with pytest.raises(InputError, match="no TFDS data set here"):
        open_split(DataConfig(f"tfds:{tmp_path}"), "train")


def test_damaged_files_are_one_sentence(built, tmp_path):
    folder = Path(shutil.copytree(built[1], tmp_path / "out"))
    (shard,) = folder.rglob("*train.array_record*")
    content = shard.read_bytes()
    for damaged in (content[: len(content) // 2], b""):
        shard.write_bytes(damaged)
        for read in (lambda source: source[0], lambda source: source.queries_at(0)):
            with pytest.raises(
                InputError, match=r"out: cannot read the TFDS data set .* build it again"
            ):
                read(open_split(DataConfig(f"tfds:{folder}"), "train"))
    (info,) = folder.rglob("dataset_info.json")
    for damaged in ("{", "[]"):
        info.write_text(damaged)
        with pytest.raises(
            InputError, match=r"out: cannot read the TFDS data set .* build it again"
        ):
            open_split(DataConfig(f"tfds:{folder}"), "train")


def test_a_source_can_be_sent_to_other_processes(built):
    source = open_split(DataConfig(f"tfds:{built[1]}"), "train")
    (copy,) = pickle.loads(pickle.dumps([source]))
    assert copy[0].queries == source[0].queries


def test_an_image_without_instances_and_queries(tmp_path):
    records = good()
    records["annotations"], records["queries"] = records["annotations"][:2], records["queries"][:2]
    path = save(tmp_path, records)
    write_tfds({"val": load_json_split(path, "all")}, tmp_path / "out")
    source = open_split(DataConfig(f"tfds:{tmp_path / 'out'}"), "val")
    assert sorted((len(s.instances), len(s.queries)) for s in (source[0], source[1])) == [
        (0, 0),
        (2, 2),
    ]
