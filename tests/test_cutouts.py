"""Composed scenes: exact masks, the mixture of free and hidden objects, the split by object, and bad folders."""

import json
import multiprocessing
import os
import pickle
import warnings
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageDraw
from test_scenes import check_hiding

from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic import cutouts
from r2sm_jax.synthetic.cutout_folder import label_of
from r2sm_jax.synthetic.cutouts import (
    MAX_EXTENT,
    MAX_OCCLUSION,
    MIN_OCCLUSION,
    CutoutSource,
    place_cutouts,
)
from r2sm_jax.synthetic.pictures import ImageCache, paste_sprites
from r2sm_jax.synthetic.scenes.layout import Item
from r2sm_jax.synthetic.scenes.paint import Sprite
from r2sm_jax.synthetic.scenes.scene import make_scene

REAL = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data")) / "cutouts_fluent3d"
SCENES = 60
SHAPES = ("disc", "slab", "hoop", "bar", "kite", "frame")
NAMES = [f"{colour}-{shape}" for colour in ("red", "green", "blue", "grey") for shape in SHAPES]


def picture(shape: str, colour: str = "red", width: int = 90, height: int = 80) -> Image.Image:
    image = Image.new("RGBA", (width, height))
    draw, (x, y) = ImageDraw.Draw(image), (width - 8, height - 8)
    if shape == "disc":
        draw.ellipse((7, 7, x, y), colour)
    elif shape == "slab":
        draw.rectangle((7, 7, x, y), colour)
    elif shape == "hoop":
        draw.ellipse((7, 7, x, y), outline=colour, width=width // 7)
    elif shape == "bar":
        draw.rectangle((7, height // 2 - 5, x, height // 2 + 5), colour)
    elif shape == "kite":
        draw.polygon(((width / 2, 7), (x, height / 3), (width / 2, y), (7, height / 3)), colour)
    else:
        draw.rectangle((7, 7, x, y), outline=colour, width=width // 8)
    return image


def fill_folder(folder: Path, names: list[str] = NAMES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(names):
        colour, shape = name.split("-")
        image = picture(shape, colour, 60 + 23 * k % 150, 60 + 31 * k % 150)
        image.save(folder / f"{name}.{'webp' if k % 2 else 'png'}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return fill_folder(tmp_path_factory.mktemp("data") / "cutouts")


@pytest.fixture(scope="module")
def source(folder) -> CutoutSource:
    return CutoutSource(folder, "train", SCENES, seed=3)


@pytest.fixture(scope="module")
def samples(source) -> list[Sample]:
    return [source[index] for index in range(SCENES)]


def hidden(sample: Sample) -> list[float]:
    return [1 - i.modal.sum() / i.amodal.sum() for i in sample.instances if i.amodal is not None]


def digest(sample: Sample) -> str:
    total = sha256(
        sample.image.tobytes() + repr((sample.image_id, sample.file_name, sample.queries)).encode()
    )
    for i in sample.instances:
        assert i.amodal is not None
        total.update(repr((i.id, i.category)).encode() + i.modal.tobytes() + i.amodal.tobytes())
    return total.hexdigest()


def test_it_is_a_source_of_whole_samples(source: CutoutSource, samples: list[Sample]) -> None:
    assert isinstance(source, Source) and len(source) == SCENES
    assert source.vocabulary.keys() == {"category"}
    assert len({sample.image.tobytes() for sample in samples}) == SCENES
    for sample in samples:
        assert sample.image.shape == (96, 96, 3) and sample.image.dtype == np.uint8
        assert {i.category for i in sample.instances} <= set(source.vocabulary["category"])
        ids = [i.id for i in sample.instances]
        assert ids == list(range(1, len(ids) + 1))
        assert len(sample.queries) == 8 and Counter(q.mask_type for q in sample.queries) == {
            "modal": 4,
            "amodal": 4,
        }
        assert all(q.instance_ids and set(q.instance_ids) <= set(ids) for q in sample.queries)
    with pytest.raises(IndexError):
        source[SCENES]


def test_masks_are_exact(samples: list[Sample]) -> None:
    for sample in samples:
        modal = np.stack([i.modal for i in sample.instances])
        amodal = np.stack([i.amodal for i in sample.instances if i.amodal is not None])
        assert modal.dtype == amodal.dtype == bool and modal.shape == amodal.shape
        assert not (modal & ~amodal).any()
        assert modal.sum(0).max() == 1
        assert np.array_equal(
            modal.any(0), amodal.any(0)
        )  # what is hidden is hidden by another object


def test_the_mixture(samples: list[Sample]) -> None:
    rates = np.array([rate for sample in samples for rate in hidden(sample)])
    occluded = rates[rates > 0]
    assert 0.35 < (rates > 0).mean() < 0.65
    assert occluded.min() >= MIN_OCCLUSION and occluded.max() <= MAX_OCCLUSION
    counts = np.histogram(occluded, (MIN_OCCLUSION, 0.2, 0.4, 0.6, MAX_OCCLUSION))[0]
    assert counts.min() > 0.1 * counts.sum()
    sizes = Counter(len(sample.instances) for sample in samples)
    assert min(sizes) == 3 and max(sizes) <= 8 and len(sizes) >= 4


def test_copies_are_both_free_and_hidden(samples: list[Sample]) -> None:
    both = 0
    for sample in samples:
        by_class: dict[str, list[float]] = {}
        for instance, rate in zip(sample.instances, hidden(sample), strict=True):
            by_class.setdefault(instance.category, []).append(rate)
        both += any(min(rates) == 0 < max(rates) for rates in by_class.values())
    assert both > 0.15 * SCENES


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(32, 160),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8),
)
def test_any_layout_is_sound(seed: int, size: int, shapes: list[str]) -> None:
    rng = np.random.default_rng(seed)
    items = [
        (Item(shape, {}, ("hidden", "free", "any")[k % 3]), picture(shape))
        for k, shape in enumerate(shapes)
    ]
    placed = place_cutouts(rng, items, size)
    scene = make_scene(
        Image.new("RGB", (size, size)), placed, [p.sprite_in_picture() for p in placed]
    )
    assert len(scene.instances) == len(placed) <= len(items)
    assert [i.id for i in scene.instances] == list(range(1, len(placed) + 1))
    whole = sorted((p.item.category, int(p.sprite.mask.sum())) for p in placed)
    assert whole == sorted(
        (i.category, int(i.amodal.sum())) for i in scene.instances
    )  # nothing is cut off
    for p in placed:
        assert max(p.sprite.mask.shape) <= MAX_EXTENT * size + 1
    for instance, facts in zip(scene.instances, scene.facts, strict=True):
        assert not (instance.modal & ~instance.amodal).any()
        assert facts.occlusion == 0 or MIN_OCCLUSION <= facts.occlusion <= MAX_OCCLUSION
    check_hiding(scene)


def test_painting_blends_by_alpha() -> None:
    half = Image.new("RGBA", (4, 4), (200, 100, 0, 128))
    pane = Sprite(half, np.ones((4, 4), bool), 4, 4, extent=4)
    for seed in range(5):
        canvas = Image.new("RGB", (12, 12), (0, 0, 0))
        paste_sprites(np.random.default_rng(seed), canvas, [pane])
        inside = np.asarray(canvas)[4:8, 4:8].astype(int)
        assert np.abs(inside - (100, 50, 0)).max() <= 10  # a shadow may tint what lies behind


def test_rebuilt_exactly(folder: Path, source: CutoutSource, samples: list[Sample]) -> None:
    again = CutoutSource(str(folder), "train", SCENES, seed=3)
    copied = pickle.loads(pickle.dumps(source))
    for index in (17, 3, 40, 3):
        assert digest(again[index]) == digest(copied[index]) == digest(samples[index])
    assert digest(CutoutSource(folder, "train", SCENES, seed=4)[3]) != digest(samples[3])


def test_rebuilt_exactly_in_another_process(source: CutoutSource, samples: list[Sample]) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert digest(pool.apply(source.__getitem__, (5,))) == digest(samples[5])


def test_objects_are_split(folder: Path) -> None:
    sources = {split: CutoutSource(folder, split, 6) for split in CutoutSource.splits}
    shown = {split: {c.name for c in source.cutouts} for split, source in sources.items()}
    train, dev, val = (shown[split] for split in ("train", "dev", "val"))
    assert (
        train
        and dev
        and val
        and len(train) + len(dev) + len(val) == len(train | dev | val) == len(NAMES)
    )
    images = set()
    for split in CutoutSource.splits:
        found = [sources[split][index] for index in range(6)]
        images |= {sample.image.tobytes() for sample in found}
        assert shown[split] == {"train": train, "dev": dev}.get(split, val)
        assert {i.category for sample in found for i in sample.instances} <= {
            label_of(name) for name in shown[split]
        }
        if split == "val_hard":
            assert all(query.kind["hard"] for sample in found for query in sample.queries)
    assert len(images) == 6 * len(CutoutSource.splits)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("mug.png", "mug"),
        ("Red-Mug_02.png", "red mug"),
        ("sub/wineGlass.webp", "wine glass"),
        ("1f30b.webp", "object"),
        ("0007.png", "object"),
    ],
)
def test_label_of(name: str, label: str) -> None:
    assert label_of(name) == label


RECORDS = [
    {"file": "red-disc.png", "label": "Coin", "tags": ["money", "cash"], "group": "finance"},
    {"file": "red-slab.webp", "label": "woman’s  hat", "tags": []},
    {"file": "red-hoop.png", "label": None, "group": "jewels", "licence": "none"},
]


@pytest.mark.parametrize(
    "content",
    [RECORDS, {r["file"]: {k: v for k, v in r.items() if k != "file"} for r in RECORDS}],
    ids=["list", "object"],
)
def test_index(tmp_path: Path, content) -> None:
    fill_folder(tmp_path, NAMES[:5])
    (tmp_path / "index.json").write_text(json.dumps(content))
    sources = [CutoutSource(tmp_path, split, 4) for split in ("train", "dev", "val")]
    found = {
        c.name: (c.item.category, c.item.attributes.get("group"))
        for source in sources
        for c in source.cutouts
    }
    assert found == {
        "red-disc.png": ("coin", "finance"),
        "red-slab.webp": ("woman's hat", None),
        "red-hoop.png": ("red hoop", "jewels"),
    }
    assert [len(source.cutouts) for source in sources] == [1, 1, 1]
    for source in sources:
        assert set(source.vocabulary.get("group", ())) == {
            c.item.attributes["group"] for c in source.cutouts if c.item.attributes
        }
        groups = {c.item.category: c.item.attributes for c in source.cutouts}
        for sample in map(source.__getitem__, range(4)):
            assert all(i.attributes == groups[i.category] for i in sample.instances)


def test_index_of_plain_labels_and_subfolders(tmp_path: Path) -> None:
    fill_folder(tmp_path / "round", ["red-disc", "red-hoop"])
    disc = {"label": "disc", "file": "other.png"}
    (tmp_path / "index.json").write_text(
        json.dumps({"round/red-disc.png": disc, "round/red-hoop.webp": "hoop"})
    )
    labels = {
        c.item.category
        for split in ("train", "val")
        for c in CutoutSource(tmp_path, split, 1).cutouts
    }
    assert labels == {"disc", "hoop"}


def test_labels_that_could_mean_each_other_never_meet(tmp_path: Path) -> None:
    names = NAMES[:12]
    fill_folder(tmp_path, names)
    labels = ["cow", "cow face", "dog", "poodle", "hot dog", "mug"] * 2
    records = [
        {"file": path.name, "label": label, "tags": ["curly dog"] if label == "poodle" else []}
        for path, label in zip(sorted(tmp_path.iterdir()), labels, strict=True)
    ]
    (tmp_path / "index.json").write_text(json.dumps(records))
    met = Counter()
    source = CutoutSource(tmp_path, "train", 40)
    assert len(source.vocabulary["category"]) == 6
    for sample in map(source.__getitem__, range(40)):
        seen = {i.category for i in sample.instances}
        assert (
            not any({"dog", other} <= seen for other in ("poodle", "hot dog"))
            and not {"cow", "cow face"} <= seen
        )
        met.update(seen)
    assert set(met) == set(labels)


def test_backgrounds(tmp_path: Path, folder: Path) -> None:
    tones = {f"{k}.jpg": (17 * k, 200 - 13 * k, 90) for k in range(12)}
    for name, tone in tones.items():
        Image.new("RGB", (150, 110), tone).save(tmp_path / name)
    seen = {}
    for split in ("train", "val"):
        source = CutoutSource(folder, split, 20, backgrounds=tmp_path)
        corners = [
            sample.image[:2, :2].reshape(-1, 3).astype(int)
            for sample in map(source.__getitem__, range(20))
        ]
        seen[split] = {
            name
            for name, tone in tones.items()
            for corner in corners
            if np.abs(corner - tone).max() <= 4
        }
        assert seen[split] <= {photo.name for photo in source.photos}
    assert seen["train"] and seen["val"] and not seen["train"] & seen["val"]


def test_a_single_background_serves_all_splits(tmp_path: Path, folder: Path) -> None:
    Image.new("RGB", (40, 300), (10, 200, 30)).save(tmp_path / "green.png")
    for split in ("train", "val"):
        assert CutoutSource(folder, split, 1, backgrounds=tmp_path)[0].image.shape == (96, 96, 3)


def test_unusable_images_are_left_out_with_one_warning(tmp_path: Path) -> None:
    fill_folder(tmp_path, NAMES[:4])
    Image.new("RGB", (30, 30), "red").save(tmp_path / "photo.png")
    Image.new("RGBA", (30, 30), (255, 0, 0, 255)).save(tmp_path / "opaque.png")
    Image.new("RGBA", (30, 30), (255, 0, 0, 90)).save(tmp_path / "ghost.webp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        sources = [CutoutSource(tmp_path, split, 1) for split in CutoutSource.splits]
    assert len(caught) == 1, [str(c.message) for c in caught]
    assert "left out 3 of 7 images" in str(caught[0].message) and "ghost.webp, opaque.png" in str(
        caught[0].message
    )
    assert {c.name.split(".")[0] for source in sources for c in source.cutouts} == set(NAMES[:4])


def empty(folder: Path) -> None:
    folder.mkdir()


def only_opaque(folder: Path) -> None:
    folder.mkdir()
    Image.new("RGB", (30, 30)).save(folder / "a.png")


def single(folder: Path) -> None:
    fill_folder(folder, NAMES[:1])


def damaged(folder: Path) -> None:
    whole = (fill_folder(folder) / "red-hoop.png").read_bytes()
    (folder / "red-hoop.png").write_bytes(whole[: len(whole) // 2])


def no_image(folder: Path) -> None:
    (fill_folder(folder) / "red-hoop.png").write_text("hello")


def indexed(content):
    def make(folder: Path) -> None:
        fill_folder(folder)
        (folder / "index.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "no such folder; give"),
        (empty, "no .png or .webp file in the folder; put"),
        (only_opaque, "none of its 1 images is a cut-out"),
        (single, "red-disc.png is the only cut-out; add"),
        (damaged, "red-hoop.png: the image is damaged"),
        (no_image, "red-hoop.png: this is not an image; give"),
        (indexed("[{"), "index.json: this is not JSON"),
        (indexed([]), "index.json: there is no list of cut-outs"),
        (indexed("3"), "index.json: there is no list of cut-outs"),
        (indexed(["red-disc.png"]), "index.json: there is no list of cut-outs"),
        (indexed([{"label": "disc"}]), "record 1: its file is None; give the path of a file"),
        (indexed({"red-disc.png": 3}), "record 1: its label is 3; give a text with a word in it"),
        (
            indexed([{"file": "red-disc.png"}, {"file": "gone.png"}]),
            "gone.png: there is no such image",
        ),
        (indexed([{"file": "red-disc.png"}] * 2), "red-disc.png is listed 2 times; keep one"),
        (
            indexed([{"file": "../cutouts/red-disc.png"}]),
            "record 1: its file is '../cutouts/red",
        ),
        (indexed([{"file": "/etc/passwd"}]), "record 1: its file is '/etc/passwd'; give the path"),
        (indexed([{"file": "C:\\x.png"}]), "record 1: its file is"),
        (indexed([{"file": "red-disc.png", "label": 3}]), "record 1: its label is 3; give a text"),
        (
            indexed([{"file": "red-disc.png", "label": "?!"}]),
            "its label is '?!'; give a text with a word in it",
        ),
        (
            indexed([{"file": "red-disc.png", "group": ["a"]}]),
            "record 1: its group is ['a']; give a text",
        ),
        (indexed([{"file": "red-disc.png", "tags": "a"}]), "its tags is 'a'; give a list of texts"),
    ],
)
def test_bad_folders(tmp_path: Path, make, words: str) -> None:
    make(tmp_path / "cutouts")
    with pytest.raises(InputError) as error:
        CutoutSource(tmp_path / "cutouts", "train", 1)
    assert words in str(error.value) and str(tmp_path / "cutouts") in str(error.value)
    assert "\n" not in str(error.value) and ";" in str(error.value)


def test_other_bad_input(tmp_path: Path, folder: Path, monkeypatch) -> None:
    with pytest.raises(InputError, match="these data have the splits train, val"):
        CutoutSource(folder, "test", 1)
    with pytest.raises(InputError, match="no such folder; give one with background photos"):
        CutoutSource(folder, "train", 1, backgrounds=tmp_path / "none")
    (tmp_path / "x.jpg").write_text("hello")
    with pytest.raises(InputError, match=r"x\.jpg: this is not an image"):
        CutoutSource(folder, "train", 1, backgrounds=tmp_path)[0]
    monkeypatch.setattr(cutouts, "MAX_LAYOUTS", 0)
    with pytest.raises(InputError, match="attempts gave no picture with 3 objects"):
        CutoutSource(folder, "train", 1)[0]


def test_a_cache_keeps_the_latest_images_within_its_bytes() -> None:
    cache = ImageCache[int](max_bytes=6 * 10 * 16**2, image_side=16)
    reads: list[int] = []

    def read(k: int) -> int:
        return cache.get(k, lambda: reads.append(k) or k)

    for k in (*range(10), 0, 10, 0, 1):  # 0 is used again before 10 replaces the oldest, which is 1
        assert read(k) == k
    assert reads == [*range(11), 1]
    assert pickle.loads(pickle.dumps(cache)).get(0, lambda: -1) == -1


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not there (set R2SM_REAL_DATA)")
def test_rendered_objects() -> None:
    source = CutoutSource(REAL, "val_phrasing", 20)
    assert len(source.vocabulary["category"]) > 80 and "food-drink" in source.vocabulary["group"]
    rates = [rate for sample in map(source.__getitem__, range(20)) for rate in hidden(sample)]
    assert 0.3 < np.mean(np.array(rates) > 0) < 0.7 and max(rates) <= MAX_OCCLUSION
