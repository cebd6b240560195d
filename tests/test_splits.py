"""`dev` is held out of `train` everywhere and selects checkpoints; what a report was selected on
stands in it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from sample_records import to_records

from r2sm_jax.config import Config, DataConfig, LoopConfig, check_config
from r2sm_jax.data.__main__ import build
from r2sm_jax.data.dataset import Sample, write_records
from r2sm_jax.data.splits import WHOLE_TRAIN, split_by_hash, split_ids
from r2sm_jax.data.tfds import write_tfds
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.tables import describe_selection
from r2sm_jax.inference.export import portable_config
from r2sm_jax.inference.model_card import model_card
from r2sm_jax.query import Query
from r2sm_jax.sources import REPORTED, SourceSpec, load_json_split, open_split, split_names
from r2sm_jax.synthetic.scenes.source import SceneSource
from r2sm_jax.train import open_selecting, open_training
from r2sm_jax.training.run_folder import read_config, resolve_auto


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset folder: 60 images to train on, 8 to validate."""
    path = tmp_path_factory.mktemp("folder")
    for name, ids in {"train": range(1, 61), "val": range(101, 109)}.items():
        samples = []
        for number in ids:
            image = np.full((6, 8, 3), number, np.uint8)
            Image.fromarray(image).save(path / f"{number}.png")
            samples.append(
                Sample(number, f"{number}.png", image, (), (Query(number, "a cow", "modal", ()),))
            )
        write_records(path / f"{name}.json", to_records(samples))
    return path


def ids(source) -> set[int]:
    return {source[index].image_id for index in range(len(source))}


def test_dev_is_held_out_of_train_in_a_folder(folder, tmp_path):
    parts = {
        split: ids(load_json_split(folder, split)) for split in ("train", "dev", WHOLE_TRAIN, "val")
    }
    assert parts["train"] | parts["dev"] == parts[WHOLE_TRAIN] == set(range(1, 61)) and parts[
        "val"
    ] == {*range(101, 109)}
    assert not parts["train"] & parts["dev"] and 2 <= len(parts["dev"]) <= 12
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_bytes((folder / f"{split}.json").read_bytes())
    (tmp_path / "dev.json").write_bytes((folder / "val.json").read_bytes())
    own = {
        split: load_json_split(tmp_path, split, folder) for split in ("train", "dev", WHOLE_TRAIN)
    }
    assert [len(dataset) for dataset in own.values()] == [60, 8, 60]  # its own dev.json counts


def test_tfds_has_the_same_dev_with_its_own_and_without(folder, tmp_path):
    expected = {split: ids(load_json_split(folder, split)) for split in ("train", "dev", "val")}
    build(f"json:{folder}", out=tmp_path / "own")
    write_tfds(
        {"train": load_json_split(folder, WHOLE_TRAIN), "val": load_json_split(folder, "val")},
        tmp_path / "old",
    )
    for name in ("own", "old"):
        data = DataConfig(f"tfds:{tmp_path / name}")
        assert {split: ids(open_split(data, split)) for split in expected} == expected
    assert ids(open_split(DataConfig(f"tfds:{tmp_path / 'old'}"), WHOLE_TRAIN)) == set(range(1, 61))
    assert split_names(f"tfds:{tmp_path / 'own'}", REPORTED) == ["val"]


def test_the_path_of_a_json_file_is_a_source(folder, tmp_path):
    file = folder / "val.json"
    data = DataConfig(str(file))
    assert ids(open_split(data, "all")) == set(range(101, 109))
    assert split_names(str(file), REPORTED) == ["val"]
    assert SourceSpec.parse(f"json:{file}").is_same_data(SourceSpec.parse(str(file)))
    assert SourceSpec.parse("VAL.JSON").kind == "json"
    assert portable_config(Config(data=data)).data.source == "val.json"
    with pytest.raises(InputError, match="'compse:"):
        SourceSpec.parse("compse:a.json")


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 500])
def test_a_single_file_has_dev_beside_val(tmp_path, count):
    names = {number: f"{number}.jpg" for number in range(count)}
    parts = [split_ids(tmp_path, names, split) for split in ("train", "dev", "val")]
    assert set().union(*parts) == set(range(count)) and all(parts)
    assert sum(map(len, parts)) == (count if count > 2 else 3)
    assert count < 2 or not parts[2] & (parts[0] | parts[1])
    if count == 500:
        assert all(30 < len(part) < 70 for part in parts[1:])


def test_no_data_select_on_what_they_report(folder):
    for source in ("scenes", "cutouts:x", "compose:x.json", "json:x.json", "json:x", "tfds:x"):
        assert resolve_auto(Config(data=DataConfig(source=source))).train.select_on == "dev"
    with pytest.raises(InputError, match="test is for releases"):
        check_config(Config(train=LoopConfig(select_on="test")))


def test_the_papers_protocol_trains_on_dev_too_and_quick_evaluations_are_as_large_as_asked(
    folder, monkeypatch
):
    monkeypatch.setattr("r2sm_jax.sources.check_teaches", lambda *_: "")
    config = Config(
        data=DataConfig(source=f"json:{folder}"),
        train=LoopConfig(select_on="dev", evaluate_samples=3),
    )
    paper = replace(config, train=replace(config.train, select_on="val"))
    dev = load_json_split(folder, "dev")
    assert ids(open_training(config)) == set(range(1, 61)) - ids(dev)
    assert ids(open_training(paper)) == set(range(1, 61))
    few = open_selecting(config)
    assert len(few) == min(3, len(dev)) and ids(few) <= ids(dev)
    assert len(open_selecting(paper)) == 3
    # The split that selects is never more than what it is called.
    single = replace(config, train=replace(config.train, select_on="train"))
    assert ids(open_selecting(single)) < ids(load_json_split(folder, "train"))


def test_reports_say_what_was_selected_on():
    def selection(selected_on, *splits, trained_on="json:a"):
        meta = {"source": "json:a", "trained_on": trained_on, "selected_on": selected_on}
        return describe_selection({"meta": meta, "splits": dict.fromkeys(splits)})

    assert selection("dev", "val") == "The checkpoint was selected on `dev` of `json:a`."
    assert "Its figures are optimistic, as in the paper's protocol." in selection(
        "val", "val", "test"
    )
    assert selection(None, "val") == ""
    assert selection(None, "all") == "The run was trained on images of `all`."
    of_other_data = selection("val", "val", trained_on="json:b")
    assert of_other_data == "The checkpoint was selected on `val` of `json:b`."
    meta = {"source": "scenes", "predictions": "p.json"}
    assert describe_selection({"meta": meta, "splits": {"val": {}}}) == ""


def test_report_and_card_name_the_split(tiny_run):
    report = json.loads((tiny_run / "report.json").read_text())
    assert report["meta"]["selected_on"] == "dev" and report["meta"]["trained_on"] == "scenes"
    written = {
        "language_model": {"embedded": False, "sha256": "0"},
        "calibration": {"type_temperature": 1.0},
        "r2sm_jax_version": "1",
    }
    written |= {"step": 4, "weights_sha256": "0", "compact": True}
    card = model_card("mugs", written, read_config(tiny_run), report)
    for text in (
        (tiny_run / "report.md").read_text(),
        (tiny_run / "report.html").read_text(),
        card,
    ):
        assert "The checkpoint was selected on " in text


def test_drawn_scenes_have_a_test_split_that_nothing_opens_unasked():
    assert "test" not in split_names("scenes", "all") + split_names("scenes", REPORTED)
    test, others = (
        SceneSource("test", 4),
        [SceneSource(split, 4) for split in SceneSource.splits if split != "test"],
    )
    images = {
        sample.image.tobytes() for source in others for sample in map(source.__getitem__, range(4))
    }
    texts = {
        query.text for source in others for index in range(4) for query in source.queries_at(index)
    }
    assert len(images) == 20 and not {test[index].image.tobytes() for index in range(4)} & images
    assert not {query.text for index in range(4) for query in test.queries_at(index)} & texts


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 10**6), min_size=2, max_size=60))
def test_hold_out_law(numbers: set[int]) -> None:
    names = [f"{number}.png" for number in numbers]
    held_out = split_by_hash(names, 0.15)
    assert held_out and held_out < set(names)
    assert split_by_hash(names[::-1], 0.15) == held_out
    more = [*names, *(f"new{k}.png" for k in range(40))]
    assert len((split_by_hash(more, 0.15) ^ held_out) & set(names)) <= 1
