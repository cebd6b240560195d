"""Objects of the class of what they hide (`same_class_occluders`): how many, and what is said of
them."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_pictures import PHOTO_CLASSES, check_instances, digest, write_cutouts, write_photos

from r2sm_jax.config import Config, DataConfig, check_config
from r2sm_jax.data.dataset import Sample
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.queries.nouns import lexicon
from r2sm_jax.synthetic.queries.phrases import read_toml
from r2sm_jax.synthetic.scenes.layout import Layout
from r2sm_jax.synthetic.sources import open_dataset

SIZE, NUM_PICTURES = 96, 100
COUNTS = {"the two": 2, "all three": 3, "all four": 4, "all five": 5}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


def share_of_same_class(
    source: ComposeSource, monkeypatch, *, over_photo_alone: bool = False
) -> float:
    """Of the objects that are laid over others; `over_photo_alone`: over those of the photo."""
    targets: list[str] = []
    is_same = []
    choose, place = Layout.choose_object_to_hide, Layout.place_on_top

    def choose_and_note(layout, rng):
        target = choose(layout, rng)
        item = None if target is None else layout.placed[target].item
        # What is pasted may be hidden; objects of the photo should be.
        counts = item is not None and (item.occlusion == "hidden" or not over_photo_alone)
        targets.append(item.category if counts else "")
        return target

    def place_and_note(layout, placed):
        if placed.is_occluder and targets[-1]:
            is_same.append(placed.item.category == targets[-1])
        place(layout, placed)

    with monkeypatch.context() as patch:
        patch.setattr(Layout, "choose_object_to_hide", choose_and_note)
        patch.setattr(Layout, "place_on_top", place_and_note)
        for index in range(NUM_PICTURES):
            source.make_scene(index)
    assert len(is_same) > NUM_PICTURES / 3
    return float(np.mean(is_same))


def test_the_share_is_as_asked(file, monkeypatch):
    """The rest is of the same class as often as chance has it."""
    shares = {}
    for asked in (0.0, 0.5, 1.0):
        source = ComposeSource(file, "train", 60, size=SIZE, same_class_occluders=asked)
        shares[asked] = share_of_same_class(source, monkeypatch)
    assert 0.1 < shares[0.0] < 0.45  # of four classes
    assert shares[0.5] == pytest.approx(0.5 + 0.5 * shares[0.0], abs=0.1)
    assert shares[1.0] == 1.0


def test_another_class_where_no_other_photo_has_one(file, tmp_path, monkeypatch):
    """Each photo has a class of its own; objects of a folder of cut-outs are laid over it, too."""
    records = json.loads(file.read_text())
    letters = "abcdefghij"
    names = [f"qu{first}{second}m" for first in letters for second in letters]
    records["categories"] = [{"id": k, "name": names[k]} for k in range(len(records["images"]))]
    for annotation in records["annotations"]:
        annotation["category_id"] = annotation["image_id"] - 1
    path = tmp_path / "own.json"
    path.write_text(json.dumps(records))
    source = ComposeSource(
        path,
        "train",
        60,
        size=SIZE,
        images=file.parent / "images",
        cutouts=write_cutouts(tmp_path / "cutouts"),
        same_class_occluders=1.0,
    )
    assert share_of_same_class(source, monkeypatch, over_photo_alone=True) == 0.0


@pytest.fixture(scope="module")
def samples(file) -> list[Sample]:
    source = ComposeSource(file, "train", 120, size=SIZE, queries=12, same_class_occluders=1.0)
    return [source[index] for index in range(120)]


def classes_of(sample: Sample) -> Counter[str]:
    """Also of what is ignored: nobody may count what a crowd hides."""
    return Counter(instance.category for instance in sample.instances)


def test_absent_things_are_absent(samples):
    nouns = {name: lexicon().classes[name].nouns for name in PHOTO_CLASSES[:3]}
    nouns["wooden crate"] = ["wooden crate"]
    num_absent = 0
    for sample in samples:
        check_instances(sample)
        absent = set(PHOTO_CLASSES) - classes_of(sample).keys()
        for query in sample.queries:
            if not query.instance_ids:
                assert any(noun in query.text.lower() for name in absent for noun in nouns[name])
                num_absent += 1
    assert num_absent > 40


def test_counts_and_comparisons_are_true(samples):
    """ "The two dogs", "all three cups": all of the class are meant. "The larger dog": there are
    two."""
    size_words = read_toml("phrases.toml")["size"]
    of_two = [*size_words["larger"], *size_words["smaller"]]
    checked = Counter[str]()
    for sample in samples:
        present = classes_of(sample)
        category_of = {instance.id: instance.category for instance in sample.instances}
        for query in sample.queries:
            words = re.findall(r"[a-z]+", query.text.lower())
            categories = {category_of[number] for number in query.instance_ids}
            if len(categories) != 1:
                continue  # two names, or nothing
            (category,) = categories
            for phrase, count in COUNTS.items():
                if phrase in query.text.lower():
                    assert len(query.instance_ids) == count == present[category], query.text
                    checked["count"] += 1
            if len(query.instance_ids) == 1 and any(word in words for word in of_two):
                assert present[category] == 2, query.text
                checked["comparison"] += 1
    assert checked["count"] >= 5 and checked["comparison"] >= 5, checked


def test_it_is_off_unless_asked_for_and_for_training_alone(file):
    plain = ComposeSource(file, "train", 60, size=SIZE)
    off = ComposeSource(file, "train", 60, size=SIZE, same_class_occluders=0.0)
    data = DataConfig(source=f"compose:{file}", same_class_occluders=1.0)
    asked = open_dataset(data, "train", image_size=SIZE, count=60)
    assert digest(plain[3]) == digest(off[3])
    assert plain.fingerprint() == off.fingerprint() != asked.fingerprint()
    assert any(digest(plain[k]) != digest(asked[k]) for k in range(8))
    for split in ("dev", "val_absent"):
        val = ComposeSource(file, split, 3, size=SIZE, same_class_occluders=1.0)
        other = ComposeSource(file, split, 3, size=SIZE)
        assert val.fingerprint() == other.fingerprint()
        assert [digest(val[k]) for k in range(3)] == [digest(other[k]) for k in range(3)]
    with pytest.raises(InputError, match=r"same-class-occluders 1\.5"):
        check_config(Config(data=DataConfig(same_class_occluders=1.5)))
