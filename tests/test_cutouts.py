"""Scenes of cut-outs: exact masks, the mixture of free and hidden objects, the split by object, and
bad folders."""

import json
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from made_pictures import (
    CUTOUT_NAMES,
    SHAPES,
    check_hiding,
    check_instances,
    draw_cutout,
    write_cutouts,
)
from PIL import Image

from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.cutouts import (
    MAX_EXTENT,
    MAX_OCCLUSION,
    MIN_OCCLUSION,
    CutoutSource,
    label_of,
    place_cutouts,
)
from r2sm_jax.synthetic.scenes.layout import Item
from r2sm_jax.synthetic.scenes.scene import make_scene

NUM_SCENES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_cutouts(tmp_path_factory.mktemp("data") / "cutouts")


@pytest.fixture(scope="module")
def source(folder) -> CutoutSource:
    return CutoutSource(folder, "train", NUM_SCENES, seed=3)


@pytest.fixture(scope="module")
def samples(source) -> list[Sample]:
    return [source[index] for index in range(NUM_SCENES)]


def write_index(folder: Path, content) -> None:
    (folder / "index.json").write_text(json.dumps(content))


def test_samples_are_sound(source, samples):
    assert isinstance(source, Source) and len(source) == NUM_SCENES
    assert len({sample.image.tobytes() for sample in samples}) == NUM_SCENES
    for sample in samples:
        assert sample.image.shape == (96, 96, 3) and sample.image.dtype == np.uint8
        check_instances(sample)
        check_hiding(sample.instances, [])
        assert {i.category for i in sample.instances} <= set(source.vocabulary["category"])
        assert Counter(q.mask_type for q in sample.queries) == {"modal": 4, "amodal": 4}
        assert all(query.instance_ids for query in sample.queries)
    with pytest.raises(IndexError):
        source[NUM_SCENES]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(32, 160),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8),
)
def test_any_layout_is_sound(seed, size, shapes):
    items = []
    for k, shape in enumerate(shapes):
        items.append((Item(shape, {}, ("hidden", "free", "any")[k % 3]), draw_cutout(shape)))
    placed = place_cutouts(np.random.default_rng(seed), items, size)
    sprites = [p.sprite_in_picture() for p in placed]
    scene = make_scene(Image.new("RGB", (size, size)), placed, sprites)

    areas = sorted((p.item.category, p.sprite.mask.sum()) for p in placed)
    assert areas == sorted((i.category, i.amodal.sum()) for i in scene.instances)  # none is cut
    assert all(max(p.sprite.mask.shape) <= MAX_EXTENT * size + 1 for p in placed)
    for facts in scene.facts:
        assert facts.occlusion == 0 or MIN_OCCLUSION <= facts.occlusion <= MAX_OCCLUSION
    if placed:
        check_instances(Sample(0, "", scene.image, scene.instances, ()))
        check_hiding(scene.instances, scene.facts)


def test_objects_are_split(folder):
    sources = {split: CutoutSource(folder, split, 6) for split in CutoutSource.splits}
    names = {split: {c.path.name for c in source.cutouts} for split, source in sources.items()}
    parts = [names[split] for split in ("train", "dev", "val")]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(CUTOUT_NAMES)
    assert names["val"] == names["val_phrasing"] == names["val_hard"]

    for split, source in sources.items():
        labels = {label_of(name) for name in names[split]}
        assert {i.category for index in range(6) for i in source[index].instances} <= labels


def test_file_names_give_labels():
    names = ("Red-Mug_02.png", "sub/wineGlass.webp", "1f30b.webp", "0007.png")
    assert [label_of(name) for name in names] == ["red mug", "wine glass", "object", "object"]


def test_an_index_gives_labels_and_groups(tmp_path):
    write_cutouts(tmp_path, CUTOUT_NAMES[:5])
    records = [
        {"file": "red-disc.png", "label": "Coin", "tags": ["money", "cash"], "group": "finance"},
        {"file": "red-slab.webp", "label": "woman’s  hat", "tags": []},
        {"file": "red-hoop.png", "label": None, "group": "jewels", "licence": "none"},
    ]
    write_index(tmp_path, records)
    sources = [CutoutSource(tmp_path, split, 4) for split in ("train", "dev", "val")]
    cutouts_of_splits = [source.cutouts for source in sources]
    assert [len(part) for part in cutouts_of_splits] == [1, 1, 1]
    assert {c.path.name: (c.item.category, c.item.attributes) for (c,) in cutouts_of_splits} == {
        "red-disc.png": ("coin", {"group": "finance"}),
        "red-slab.webp": ("woman's hat", {}),
        "red-hoop.png": ("red hoop", {"group": "jewels"}),
    }
    for source, (cutout,) in zip(sources, cutouts_of_splits, strict=True):
        assert source.vocabulary.get("group", ()) == tuple(cutout.item.attributes.values())
        assert source[0].instances[0].attributes == cutout.item.attributes


def test_labels_that_could_mean_each_other_never_meet(tmp_path):
    write_cutouts(tmp_path, CUTOUT_NAMES[:12])
    labels = ["cow", "cow face", "dog", "poodle", "hot dog", "mug"] * 2
    records = []
    for path, label in zip(sorted(tmp_path.iterdir()), labels, strict=True):
        tags = ["curly dog"] if label == "poodle" else []
        records.append({"file": path.name, "label": label, "tags": tags})
    write_index(tmp_path, records)
    source = CutoutSource(tmp_path, "train", 40)
    all_labels = set()
    for index in range(40):
        present = {i.category for i in source[index].instances}
        for pair in ({"dog", "poodle"}, {"dog", "hot dog"}, {"cow", "cow face"}):
            assert not pair <= present
        all_labels |= present
    assert all_labels == set(labels)


def test_tags_and_uses_give_queries_that_do_not_name_the_object(tmp_path):
    write_cutouts(tmp_path)
    ideas = dict(zip(SHAPES, ("sun", "meal", "wedding", "gold", "wind", "window"), strict=True))
    records = []
    for name in sorted(path.name for path in tmp_path.iterdir()):
        colour, shape = label_of(name).split()
        tags, uses = [ideas[shape], "disc shaped"], [f"to make a {colour} one"]
        records.append({"file": name, "label": shape, "tags": tags, "uses": uses})
    write_index(tmp_path, records)

    counts = Counter()
    for split in ("train", "val_phrasing"):
        source = CutoutSource(tmp_path, split, 40, size=64)
        for sample in map(source.__getitem__, range(40)):
            category = {i.id: i.category for i in sample.instances}
            for query in sample.queries:
                if query.kind["task"] != "reasoning":
                    continue
                names = {category[i] for i in query.instance_ids}
                words = set(re.findall(r"[a-z]+", query.text.lower()))
                assert not names & words
                if words & set(ideas.values()):  # everything of that shape, and nothing else
                    counts[split, "idea"] += 1
                    (shape,) = names
                    assert ideas[shape] in words
                    same_shape = {i for i, name in category.items() if name == shape}
                    assert set(query.instance_ids) == same_shape
                elif "disc" in words:  # an idea of all, but not where it names one
                    assert "disc" not in category.values()
                else:
                    counts[split, "use"] += 1
                    assert "to make a" in query.text.lower()
    assert len(counts) == 4 and min(counts.values()) > 2, counts


def test_cutouts_of_one_photo_are_of_one_split(tmp_path):
    write_cutouts(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    write_index(tmp_path, [{"file": f, "photo": f"{k // 4}.jpg"} for k, f in enumerate(files)])
    splits = ("train", "dev", "val")
    photos = [{c.photo for c in CutoutSource(tmp_path, s, 1).cutouts} for s in splits]
    assert all(photos) and sum(map(len, photos)) == len(set.union(*photos)) == 6


def test_backgrounds_are_split(tmp_path, folder):
    for k in range(12):
        Image.new("RGB", (150, 110), (17 * k, 200 - 13 * k, 90)).save(tmp_path / f"{k}.jpg")
    photos = []
    for split in ("train", "dev", "val"):
        source = CutoutSource(folder, split, 1, backgrounds=tmp_path)
        photos.append({int(path.stem) for path in source.photos})
        red, green, _ = source[0].image[0, 0].astype(int)
        assert any(abs(red - 17 * k) + abs(green - 200 + 13 * k) <= 6 for k in photos[-1])
    assert all(photos) and sum(map(len, photos)) == len(set.union(*photos)) == 12
    photo = tmp_path / "3.jpg"
    photo.write_bytes(photo.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"1 of 12 images cannot be used; .*3\.jpg"):
        CutoutSource(folder, "train", 1, backgrounds=tmp_path)


def test_unusable_images_are_left_out_with_one_warning(tmp_path):
    write_cutouts(tmp_path, CUTOUT_NAMES[:4])
    Image.new("RGB", (30, 30), "red").save(tmp_path / "photo.png")
    Image.new("RGBA", (30, 30), (255, 0, 0, 90)).save(tmp_path / "ghost.webp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        sources = [CutoutSource(tmp_path, split, 1) for split in CutoutSource.splits]
    (warning,) = caught
    assert "left out 2 of 6 images" in str(warning.message)
    names = {c.path.name.split(".")[0] for source in sources for c in source.cutouts}
    assert names == set(CUTOUT_NAMES[:4])


DISC = {"file": "red-disc.png"}
OPAQUE = Image.new("RGB", (30, 30))
REFUSED = [
    ([], {}, "at least one"),
    (["red-disc.png"], {}, "list of cut-outs"),
    ([{"label": "disc"}], {}, "missing required field `file`"),
    ([DISC, {"file": "gone.png"}], {}, "gone.png"),
    ([DISC, DISC], {}, "list each cut-out once"),
    ([DISC | {"tags": "a"}], {}, "tags"),
    ([DISC], {}, "all cut-outs are of red-disc.png"),
    ([{"file": "opaque.jpg"}], {}, "no cut-out"),
    (None, {"split": "test"}, "splits train"),
    (None, {"folder": Path("none")}, "no such folder"),
    (None, {"backgrounds": "none"}, "background photos"),
]


@pytest.mark.parametrize(("index", "options", "words"), REFUSED)
def test_a_wrong_folder_or_index_is_refused(tmp_path, index, options, words):
    write_cutouts(tmp_path)
    OPAQUE.save(tmp_path / "opaque.jpg")
    if index is not None:
        write_index(tmp_path, index)
    with pytest.raises(InputError, match=words):
        CutoutSource(**{"folder": tmp_path, "split": "train", "count": 1} | options)
