"""`data compose` and `data cutouts` write what the sources give, and lose no picture."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_pictures import PHOTO_CLASSES, write_photos
from PIL import Image

from r2sm_jax.data.splits import WHOLE_TRAIN
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.cutouts import CutoutSource, read_records
from r2sm_jax.synthetic.sources import open_source
from r2sm_jax.tools.compose import compose, cutouts

SIZE = 96


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), 60)


@pytest.mark.parametrize(
    ("split", "stored"), [("train", WHOLE_TRAIN), ("val_absent", "val_absent")]
)
def test_composed_files_are_the_source(file, tmp_path, split, stored):
    compose(file, out=tmp_path, count=4, size=SIZE, seed=3, splits=(split,))
    source = ComposeSource(file, split, 4, size=SIZE, seed=3)
    written = open_source(f"json:{tmp_path}", stored)
    for index in range(4):
        one, other = source[index], written[index]
        assert np.array_equal(one.image, other.image)
        for a, b in zip(one.queries, other.queries, strict=True):
            assert (a.text, a.mask_type, a.kind) == (b.text, b.mask_type, b.kind)
            assert len(a.instance_ids) == len(b.instance_ids)
        for a, b in zip(one.instances, other.instances, strict=True):
            assert (a.category, a.ignore) == (b.category, b.ignore)
            assert (a.amodal is None) == (b.amodal is None)
            assert np.array_equal(a.modal, b.modal) and np.array_equal(a.complete, b.complete)


def test_pictures_are_replaced_only_with_overwrite(file, tmp_path):
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "images").iterdir()}

    compose(file, out=tmp_path, count=2, size=SIZE, splits=("train",))
    before = contents()
    with pytest.raises(InputError, match=r"train\.json"):
        compose(file, out=tmp_path, count=2, size=SIZE, seed=1, splits=("train",))
    (tmp_path / "train.json").unlink()
    with pytest.raises(InputError, match=r"train_000000\.png"):
        compose(file, out=tmp_path, count=2, size=SIZE, seed=1, splits=("train",))
    assert contents() == before
    compose(file, out=tmp_path, count=2, size=SIZE, seed=1, splits=("train",), overwrite=True)
    assert contents() != before


def test_wrong_arguments_are_refused_before_anything_is_composed(file, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="'foo'"):
        compose(file, out=out, count=1, size=SIZE, splits=("train", "foo"))
    with pytest.raises(InputError, match="--count"):
        compose(file, out=out, count=0)
    records = json.loads(file.read_text()) | {"annotations": []}
    (tmp_path / "none.json").write_text(json.dumps(records))
    with pytest.raises(InputError, match="10 are needed"):
        cutouts(tmp_path / "none.json", out=out, images=file.parent / "images")
    assert not out.exists()


def test_cutouts_are_written(file, tmp_path):
    cutouts(file, out=tmp_path)
    index = read_records(tmp_path)
    assert {record.label for record in index} == set(PHOTO_CLASSES)
    picture = Image.open(tmp_path / index[0].file)
    assert picture.mode == "RGBA" and max(picture.size) < 62
    alpha = np.asarray(picture.getchannel("A"))
    assert alpha[alpha.shape[0] // 2, alpha.shape[1] // 2] == 255
    assert ((alpha > 0) & (alpha < 255)).any()  # soft edges
    assert len(CutoutSource(tmp_path, "train", 2)[0].instances) >= 3


def test_cutouts_of_photos_with_similar_names_are_all_written(tmp_path):
    file = write_photos(tmp_path / "photos", 12)
    records = json.loads(file.read_text())
    names = ["a/b.jpg", "a_b.jpg", "p.jpg", "p.png", *(f"{k}/photo.jpg" for k in range(8))]
    for image, name in zip(records["images"], names, strict=True):
        path = file.parent / "images" / name
        path.parent.mkdir(exist_ok=True)
        (file.parent / "images" / image["file_name"]).rename(path)
        image["file_name"] = name
    file.write_text(json.dumps(records))
    cutouts(file, out=tmp_path / "out")
    index = read_records(tmp_path / "out")
    assert len(index) == len(list((tmp_path / "out").glob("*.png"))) == 12

    (tmp_path / "out" / "index.json").unlink()
    with pytest.raises(InputError, match="exists already"):
        cutouts(file, out=tmp_path / "out")
