"""`data compose` and `data cutouts` lose no picture: none is replaced unasked, and no two have one name."""

import json
from pathlib import Path

import pytest
from test_compose import SIZE, write_photos

from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.cutout_folder import read_index
from r2sm_jax.tools.compose import compose, cutouts


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), 40)


def test_pictures_are_replaced_only_when_that_is_asked_for(file: Path, tmp_path: Path) -> None:
    compose(file, out=tmp_path, count=2, size=SIZE, splits=("train",))
    before = {path: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    (tmp_path / "train.json").rename(tmp_path / "first.json")
    with pytest.raises(
        InputError, match=r"train_000000\.png: the file exists already; .*--overwrite"
    ):
        compose(file, out=tmp_path, count=2, size=SIZE, seed=1, splits=("train",))
    assert {path: path.read_bytes() for path in (tmp_path / "images").iterdir()} == before
    compose(file, out=tmp_path, count=2, size=SIZE, seed=1, splits=("train",), overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "images").iterdir()} != before


def test_an_unknown_split_is_refused_before_any_is_composed(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'foo'"):
        compose(file, out=tmp_path / "out", count=1, size=SIZE, splits=("train", "foo"))
    assert not (tmp_path / "out").exists()


def test_cutouts_of_photos_whose_names_differ_in_suffix_or_folder_are_all_written(
    tmp_path: Path,
) -> None:
    file = write_photos(tmp_path / "photos", 12)
    records = json.loads(file.read_text())
    for image, name in zip(
        records["images"], ("a/b.jpg", "a_b.jpg", "p.jpg", "p.png"), strict=False
    ):
        (file.parent / "images" / name).parent.mkdir(exist_ok=True)
        (file.parent / "images" / image["file_name"]).rename(file.parent / "images" / name)
        image["file_name"] = name
    file.write_text(json.dumps(records))
    cutouts(file, out=tmp_path / "out")
    index = read_index(tmp_path / "out" / "index.json")
    assert len(index) == len(list((tmp_path / "out").glob("*.png"))) == 12
    (tmp_path / "out" / "index.json").unlink()
    with pytest.raises(InputError, match="the file exists already"):
        cutouts(file, out=tmp_path / "out")
