"""Composed photographs: which objects are complete, exact masks, splits, the same picture at every visit, bad files."""

import json
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy import ndimage
from test_cutouts import digest, fill_folder, hidden

from r2sm_jax.config import is_procedural
from r2sm_jax.data.dataset import Instance, Sample, Source
from r2sm_jax.data.masks import encode
from r2sm_jax.data.sources import open_source
from r2sm_jax.data.splits import WHOLE_TRAIN, split_by_hash
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import make_report, write_report
from r2sm_jax.synthetic.compose import MAX_OCCLUSION, MIN_OCCLUSION, ComposeSource
from r2sm_jax.synthetic.cutouts import CutoutSource
from r2sm_jax.synthetic.photos import Photos, find_complete
from r2sm_jax.synthetic.queries.nouns import lexicon
from r2sm_jax.synthetic.scenes.scene import describe_objects, forbidden_targets
from r2sm_jax.tools.compose import compose, cutouts

REAL = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data")) / "photos_coco"
WIDTH, HEIGHT, SIZE, PICTURES = 160, 120, 96, 60
NAMES = ("dog", "chair", "cup", "wooden crate")


def box_mask(shape: tuple[int, int], *boxes: tuple[int, int, int, int]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for x0, y0, x1, y1 in boxes:
        mask[y0:y1, x0:x1] = True
    return mask


def write_photos(folder: Path, count: int = 90) -> Path:
    """Photos of a free ellipse, of one that the right border cuts, and of a crowd, each on a tone of its own."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    records = {
        "images": [],
        "annotations": [],
        "categories": [{"id": k, "name": n} for k, n in enumerate(NAMES, 1)],
    }
    for k in range(count):
        name = f"{k:03d}.jpg"
        tone = tuple(int(v) for v in rng.integers(40, 200, 3))
        photo = Image.new("RGB", (WIDTH, HEIGHT), tone)
        draw = ImageDraw.Draw(photo)
        records["images"].append({"id": k + 1, "file_name": name, "width": WIDTH, "height": HEIGHT})
        radius = int(rng.integers(14, 30))
        for x, y, r in ((45, 60, radius), (WIDTH - 8, 60, 20)):
            angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
            corners = np.stack([x + r * np.cos(angle), y + 0.9 * r * np.sin(angle)], 1).clip(
                0, (WIDTH, HEIGHT)
            )
            draw.polygon(
                [tuple(corner) for corner in corners],
                tuple(int(v) for v in rng.integers(0, 255, 3)),
            )
            records["annotations"].append(
                {"segmentation": [corners.ravel().tolist()], "iscrowd": 0}
            )
        crowd = {
            "size": [HEIGHT, WIDTH],
            "counts": [100 * HEIGHT, 5 * HEIGHT, (WIDTH - 105) * HEIGHT],
        }
        records["annotations"].append({"segmentation": crowd, "iscrowd": 1})
        for annotation in records["annotations"][-3:]:
            annotation |= {"image_id": k + 1, "category_id": 1 + int(rng.integers(len(NAMES)))}
        photo.save(folder / "images" / name, quality=95)
    for number, annotation in enumerate(records["annotations"], 1):
        annotation["id"] = number
    (folder / "instances.json").write_text(json.dumps(records))
    return folder / "instances.json"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def source(file: Path) -> ComposeSource:
    return ComposeSource(file, "train", PICTURES, seed=3, size=SIZE)


@pytest.fixture(scope="module")
def samples(source: ComposeSource) -> list[Sample]:
    return [source[index] for index in range(PICTURES)]


def fingerprint(sample: Sample) -> str:
    """A hash of a sample, also of instances whose complete mask is not known."""
    known = tuple(
        Instance(i.id, f"{i.category} {i.amodal is None}", i.modal, i.complete)
        for i in sample.instances
    )
    return digest(Sample(sample.image_id, sample.file_name, sample.image, known, sample.queries))


@pytest.mark.parametrize(
    ("others", "complete"),
    [
        ([], True),
        ([(60, 20, 70, 60)], True),  # far away
        ([(41, 20, 70, 60)], True),  # one pixel between them
        ([(40, 20, 70, 60)], False),  # side by side
        ([(38, 20, 70, 60)], False),  # overlapping
        ([(10, 10, 90, 90)], True),  # much larger and drawn through it: it lies behind
        ([(28, 10, 90, 90)], True),  # drawn through 12 / 20 of it
        ([(36, 10, 90, 90)], False),  # drawn through 4 / 20 of it
        ([(28, 20, 50, 60)], False),  # drawn through it, but not 1.5 times as large
        ([(10, 10, 90, 90), (38, 20, 70, 60)], False),
    ],
)
def test_an_object_is_complete_if_no_other_can_hide_it(others, complete):
    mask = box_mask((100, 100), (20, 20, 40, 60))
    assert find_complete([mask, *(box_mask((100, 100), other) for other in others)])[0] is complete


@pytest.mark.parametrize(
    ("boxes", "complete"),
    [
        ([(1, 1, 40, 40)], True),
        ([(0, 20, 40, 60)], False),
        ([(20, 0, 40, 60)], False),
        ([(60, 20, 100, 60)], False),
        ([(20, 60, 40, 100)], False),
        ([(60, 60, 99, 99)], True),
        ([(20, 20, 40, 40), (20, 45, 40, 60)], False),  # in two parts
        ([(20, 20, 40, 60), (50, 50, 52, 52)], True),  # the second part is 4 of 804 pixels
        ([], False),
    ],
)
def test_an_object_is_complete_if_it_is_whole_inside_the_photo(boxes, complete):
    assert find_complete([box_mask((100, 100), *boxes)]) == [complete]


def test_it_is_a_source_of_whole_samples(source: ComposeSource, samples: list[Sample]) -> None:
    assert isinstance(source, Source) and is_procedural("compose:x.json")
    assert source.vocabulary == {"category": NAMES}
    for sample in samples:
        height, width, channels = sample.image.shape
        assert (width, channels) == (SIZE, 3) and sample.image.dtype == np.uint8
        assert (
            abs(height - SIZE * HEIGHT // WIDTH) <= 1
        )  # a part of the photo has its shape but for rounding
        assert [i.id for i in sample.instances] == list(range(1, len(sample.instances) + 1))
        kinds = {i.id: i for i in sample.instances}
        for query in sample.queries:
            meant = [kinds[i] for i in query.instance_ids]
            assert not any(i.ignore for i in meant)
            assert query.mask_type == "modal" or all(i.amodal is not None for i in meant)
        assert sum(not query.instance_ids for query in sample.queries) <= 1
    assert sum(len(sample.queries) for sample in samples) > 6 * PICTURES
    assert (
        sum(query.instance_ids == () for sample in samples for query in sample.queries)
        > 0.5 * PICTURES
    )


def test_masks_are_exact_and_hidden_shares_in_range(samples: list[Sample]) -> None:
    shares = []
    for sample in samples:
        assert np.stack([i.modal for i in sample.instances]).sum(0).max() == 1
        for instance in sample.instances:
            assert instance.modal.any()
            if instance.amodal is not None:
                assert not (instance.modal & ~instance.amodal).any()
                share = 1 - instance.modal.sum() / instance.amodal.sum()
                shares += [share] if share and not instance.ignore else []
    assert (
        len(shares) > PICTURES / 2 and min(shares) >= MIN_OCCLUSION and max(shares) <= MAX_OCCLUSION
    )
    assert min(np.histogram(shares, (MIN_OCCLUSION, 0.25, 0.45, MAX_OCCLUSION))[0]) > 0.1 * len(
        shares
    )


def test_photos_stay_as_they_are_but_for_training(file: Path) -> None:
    """Some pictures are the photo itself; what the border cuts is modal only, the free ellipse has both masks."""
    plain, source = 0, ComposeSource(file, "dev", PICTURES, seed=3, size=SIZE)
    for index, sample in enumerate(map(source.__getitem__, range(PICTURES))):
        photo = source.photos.read_photo(
            source.photo_indices[index % len(source.photo_indices)], SIZE
        )
        if np.array_equal(sample.image, np.asarray(photo.image)):
            plain += 1
            whole = [i for i in sample.instances if i.amodal is not None]
            assert len(sample.instances) == 3 and len(whole) == 1 and hidden(sample) == [0]
            assert [i.ignore for i in sample.instances] == [
                False,
                True,
                False,
            ]  # the crowd is in the middle
            ellipse = next(seen for seen in photo.objects if seen.complete)
            assert whole[0].modal.sum() == ellipse.sprite.mask.sum()
        else:
            assert len(sample.instances) > 3 or any(hidden(sample))
    assert 0.08 * PICTURES < plain < 0.4 * PICTURES


def test_rebuilt_exactly(file: Path, source: ComposeSource, samples: list[Sample]) -> None:
    again = ComposeSource(str(file), "train", PICTURES, seed=3, size=SIZE)
    copied = pickle.loads(pickle.dumps(source))
    for index in (17, 3, 40, 3):
        assert (
            fingerprint(again[index]) == fingerprint(copied[index]) == fingerprint(samples[index])
        )
    assert fingerprint(ComposeSource(file, "train", PICTURES, seed=4, size=SIZE)[3]) != fingerprint(
        samples[3]
    )


def test_photos_and_cutouts_are_split(file: Path) -> None:
    sources = {
        split: open_source(f"compose:{file}", split, count=6, size=SIZE)
        for split in ("train", "dev", "val")
    }
    photos = {split: set(source.photo_indices) for split, source in sources.items()}  # type: ignore[attr-defined]
    assert sum(map(len, photos.values())) == len(set.union(*photos.values())) == 90
    assert len(photos["train"]) > 50 and min(map(len, photos.values())) > 4
    for split, source in sources.items():
        assert {cutout.photo for cutout in source.cutouts} <= photos[split]  # type: ignore[attr-defined]
    hard = ComposeSource(file, "val_hard", 4, size=SIZE)
    assert set(hard.photo_indices) == photos["val"]
    assert all(
        query.kind["hard"] for sample in map(hard.__getitem__, range(4)) for query in sample.queries
    )
    names = [f"{k:03d}.jpg" for k in range(90)]
    assert photos["train"] == {
        k for k, name in enumerate(names) if name not in split_by_hash(names, 0.25)
    }


def test_all_queries_are_modal_where_no_complete_mask_is_known() -> None:
    mask = box_mask((20, 20), (2, 2, 9, 9))
    unknown, crowd = Instance(1, "dog", mask, None), Instance(2, "dog", ~mask, ~mask, ignore=True)
    assert forbidden_targets([unknown, crowd]) == {"modal": {2}, "amodal": {1, 2}}
    facts = describe_objects([unknown, crowd])
    assert np.isnan(facts[0].occlusion) and facts[0].box == (2, 2, 9, 9)


def test_written_as_a_dataset_file(file: Path, tmp_path: Path, source: ComposeSource) -> None:
    compose(file, out=tmp_path / "out", count=5, size=SIZE, seed=3, splits=("train",))
    written = open_source(f"json:{tmp_path / 'out'}", WHOLE_TRAIN)
    for index in range(5):
        one, other = source[index], written[index]
        assert np.array_equal(one.image, other.image)
        assert [(q.text, q.mask_type) for q in one.queries] == [
            (q.text, q.mask_type) for q in other.queries
        ]
        for a, b in zip(one.instances, other.instances, strict=True):
            assert (a.category, a.ignore, a.amodal is None) == (
                b.category,
                b.ignore,
                b.amodal is None,
            )
            assert np.array_equal(a.modal, b.modal) and np.array_equal(a.complete, b.complete)
    with pytest.raises(InputError, match=r"train\.json: the file exists already"):
        compose(file, out=tmp_path / "out", count=5, splits=("train",))
    with pytest.raises(InputError, match="--count, --size and --queries must be 1 or more"):
        compose(file, out=tmp_path / "out", count=0)


def test_written_as_cutouts(file: Path, tmp_path: Path) -> None:
    cutouts(file, out=tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert {record["label"] for record in index} == set(NAMES)
    picture = Image.open(tmp_path / index[0]["file"])
    assert picture.mode == "RGBA" and max(picture.size) < 62
    alpha = np.asarray(picture.getchannel("A"))
    assert (
        alpha[alpha.shape[0] // 2, alpha.shape[1] // 2] == 255
        and ((alpha > 0) & (alpha < 255)).sum() > 0
    )
    assert len(CutoutSource(tmp_path, "train", 2)[0].instances) >= 3


def test_objects_of_a_folder_of_cutouts_lie_over_training_photos_only(
    file: Path, tmp_path: Path
) -> None:
    labels = (
        "abacus",
        "dog",
        "dog house",
        "anchor",
    )  # "dog house" could be meant by "dog", a class of the photos
    pictures = sorted(path.name for path in fill_folder(tmp_path).iterdir())
    (tmp_path / "index.json").write_text(json.dumps(dict(zip(pictures, labels, strict=False))))

    def open_split(split: str) -> ComposeSource:
        return ComposeSource(file, split, 20, size=SIZE, cutouts=tmp_path)

    def classes(source: ComposeSource) -> set[str]:
        return {instance.category for index in range(20) for instance in source[index].instances}

    source = open_split("train")
    assert {cutout.item.category for cutout in source.folder_cutouts} == {"abacus", "anchor", "dog"}
    assert set(source.vocabulary["category"]) == {*NAMES, "abacus", "anchor"}
    assert classes(source) >= {"abacus", "anchor"}
    assert classes(open_split("val")) <= set(NAMES)


def test_half_of_the_training_pictures_are_mirrored_with_their_masks(samples: list[Sample]) -> None:
    """Objects have one colour each, and the one at the right border of the photos is at the left then."""
    sides, one_colour = Counter[str](), []
    for sample in samples:
        for instance in sample.instances:
            inner = ndimage.binary_erosion(instance.modal, iterations=3)
            if instance.ignore or inner.sum() < 30:
                continue
            colours = sample.image[inner].astype(int)
            one_colour.append((np.abs(colours - np.median(colours, 0)).max(1) < 40).mean())
            if instance.amodal is None:
                sides["left"] += bool(instance.modal[:, 0].any())
                sides["right"] += bool(instance.modal[:, -1].any())
    assert np.mean(one_colour) > 0.95 and min(sides["left"], sides["right"]) > 0.25 * sides.total()


def test_in_val_absent_nothing_that_is_asked_for_is_there(file: Path, tmp_path: Path) -> None:
    source = ComposeSource(file, "val_absent", 12, size=SIZE)
    assert set(source.photo_indices) == set(ComposeSource(file, "val", 1, size=SIZE).photo_indices)
    asked = 0
    nouns = {name: meaning.nouns for name, meaning in lexicon().classes.items()} | {
        "wooden crate": ["wooden crate"]
    }
    for sample in map(source.__getitem__, range(12)):
        absent = set(NAMES) - {instance.category for instance in sample.instances}
        for query in sample.queries:
            assert query.instance_ids == ()
            assert any(noun in query.text.lower() for name in absent for noun in nouns[name]), (
                query.text
            )
            asked += 1
    assert asked >= 12
    compose(file, out=tmp_path, count=3, size=SIZE, splits=("val_absent",))
    written = open_source(f"json:{tmp_path}", "val_absent")
    for one, other in ((source[k].queries, written[k].queries) for k in range(3)):
        assert [(q.text, q.mask_type, ()) for q in one] == [
            (q.text, q.mask_type, q.instance_ids) for q in other
        ]
    with pytest.raises(
        InputError,
        match=r"these data have the splits train, val, val_phrasing, val_hard, dev, test$",
    ):
        open_source("scenes", "val_absent")


def change(file: Path, folder: Path, **fields) -> Path:
    records = json.loads(file.read_text()) | fields
    (folder / "new.json").write_text(json.dumps(records))
    return folder / "new.json"


def test_the_report_says_how_often_a_system_finds_and_refuses(file: Path, tmp_path: Path) -> None:
    """One that knows all refuses all of `val_absent`; one that draws everywhere never refuses."""
    names = (*NAMES, "pizza", "clock")  # no photo has the last two
    path = change(
        file, tmp_path, categories=[{"id": k, "name": name} for k, name in enumerate(names, 1)]
    )
    sources = {
        split: open_source(
            f"compose:{path}", split, count=3, size=SIZE, images_dir=str(file.parent / "images")
        )
        for split in ("val", "val_absent")
    }
    for knows in (True, False):
        evaluated = {}
        for split, source in sources.items():
            entries = []
            for sample, query in (
                (s, q) for s in map(source.__getitem__, range(3)) for q in s.queries
            ):
                mask = np.full(sample.image.shape[:2], not knows)
                for i in sample.instances:
                    if knows and i.id in query.instance_ids:
                        mask |= i.complete if query.mask_type == "amodal" else i.modal
                entries.append(
                    {
                        "query_id": query.id,
                        "segmentation": encode(mask),
                        "score": 1.0,
                        "fused": True,
                    }
                )
            (tmp_path / f"{split}.json").write_text(json.dumps(entries))
            evaluated[split] = source, score_predictions(tmp_path / f"{split}.json", source)
        report = make_report(evaluated, source="compose", predictions="p.json")
        val, absent = (report["splits"][split] for split in sources)
        assert (
            val["variants"]["gres"]["target_accuracy"],
            val["variants"]["gres"]["no_target_accuracy"],
        ) == (1, None)
        assert (
            absent["variants"]["gres"]["target_accuracy"] is None and absent["all"]["queries"] > 3
        )
        assert (
            absent["variants"]["gres"]["no_target_accuracy"]
            == absent["all"]["giou"]
            == float(knows)
        )
        assert absent["predicted_iou"] == {"error": None, "curve": []}
        assert (
            val["predicted_iou"]["error"] < 1e-5 if knows else val["predicted_iou"]["error"] > 0.5
        )
        write_report(report, evaluated, tmp_path)
        for name in ("report.md", "report.html"):
            assert "Is it there, and how good is the mask?" in (tmp_path / name).read_text()


def test_grey_cmyk_deep_and_turned_photos(file: Path, tmp_path: Path) -> None:
    photos, grey = Photos(file), Image.linear_gradient("L").resize((WIDTH, HEIGHT))
    name = photos.dataset.images[0]["file_name"]
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    tags = Image.Exif()
    tags[0x0112] = 6
    forms = [(grey, "PNG", {}), (grey.convert("CMYK"), "JPEG", {}), (deep, "PNG", {})]
    forms += [(grey.transpose(Image.Transpose.ROTATE_90), "JPEG", {"exif": tags})]
    for image, form, options in forms:
        image.save(tmp_path / name, form, **options)
        found = np.asarray(Photos(file, tmp_path).read_photo(0, WIDTH).image).astype(int)
        assert np.abs(found - np.asarray(grey)[..., None]).max() <= 8, form
    grey.transpose(Image.Transpose.ROTATE_90).save(tmp_path / name, "PNG")
    with pytest.raises(
        InputError, match=r"160 pixels high and 120 wide, but .* says 120 and 160; give the image"
    ):
        Photos(file, tmp_path).read_photo(0, WIDTH)


def test_bad_files(file: Path, tmp_path: Path) -> None:
    records = json.loads(file.read_text())
    images = file.parent / "images"

    def error(path: Path, folder: Path = images, split: str = "train") -> str:
        with pytest.raises(InputError) as raised:
            open_source(f"compose:{path}", split, count=1, images_dir=str(folder))
        assert "\n" not in str(raised.value) and ";" in str(raised.value)
        return str(raised.value)

    assert "there is no such file" in error(tmp_path / "none.json")
    boxes = [
        {k: v for k, v in a.items() if k != "segmentation"} | {"bbox": [1, 1, 9, 9]}
        for a in records["annotations"]
    ]
    assert "annotation 1: segmentation is missing; give an RLE" in error(
        change(file, tmp_path, annotations=boxes)
    )
    assert "has 0 complete objects to lay over photos" in error(
        change(file, tmp_path, annotations=[])
    )
    few = change(
        file, tmp_path, annotations=[a for a in records["annotations"] if a["image_id"] < 12]
    )
    assert "complete objects" in error(few) and "10 are needed; add photos" in error(few)
    with pytest.raises(InputError, match="complete objects can be cut out, 10 are needed"):
        cutouts(change(file, tmp_path, annotations=[]), out=tmp_path / "out", images=images)
    assert "leave none for the split 'dev'; add photos" in error(
        change(file, tmp_path, annotations=[], images=records["images"][:2]), split="dev"
    )
    (tmp_path / "empty").mkdir()
    assert "give its folder with --images DIR" in error(file, tmp_path / "empty")
    assert "there is no such image folder" in error(file, tmp_path / "nowhere")
    with pytest.raises(InputError, match="these data have the splits train, val"):
        open_source(f"compose:{file}", "test")


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not there (set R2SM_REAL_DATA)")
def test_coco() -> None:
    source = ComposeSource(REAL / "instances.json", "dev", 12, size=128)
    found = list(map(source.__getitem__, range(12)))
    assert all(sample.queries for sample in found) and any(any(hidden(sample)) for sample in found)
    assert any(query.kind["task"] == "reasoning" for sample in found for query in sample.queries)


def test_cutouts_of_photos_of_one_name_are_all_written(tmp_path: Path) -> None:
    file = write_photos(tmp_path / "photos", 12)
    records = json.loads(file.read_text())
    for number, image in enumerate(records["images"]):
        folder = file.parent / "images" / str(number)
        folder.mkdir()
        (folder.parent / image["file_name"]).rename(folder / "photo.jpg")
        image["file_name"] = f"{number}/photo.jpg"
    file.write_text(json.dumps(records))
    cutouts(file, out=tmp_path / "out")
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (
        len({record["file"] for record in index})
        == len(index)
        == len(list((tmp_path / "out").glob("*.png")))
    )
