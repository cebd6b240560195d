"""`data build` and the `tfds:DIR` source: nothing is lost on the way."""

import pickle
import shutil
from pathlib import Path

import pytest
from made_pictures import digest
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
    expected = load_json_split(path, "all")
    found, fingerprints = {}, []
    for split in ("train", "val"):
        source = open_split(DataConfig(f"tfds:{folder}"), split)
        assert len(source) == 1 and source.vocabulary == {"category": ("cup",), "colour": ("red",)}
        found[source[0].image_id] = source[0]
        assert source.queries_at(0) == source[0].queries
        fingerprints += source.fingerprints()
    assert {number: digest(one) for number, one in found.items()} == {
        sample.image_id: digest(sample) for sample in expected
    }
    assert sorted(fingerprints) == sorted(expected.fingerprints())


@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_a_damaged_shard_is_told_when_it_is_opened(fault, built, tmp_path):
    _, folder = built
    shutil.copytree(folder, tmp_path / "copy")
    (shard,) = tmp_path.rglob("*val.array_record*")
    shard.write_bytes(shard.read_bytes()[:1000])
    if fault == "missing":
        shard.unlink()
    with pytest.raises(InputError, match="cannot read the TFDS data set"):
        open_split(DataConfig(f"tfds:{tmp_path / 'copy'}"), "val")


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
    assert digest(pickle.loads(pickle.dumps(source))[0]) == digest(source[0])


def test_an_image_without_instances_and_queries(tmp_path):
    records = good()
    records["annotations"], records["queries"] = records["annotations"][:2], records["queries"][:2]
    path = save(tmp_path, records)
    write_tfds({"val": load_json_split(path, "all")}, tmp_path / "out")
    source = open_split(DataConfig(f"tfds:{tmp_path / 'out'}"), "val")
    counts = [(len(sample.instances), len(sample.queries)) for sample in (source[0], source[1])]
    assert sorted(counts) == [(0, 0), (2, 2)]
