"""Composed photographs: which objects are complete, enlarged parts, exact masks, splits, bad files,
and the files that `data compose` and `data cutouts` write."""

import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_pictures import (
    HEIGHT,
    PHOTO_CLASSES,
    WIDTH,
    check_instances,
    digest,
    hidden_shares,
    write_cutouts,
    write_photos,
)
from PIL import Image

from r2sm_jax.config import Config, DataConfig, LoopConfig, ModelConfig, VisionConfig
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.contradictions import find_pictures_in_both
from r2sm_jax.data.dataset import Instance, Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.sources import (
    REPORTED,
    load_json_split,
    open_reported,
    open_split,
    open_splits,
    split_names,
)
from r2sm_jax.synthetic.complete_objects import find_complete
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.cutouts import CutoutSource, read_records
from r2sm_jax.synthetic.paste import MAX_OCCLUSION, MIN_OCCLUSION
from r2sm_jax.synthetic.photos import (
    Photos,
)
from r2sm_jax.synthetic.queries.nouns import lexicon
from r2sm_jax.synthetic.scenes.scene import describe_objects, forbidden_targets
from r2sm_jax.tools.compose import compose, cutouts

SIZE, NUM_PICTURES = 96, 60


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def source(file) -> ComposeSource:
    return ComposeSource(file, "train", NUM_PICTURES, seed=3, size=SIZE)


@pytest.fixture(scope="module")
def samples(source) -> list[Sample]:
    return [source[index] for index in range(NUM_PICTURES)]


def box_mask(*boxes: tuple[int, int, int, int]) -> np.ndarray:
    mask = np.zeros((100, 100), bool)
    for x0, y0, x1, y1 in boxes:
        mask[y0:y1, x0:x1] = True
    return mask


@pytest.mark.parametrize(
    ("others", "complete"),
    [
        ([], True),
        ([(60, 20, 70, 60)], True),  # far away
        ([(41, 20, 70, 60)], True),  # one pixel between them
        ([(40, 20, 70, 60)], False),  # side by side
        ([(28, 10, 90, 90)], True),  # much larger and drawn through 12 / 20 of it: it lies behind
        ([(36, 10, 90, 90)], False),  # drawn through 4 / 20 of it
        ([(28, 20, 50, 60)], False),  # drawn through it, but not 1.5 times as large
    ],
)
def test_an_object_is_complete_if_no_other_can_hide_it(others, complete):
    masks = [box_mask((20, 20, 40, 60)), *(box_mask(other) for other in others)]
    assert find_complete(masks)[0] is complete


@pytest.mark.parametrize(
    ("boxes", "complete"),
    [
        ([(1, 1, 99, 99)], True),
        ([(0, 20, 40, 60)], False),
        ([(20, 60, 40, 100)], False),
        ([(20, 20, 40, 40), (20, 45, 40, 60)], False),  # in two parts
        ([(20, 20, 40, 60), (50, 50, 52, 52)], True),  # the second part is 4 of 804 pixels
        ([], False),
    ],
)
def test_an_object_is_complete_if_it_lies_inside_in_one_part(boxes, complete):
    assert find_complete([box_mask(*boxes)]) == [complete]


def test_samples_are_sound(source, samples):
    assert isinstance(source, Source) and source.vocabulary == {"category": PHOTO_CLASSES}
    num_absent = 0
    for sample in samples:
        check_instances(sample)
        height, width, _ = sample.image.shape
        assert width == SIZE and abs(height - SIZE * HEIGHT // WIDTH) <= 1
        instances = {i.id: i for i in sample.instances}
        for query in sample.queries:
            targets = [instances[i] for i in query.instance_ids]
            assert not any(i.ignore for i in targets)
            assert query.mask_type == "modal" or all(i.amodal is not None for i in targets)
        absent = [query for query in sample.queries if not query.instance_ids]
        assert len(absent) <= 2
        num_absent += len(absent)
    assert num_absent > 0.5 * NUM_PICTURES
    assert sum(len(sample.queries) for sample in samples) > 6 * NUM_PICTURES

    kept = [replace(s, instances=tuple(i for i in s.instances if not i.ignore)) for s in samples]
    hidden = [share for sample in kept for share in hidden_shares(sample) if share]
    assert len(hidden) > NUM_PICTURES / 2
    assert min(hidden) >= MIN_OCCLUSION and max(hidden) <= MAX_OCCLUSION


def test_samples_are_rebuilt_exactly(file, source, samples):
    again = ComposeSource(str(file), "train", NUM_PICTURES, seed=3, size=SIZE)
    copied = pickle.loads(pickle.dumps(source))
    for index in (17, 3, 40, 3):
        assert digest(again[index]) == digest(copied[index]) == digest(samples[index])
    other = ComposeSource(file, "train", NUM_PICTURES, seed=4, size=SIZE)
    assert digest(other[3]) != digest(samples[3])


def test_half_of_the_pictures_are_mirrored_unless_none_shall_be(file, samples):
    upright = ComposeSource(file, "train", NUM_PICTURES, seed=3, size=SIZE, mirror=False)
    shown = [upright[index].image for index in range(16)]
    turned = [np.array_equal(one, samples[i].image[:, ::-1]) for i, one in enumerate(shown)]
    same = [np.array_equal(one, samples[i].image) for i, one in enumerate(shown)]
    assert sum(turned) + sum(same) == 16 and 4 <= sum(turned) <= 12


def test_photos_and_cutouts_are_split(file):
    sources = {s: ComposeSource(file, s, 6, size=SIZE) for s in ("train", "dev", "val", "val_hard")}
    photos = {split: set(source.photo_indices) for split, source in sources.items()}
    parts = [photos[split] for split in ("train", "dev", "val")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 90
    assert len(photos["train"]) > 50 and min(map(len, parts)) > 4
    assert photos["val_hard"] == photos["val"]
    for split, source in sources.items():
        assert {cutout.photo for cutout in source.cutouts} <= photos[split]
    hard = [query for index in range(4) for query in sources["val_hard"][index].queries]
    assert hard and all(query.kind["hard"] for query in hard)


def test_photos_and_cutouts_are_of_the_whole_file(file, source, monkeypatch):
    in_order = source.photos.photos_of_split("train")
    for count in (len(in_order), len(in_order) + 5, 3 * len(in_order), None):
        whole = ComposeSource(file, "train", count, seed=3, size=SIZE)
        assert set(whole.photo_order[: len(whole)]) == set(in_order)
    assert ComposeSource(file, "train", len(in_order), seed=3, size=SIZE).photo_indices == in_order
    with pytest.warns(UserWarning, match=f"10 of the {len(in_order)} photos.*--data.scenes"):
        few = ComposeSource(file, "train", 10, seed=3, size=SIZE)
    assert sorted(few.photo_indices) == in_order != few.photo_indices

    everything = source.photos.find_cutouts(in_order)
    monkeypatch.setattr("r2sm_jax.synthetic.photos.MAX_CUTOUTS", 10)
    some = source.photos.find_cutouts(in_order)
    assert len(some) >= 10 and set(some) < set(everything)
    assert max(cutout.photo for cutout in some) > in_order[len(in_order) // 2]


def test_nothing_in_val_absent_is_there(file):
    source = ComposeSource(file, "val_absent", 12, size=SIZE)
    assert source.photo_indices == ComposeSource(file, "val", 1, size=SIZE).photo_indices
    nouns = {name: entry.nouns for name, entry in lexicon().classes.items()}
    nouns["wooden crate"] = ["wooden crate"]
    num_queries = 0
    for sample in map(source.__getitem__, range(12)):
        absent = set(PHOTO_CLASSES) - {i.category for i in sample.instances}
        for query in sample.queries:
            assert query.instance_ids == ()
            assert any(noun in query.text.lower() for name in absent for noun in nouns[name])
            num_queries += 1
    assert num_queries >= 12


def test_objects_of_a_folder_of_cutouts_lie_over_training_photos_only(file, tmp_path):
    labels = ("abacus", "dog", "dog house", "anchor")  # "dog", a class, could mean the dog house
    files = sorted(path.name for path in write_cutouts(tmp_path).iterdir())
    index = [{"file": f, "label": label} for f, label in zip(files, labels, strict=False)]
    (tmp_path / "index.json").write_text(json.dumps(index))

    def classes(source: ComposeSource) -> set[str]:
        return {i.category for index in range(40) for i in source[index].instances}

    source = ComposeSource(file, "train", 40, size=SIZE, cutouts=tmp_path)
    assert {c.item.category for c in source.paster.drawings} == {"abacus", "anchor", "dog"}
    assert set(source.vocabulary["category"]) == {*PHOTO_CLASSES, "abacus", "anchor"}
    assert classes(source) >= {"abacus", "anchor"}
    val = ComposeSource(file, "val", 40, size=SIZE, cutouts=tmp_path)
    assert classes(val) <= set(PHOTO_CLASSES)


def test_nothing_of_held_out_photos_is_laid_over_training_photos(file, tmp_path):
    """Not even where `data cutouts` cut the objects of the whole file out."""
    cutouts(file, out=tmp_path)
    source = ComposeSource(file, "train", 4, size=SIZE, cutouts=tmp_path)
    names = source.photos.names_of_splits()
    assert {cutout.photo for cutout in source.paster.drawings} == names["train"]
    assert {record.photo for record in read_records(tmp_path)} == set.union(*names.values())


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("scenes", {"images": "photos"}),
        ("compose:a.json", {"backgrounds": "photos"}),
        ("json:a.json", {"cutouts": "photos"}),
        ("cutouts:photos", {"crowds": "objects"}),
        ("tfds:photos", {"images": "photos"}),
    ],
)
def test_what_a_source_does_not_read_is_refused(spec, part):
    (name,) = part
    with pytest.raises(InputError, match=f"--{name} .*: {spec} does not read it"):
        open_split(DataConfig(spec, **part))


def test_no_amodal_query_refers_to_an_unknown_shape():
    mask = box_mask((2, 2, 9, 9))
    instances = [Instance(1, "dog", mask, None), Instance(2, "dog", ~mask, ~mask, ignore=True)]
    assert forbidden_targets(instances) == {"modal": {2}, "amodal": {1, 2}}
    facts = describe_objects(instances)
    assert np.isnan(facts[0].occlusion) and facts[0].box == (2, 2, 9, 9)


def test_photos_without_sizes_are_found_and_a_number_that_is_none_is_no_fault(file, tmp_path):
    records = json.loads(file.read_text())
    for image in records["images"]:
        del image["width"], image["height"]
    records["annotations"][0]["bbox"] = [float("nan")] * 4
    (tmp_path / "a.json").write_text(json.dumps(records))
    photos = Photos(tmp_path / "a.json", file.parent / "images")
    expected = Photos(file)
    assert [photos.truth_of(photo) for photo in range(5)] == [
        expected.truth_of(photo) for photo in range(5)
    ]
    assert photos.files[0].classes == expected.files[0].classes


REFUSED = [
    ({"keep": "no masks"}, "no annotation has segmentation"),
    ({"keep": "cut objects"}, "has no complete object"),
    ({"info": {"partial": "yes"}}, r"info\.partial"),
    ({"num_images": 2, "split": "dev"}, "split 'dev'"),
    ({"split": "test"}, "splits train, val"),
    ({"num_bad": 40}, "40 of 360 records are bad; a share of 0.1 allows 36"),
    ({"folder": "."}, "--images"),
    ({"folder": "nowhere"}, "no such image folder"),
    ({"empty": True}, r"73 of 73 images cannot be used; .*: \S*\.jpg: the image cannot be read"),
    ({"name": "none.json"}, "No such file"),
    ({"folder": ".", "name": "a.json,a.json"}, "--images"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED)
def test_bad_files_are_refused(file, tmp_path, wrong, words):
    records = json.loads(file.read_text())
    annotations = {
        "all": records["annotations"],
        "cut objects": [a for a in records["annotations"] if a["id"] % 3 == 2],
        "no masks": [a | {"segmentation": None} for a in records["annotations"]],
    }[wrong.get("keep", "all")]
    for annotation in annotations:
        if annotation["segmentation"] is None:
            del annotation["segmentation"]
    records |= {"annotations": annotations, "info": wrong.get("info", {})}
    records["images"] = records["images"][: wrong.get("num_images")]
    if "num_images" in wrong:
        records["annotations"] = [a for a in annotations if a["image_id"] <= wrong["num_images"]]
    for annotation in annotations[: wrong.get("num_bad", 0)]:
        annotation["category_id"] = 77
    (tmp_path / "a.json").write_text(json.dumps(records))
    paths = [tmp_path / name for name in wrong.get("name", "a.json").split(",")]
    folder = tmp_path / wrong["folder"] if "folder" in wrong else file.parent / "images"
    if "empty" in wrong:
        folder = tmp_path
        for image in records["images"]:
            (folder / image["file_name"]).touch()
    with pytest.raises(InputError, match=words):
        ComposeSource(paths, wrong.get("split", "train"), 1, images=folder)


def test_results_find_their_photos_in_a_folder(file, tmp_path):
    records = json.loads(file.read_text())
    stems = {image["id"]: Path(image["file_name"]).stem for image in records["images"]}
    results = [
        {"image_id": stems[a["image_id"]], "category_id": 1, "segmentation": a["segmentation"]}
        for a in records["annotations"]
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    photos = Photos(path, file.parent / "images")
    assert len(photos) == len({a["image_id"] for a in records["annotations"]})
    with pytest.raises(InputError, match="give --images DIR"):
        Photos(path)


@pytest.fixture
def ten_photos(file, tmp_path) -> Path:
    records = json.loads(file.read_text())
    annotations = [a for a in records["annotations"] if a["image_id"] <= 10]
    few = records | {"images": records["images"][:10], "annotations": annotations}
    path = tmp_path / "few.json"
    path.write_text(json.dumps(few))
    (tmp_path / "images").symlink_to(file.parent / "images")
    return path


def test_ten_photos_are_enough_for_all_splits(ten_photos):
    photos = Photos(ten_photos)
    splits = {split: photos.photos_of_split(split) for split in ("train", "dev", "val")}
    assert sorted([*splits["train"], *splits["dev"], *splits["val"]]) == list(range(10))
    assert min(map(len, splits.values())) >= 2
    for split in splits:
        source = ComposeSource(ten_photos, split, 20, size=SIZE)
        assert any(max(hidden_shares(source[index]), default=0) for index in range(20))


def test_of_few_photos_few_pictures_are_scored_unless_more_are_asked_for(ten_photos):
    data = DataConfig(source=f"compose:{ten_photos}")
    num_photos = len(Photos(ten_photos).photos_of_split("val"))

    def num_pictures(count: int, is_exact: bool = False) -> int:
        return len(open_splits(data, "val", size=SIZE, count=count, is_exact=is_exact)["val"])

    assert [num_pictures(100), num_pictures(3)] == [4 * num_photos, 3]
    assert num_pictures(100, is_exact=True) == 100


def test_where_hardly_anything_is_complete_the_rest_is_laid_over(ten_photos):
    keep = {Photos(ten_photos).photos_of_split("train")[0] + 1}
    records = json.loads(ten_photos.read_text())
    records["annotations"] = [
        a for a in records["annotations"] if a["id"] % 3 != 1 or a["image_id"] in keep
    ]
    ten_photos.write_text(json.dumps(records))
    with pytest.warns(UserWarning, match="0 complete"):
        source = ComposeSource(ten_photos, "val", 20, size=SIZE)
    assert any(len(source[index].instances) > 2 for index in range(20))  # more than the photo has
    with pytest.warns(UserWarning, match="1 complete"):
        source = ComposeSource(ten_photos, "train", 20, size=SIZE)
    assert any(max(hidden_shares(source[index]), default=0) for index in range(20))


# Several files.


def write_file(folder: Path, count: int, *, prefix: str, partial: bool, classes: list[str]) -> Path:
    """As `write_photos`, with names, classes and a mark of its own."""
    path = write_photos(folder, count)
    records = json.loads(path.read_text())
    for image in records["images"]:
        name = prefix + image["file_name"]
        (folder / "images" / image["file_name"]).rename(folder / "images" / name)
        image["file_name"] = name
    for category, name in zip(records["categories"], classes, strict=True):
        category["name"] = name
    path.write_text(json.dumps(records | {"info": {"partial": partial}}))
    return path


@pytest.fixture(scope="module")
def two_files(file, tmp_path_factory) -> list[Path]:
    classes = ["otter", "chair", "dog house", "deer"]
    folder = tmp_path_factory.mktemp("more") / "more"
    return [file, write_file(folder, 40, prefix="b", partial=True, classes=classes)]


def test_a_file_has_the_same_splits_beside_others(file, two_files):
    for split in ("train", "dev", "val"):
        alone = ComposeSource(file, split, 200, size=SIZE)
        both = ComposeSource(two_files, split, 200, size=SIZE)
        num_alone = len(alone.photo_indices)
        assert both.photo_indices[:num_alone] == alone.photo_indices
        assert len(both.photo_indices) > num_alone
        names = {both.photos.name_of(photo)[0] for photo in both.photo_indices[num_alone:]}
        assert names == {"b"}
    classes = (*PHOTO_CLASSES, "otter", "dog house", "deer")
    assert both.vocabulary == {"category": classes}


def test_a_partly_marked_file_gives_no_queries_for_absent_things(two_files):
    source = ComposeSource(two_files, "train", 130, size=SIZE)
    num_absent = Counter[bool]()
    for index in range(0, 130, 3):
        photo = source.photo_order[index % len(source.photo_order)]
        is_partial = source.photos.file_of(photo).is_partial
        num_absent[is_partial] += sum(not q.instance_ids for q in source[index].queries)
    assert num_absent[False] > 10 and num_absent[True] == 0

    absent = ComposeSource(two_files, "val_absent", 5, size=SIZE)
    assert absent.photo_indices == ComposeSource(two_files[0], "val", 5, size=SIZE).photo_indices
    spec = "compose:" + ",".join(map(str, two_files))
    assert "val_absent" in split_names(spec, REPORTED)
    assert "val_absent" not in split_names(f"compose:{two_files[1]}", REPORTED)
    with pytest.raises(InputError, match=r"info\.partial"):
        ComposeSource(two_files[1], "val_absent", 5, size=SIZE)


GROUP = {"id": 9, "name": "fruits", "supercategory": "none"}
ALONE = [{"id": 1, "name": "leaf"}]
NOTHING_ABSENT = {
    "one class": ALONE,
    "one class and a group": [{"id": 1, "name": "apple", "supercategory": "fruits"}, GROUP],
    "one class and one that nothing uses": [*ALONE, {"id": 2, "name": "_background_"}],
    "one class that some photos lack": ALONE,
}


@pytest.mark.parametrize("case", NOTHING_ABSENT)
def test_a_split_that_cannot_be_is_left_out_with_a_line(case, ten_photos, capsys, command):
    records = json.loads(ten_photos.read_text())
    records["categories"] = NOTHING_ABSENT[case]
    for annotation in records["annotations"]:
        annotation["category_id"] = 1
    if case.endswith("lack"):
        val = Photos(ten_photos).photos_of_split("val")
        records["annotations"] = [a for a in records["annotations"] if a["image_id"] != val[0] + 1]
    ten_photos.write_text(json.dumps(records))
    config = Config(
        model=ModelConfig(vision=VisionConfig(image_size=SIZE)),
        data=DataConfig(source=f"compose:{ten_photos}"),
        train=LoopConfig(report_samples=4),
    )
    assert [*open_reported(config)] == ["val", "val_phrasing", "val_hard"]
    assert capsys.readouterr().err.count("val_absent is left out") == 1
    # Statistics of all splits take the same ones.
    argv = "stats", config.data.source, "--scenes", 2, "--json"
    splits = json.loads(command(main, *argv).out)["splits"]
    absent = ["val_absent"] if case.endswith("lack") else []
    assert [*splits] == ["train", "val", "val_phrasing", "val_hard", *absent, "dev"]


def absent_texts(path: Path) -> list[str]:
    source = ComposeSource(path, "train", 40, size=SIZE)
    queries = [query for index in range(40) for query in source[index].queries]
    return [query.text.lower() for query in queries if not query.instance_ids]


def test_only_what_is_said_to_be_complete_is_absent(ten_photos):
    records = json.loads(ten_photos.read_text())
    for category in records["categories"]:
        category["supercategory"] = "fruits"
    records["categories"] += [GROUP, {"id": 10, "name": "zeppelin"}]
    ten_photos.write_text(json.dumps(records))
    texts = absent_texts(ten_photos)
    assert texts
    assert not any(word in text for text in texts for word in ("fruit", "zeppelin"))

    records["images"][0] |= {"neg_category_ids": [], "not_exhaustive_category_ids": []}  # LVIS
    ten_photos.write_text(json.dumps(records))
    assert absent_texts(ten_photos) == []


def test_what_is_pasted_has_no_name_of_an_unmarked_thing(two_files):
    source = ComposeSource(two_files, "train", 130, size=SIZE)
    full, partial = (
        {cutout.category for cutout in source.paster.pools[file].cutouts}
        for file in source.photos.files
    )
    # A "dog house" could be called by the class "dog"; other things may be unmarked where a file
    # is partly marked.
    assert full == {*PHOTO_CLASSES, "otter", "deer"}
    assert partial == {"otter", "chair", "dog house", "deer"}


def test_augmented_copies_of_a_photo_are_on_one_side_of_every_split(file, tmp_path):
    """Three of each photo, as Roboflow writes them."""
    records = json.loads(file.read_text())
    (tmp_path / "images").mkdir()
    for number, image in enumerate(records["images"][:60]):
        content = (file.parent / "images" / image["file_name"]).read_bytes()
        image["file_name"] = f"{number // 3}_jpg.rf.{number:032x}.jpg"
        (tmp_path / "images" / image["file_name"]).write_bytes(content)
    records["images"] = records["images"][:60]
    records["annotations"] = [a for a in records["annotations"] if a["image_id"] <= 60]
    path = tmp_path / "copies.json"
    path.write_text(json.dumps(records))

    photos = Photos(path)
    composed = {
        split: [photos.name_of(photo) for photo in photos.photos_of_split(split)]
        for split in ("train", "dev", "val")
    }
    path.write_text(json.dumps(records | {"annotations": [], "queries": []}))
    stored = {
        split: [image.file_name for image in load_json_split(path, split).images]
        for split in composed
    }
    for parts in (composed, stored):
        assert sum(map(len, parts.values())) == 60
        originals = [{name.partition("_")[0] for name in names} for names in parts.values()]
        assert sum(map(len, originals)) == 20 and all(originals)
    assert find_pictures_in_both(["a_jpg.rf.1.jpg"], ["a_jpg.rf.2.jpg"]) is not None
    assert find_pictures_in_both(["a_b_jpg.rf.1.jpg"], ["a_b.jpg"]) is not None
    assert find_pictures_in_both(["a_jpg.rf.1.jpg"], ["a_png.rf.2.jpg"]) is None


def test_a_photo_of_two_files_is_on_one_side_of_every_split(file, tmp_path):
    twin = write_photos(tmp_path / "twin", 20)
    names = []
    for split in ("train", "dev", "val"):
        source = ComposeSource([file, twin], split, 200, size=SIZE)
        names.append({source.photos.name_of(photo) for photo in source.photo_indices})
    assert not names[0] & names[1] and not names[0] & names[2] and not names[1] & names[2]


# Files.


@pytest.fixture(scope="module")
def sixty(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), 60)


def test_composed_files_are_the_source(sixty, tmp_path):
    compose(sixty, out=tmp_path, count=4, size=SIZE, seed=3)
    assert sorted(p.stem for p in tmp_path.glob("*.json")) == ["dev", "train", "val"]
    with pytest.raises(InputError, match=r"train\.json"):
        compose(sixty, out=tmp_path)
    (tmp_path / "train.json").unlink()
    with pytest.raises(InputError, match=r"train_000000\.png"):
        compose(sixty, out=tmp_path, count=2, splits=("train",))
    compose(sixty, out=tmp_path, count=4, size=SIZE, seed=3, splits=("train",), overwrite=True)
    source = ComposeSource(sixty, "train", 4, size=SIZE, seed=3)
    written = open_split(DataConfig(f"json:{tmp_path}"), "train")
    for index in range(4):
        assert content(written[index]) == content(source[index])


def content(sample: Sample) -> list:
    """What a sample holds but for its ids."""
    queries = [(q.text, q.mask_type, q.kind) for q in sample.queries]
    instances = [
        (i.category, i.ignore, i.amodal is None, i.modal.tobytes(), i.complete.tobytes())
        for i in sample.instances
    ]
    return [sample.image.tobytes(), queries, instances]


def test_wrong_arguments_are_refused_before_anything_is_composed(sixty, tmp_path):
    with pytest.raises(InputError, match="'foo'"):
        compose(sixty, tmp_path, count=1, size=SIZE, splits=("train", "foo"))
    with pytest.raises(InputError, match="--count"):
        compose(sixty, tmp_path, count=0)
    with pytest.raises(InputError, match="10 are needed"):
        cutouts(write_photos(tmp_path / "few", 2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


def test_cutouts_are_written_also_of_photos_with_similar_names(tmp_path):
    file = write_photos(tmp_path / "photos", 12)
    records = json.loads(file.read_text())
    names = ["a/b.jpg", "a_b.jpg", "p.jpg", "p.png", *(f"{k}/photo.jpg" for k in range(8))]
    for image, name in zip(records["images"], names, strict=True):
        path = file.parent / "images" / name
        path.parent.mkdir(exist_ok=True)
        (file.parent / "images" / image["file_name"]).rename(path)
        image["file_name"] = name
    file.write_text(json.dumps(records))
    folder = tmp_path / "out"
    cutouts(file, out=folder)
    index = read_records(folder)
    assert len(index) == len(list(folder.glob("*.png"))) == 12
    picture = Image.open(folder / index[0].file)
    assert {0, 255} < set(picture.getchannel("A").get_flattened_data())  # soft edges
    assert len(CutoutSource(folder, "train", 2)[0].instances) >= 3
