"""The dataset file of annotations that people make one by one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import Annotation, write_dataset
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.sources import load_json_split
from r2sm_jax.tools.data import main

HEIGHT, WIDTH = 40, 60


def rectangle(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0:y1, x0:x1] = True
    return mask


VISIBLE, COMPLETE = rectangle(10, 10, 30, 20), rectangle(10, 10, 30, 30)


@pytest.fixture
def cup(tmp_path) -> Annotation:
    return Annotation(
        photo=write_photo(tmp_path / "uploads" / "1", 0),
        name="kitchen.jpg",
        text="the whole cup",
        mask_type="amodal",
        visible=masks.encode(VISIBLE),
        complete=masks.encode(COMPLETE),
        category="cup",
    )


def write_photo(path: Path, seed: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")
    return path


def test_a_saved_annotation_is_a_sample_and_passes_the_check(cup, tmp_path, command):
    visible_only = replace(cup, text=" the\ncup ", mask_type="modal")
    file = write_dataset([cup, visible_only], tmp_path / "out")
    assert (tmp_path / "out" / "images" / "kitchen.jpg").read_bytes() == cup.photo.read_bytes()
    assert command(main, "check", file).code == 0

    # A single photo is in every split, so that it can be trained on.
    for split in ("train", "dev", "val", "all"):
        (sample,) = load_json_split(file, split)
        (instance,) = sample.instances
        assert instance.category == "cup"
        np.testing.assert_array_equal(instance.modal, VISIBLE)
        np.testing.assert_array_equal(instance.amodal, COMPLETE)
        assert [(query.text, query.mask_type) for query in sample.queries] == [
            ("the whole cup", "amodal"),
            ("the cup", "modal"),
        ]
        assert {query.instance_ids for query in sample.queries} == {(instance.id,)}


def test_the_later_of_two_annotations_of_an_object_counts(cup, tmp_path):
    larger = masks.encode(rectangle(10, 10, 30, 38))
    later = replace(cup, complete=larger, mask_type="modal", category="mug")
    other = replace(cup, visible=larger, complete=larger, category="")
    (sample,) = load_json_split(write_dataset([cup, other, later], tmp_path / "out"), "all")
    assert [instance.category for instance in sample.instances] == ["mug", "object"]
    assert masks.area(sample.instances[0].complete) == 20 * 28
    assert [query.mask_type for query in sample.queries] == ["modal", "amodal"]
    assert [query.instance_ids for query in sample.queries] == [(1,), (2,)]


def test_photos_of_one_name_stay_apart(cup, tmp_path):
    photos = [write_photo(tmp_path / "uploads" / str(seed), seed) for seed in (2, 3)]
    again = [replace(cup, photo=photos[0]), replace(cup, photo=photos[1], name="Kitchen.JPG")]
    file = write_dataset([cup, *again, cup], tmp_path / "out")
    samples = list(load_json_split(file, "all"))
    assert [sample.file_name for sample in samples] == [
        "kitchen.jpg",
        "kitchen_2.jpg",
        "Kitchen_3.JPG",
    ]
    assert len({sample.image.tobytes() for sample in samples}) == 3


def test_nothing_is_written_without_annotations_or_over_others(cup, tmp_path):
    with pytest.raises(InputError, match="no annotations"):
        write_dataset([], tmp_path / "out")
    assert not (tmp_path / "out").exists()

    before = write_dataset([cup], tmp_path / "out").read_bytes()
    with pytest.raises(InputError, match="exists"):
        write_dataset([replace(cup, text="another")], tmp_path / "out")
    assert (tmp_path / "out" / "annotations.json").read_bytes() == before


def test_a_photo_that_is_gone_leaves_no_dataset_file(cup, tmp_path):
    cup.photo.unlink()
    with pytest.raises(InputError):
        write_dataset([cup], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.json*"))
