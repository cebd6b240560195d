"""Folders of masks, one PNG an object."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_data_cli import run  # noqa: F401
from test_readers import BACK, FRONT, HEIGHT, SEEN, WIDTH, check_pair, finished, photo, to_read

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import InputError
from r2sm_jax.tools.folders import FolderNames, read_mask_folders


def save(path: Path, mask: np.ndarray, scale: int = 255) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((mask * scale).astype(np.uint8)).save(path)


def pix2gestalt(folder: Path, count: int = 2) -> Path:
    for number in range(count):
        photo(folder / "occlusion" / f"{number}_occlusion.png")
        save(folder / "whole_mask" / f"{number}_whole_mask.png", BACK)
        save(folder / "visible_object_mask" / f"{number}_visible_mask.png", SEEN)
    return folder


def test_folders_of_pix2gestalt(tmp_path, run):  # noqa: F811
    source, out_file = pix2gestalt(tmp_path / "p"), tmp_path / "o.json"
    code, out, err = run("convert", "folders", source, "--out", out_file)
    assert (code, err) == (0, "") and "2 images, 2 annotations, 1 categories" in out
    sample = read_json(out_file)[1]
    (found,) = sample.instances
    assert sample.file_name == "p/occlusion/1_occlusion.png" and found.category == "object"
    assert (found.modal == SEEN).all() and (found.amodal == BACK).all()


@pytest.mark.parametrize("names", [("b_1_bottle", "b_2_bottle"), ("b/bottle_1", "b/bottle_2")])
def test_several_objects_of_an_image_with_their_classes(names, tmp_path):
    photo(tmp_path / "photos" / "b.jpg")
    photo(tmp_path / "photos" / "b_9.jpg")
    for name, whole, visible in zip(names, (FRONT, BACK), (FRONT, SEEN), strict=True):
        save(tmp_path / "full" / f"{name}.png", whole, scale=1)
        save(tmp_path / "seen" / f"{name}.png", visible)
    files = to_read(tmp_path, images=tmp_path / "photos")
    found = read_mask_folders(files, FolderNames(whole="full", visible="seen"))
    assert found.categories == {"bottle": 1} and len(found.images) == 1
    check_pair(finished(found, tmp_path, tmp_path)[0])


def test_masks_that_cannot_be_used_are_bad_records(tmp_path):
    folder = pix2gestalt(tmp_path, 5)
    whole, visible = folder / "whole_mask", folder / "visible_object_mask"
    (visible / "0_visible_mask.png").unlink()
    save(whole / "1_whole_mask.png", np.ones((9, 9), bool))
    save(whole / "2_whole_mask.png", np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 5, scale=1)
    (whole / "3_whole_mask.png").write_text("no image")
    save(whole / "lost_whole_mask.png", BACK)
    reasons = "\n".join(map(str, read_mask_folders(replace(to_read(folder), max_bad=0.9)).bad))
    for reason in (
        "no mask in visible_object_mask",
        "9 x 9, but its image is 20 x 30",
        "several values up to 4",
    ):
        assert reason in reasons
    assert "3_whole_mask.png cannot be read" in reasons and "there is no image for it" in reasons
    assert reasons.count("\n") == 4


def test_grey_edges_are_cut_at_half(tmp_path):
    folder = pix2gestalt(tmp_path, 1)
    grey = np.where(BACK, 255, 0)
    grey[0, :2] = 100, 200
    save(folder / "whole_mask" / "0_whole_mask.png", grey, scale=1)
    (found,) = read_mask_folders(to_read(folder)).annotations
    assert masks.area(masks.decode(found["segmentation"])) == masks.area(BACK) + 1


def test_masks_with_a_palette(tmp_path):
    folder = pix2gestalt(tmp_path, 2)
    drawn = np.where(BACK[..., None], np.uint8([255, 255, 255]), np.uint8(0))
    Image.fromarray(drawn).quantize(2).save(folder / "whole_mask" / "0_whole_mask.png")
    labels = Image.fromarray(BACK + SEEN * np.uint8(1))
    labels.putpalette((0, 0, 0, 128, 0, 0, 0, 128, 0))
    labels.save(folder / "whole_mask" / "1_whole_mask.png")
    found = read_mask_folders(replace(to_read(folder), max_bad=0.5))
    assert (masks.decode(found.annotations[0]["segmentation"]) == BACK).all() and len(
        found.annotations
    ) == 1
    assert "holds several values" in str(found.bad[0])


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match=r"there is no folder occlusion or images; .*--images"):
        read_mask_folders(to_read(tmp_path))
    (tmp_path / "images").mkdir()
    with pytest.raises(InputError, match="whole_mask: there is no such folder"):
        read_mask_folders(to_read(tmp_path))
