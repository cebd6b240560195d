"""Folders of masks, one PNG an object."""

from pathlib import Path

import numpy as np
import pytest
from annotation_files import (
    BACK,
    BACK_VISIBLE,
    FRONT,
    HEIGHT,
    WIDTH,
    check_pair,
    dataset_of,
    photo,
)
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import InputError
from r2sm_jax.tools.data import main
from r2sm_jax.tools.folders import FolderNames, read_mask_folders
from r2sm_jax.tools.records import collect


def save(path: Path, mask: np.ndarray, scale: int = 255) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((mask * scale).astype(np.uint8)).save(path)


def pix2gestalt(folder: Path, count: int = 2) -> Path:
    for number in range(count):
        photo(folder / "occlusion" / f"{number}_occlusion.png")
        save(folder / "whole_mask" / f"{number}_whole_mask.png", BACK)
        save(folder / "visible_object_mask" / f"{number}_visible_mask.png", BACK_VISIBLE)
    return folder


def test_folders_of_pix2gestalt(tmp_path, command):
    source = pix2gestalt(tmp_path / "p")
    end = command(main, "convert", "folders", source, "--out", tmp_path / "o.json")
    assert end.code == 0 and "no query could be written" in end.err  # the object has no name
    assert "2 images, 2 annotations, 1 categories" in end.out
    sample = read_json(tmp_path / "o.json")[1]
    (instance,) = sample.instances
    assert sample.file_name == "p/occlusion/1_occlusion.png" and instance.category == "object"
    assert (instance.modal == BACK_VISIBLE).all() and (instance.amodal == BACK).all()


@pytest.mark.parametrize("names", [("b_1_bottle", "b_2_bottle"), ("b/bottle_1", "b/bottle_2")])
def test_several_objects_of_an_image_with_their_classes(names, tmp_path):
    photo(tmp_path / "photos" / "b.jpg")
    photo(tmp_path / "photos" / "b_9.jpg")
    for name, complete, visible in zip(names, (FRONT, BACK), (FRONT, BACK_VISIBLE), strict=True):
        save(tmp_path / "full" / f"{name}.png", complete, scale=1)
        save(tmp_path / "part" / f"{name}.png", visible)
    folder_names = FolderNames(whole="full", visible="part")
    collector = collect(read_mask_folders([tmp_path], folder_names, tmp_path / "photos"), 0)
    assert collector.categories == {"bottle": 1} and len(collector.images) == 1
    check_pair(dataset_of(collector, tmp_path)[0])


def test_masks_that_cannot_be_used_are_bad_records(tmp_path):
    folder = pix2gestalt(tmp_path, 5)
    complete = folder / "whole_mask"
    (folder / "visible_object_mask" / "0_visible_mask.png").unlink()
    save(complete / "1_whole_mask.png", np.ones((9, 9), bool))
    labels = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 5
    save(complete / "2_whole_mask.png", labels, scale=1)
    (complete / "3_whole_mask.png").write_text("no image")
    save(complete / "lost_whole_mask.png", BACK)
    bad_records = collect(read_mask_folders([folder])).bad_records
    reasons = [
        "no mask in visible_object_mask",
        "9 x 9, but its image is 20 x 30",
        "several values up to 4",
        "3_whole_mask.png: no mask can be read",
        "there is no image for it",
    ]
    for bad_record, reason in zip(bad_records, reasons, strict=True):
        assert reason in str(bad_record)


def test_grey_edges_are_cut_at_half(tmp_path):
    folder = pix2gestalt(tmp_path, 1)
    grey = np.where(BACK, 255, 0)
    grey[0, :2] = 100, 200
    save(folder / "whole_mask" / "0_whole_mask.png", grey, scale=1)
    (annotation,) = collect(read_mask_folders([folder])).annotations
    assert annotation["area"] == masks.area(BACK) + 1


def test_exchanged_folders_and_inverted_masks(tmp_path):
    folder = pix2gestalt(tmp_path)
    exchanged = FolderNames(whole="visible_object_mask", visible="whole_mask")
    with pytest.raises(InputError, match=r"2 of 2 visible masks .*--whole and --visible"):
        collect(read_mask_folders([folder], exchanged))
    for number in (0, 1):
        save(folder / "whole_mask" / f"{number}_whole_mask.png", ~BACK)
        save(folder / "visible_object_mask" / f"{number}_visible_mask.png", ~BACK_VISIBLE & ~BACK)
    with pytest.raises(InputError, match="2 of 2 objects are white in all corners"):
        collect(read_mask_folders([folder]))


def test_objects_of_which_nothing_is_visible(tmp_path):
    """One is noted; most of them are refused."""
    folder = pix2gestalt(tmp_path)
    save(folder / "visible_object_mask" / "0_visible_mask.png", BACK & ~BACK)
    collector = collect(read_mask_folders([folder]))
    assert "nothing of it is visible" in str(collector.notes[0])
    save(folder / "visible_object_mask" / "1_visible_mask.png", BACK & ~BACK)
    with pytest.raises(InputError, match="2 of 2 objects are empty"):
        collect(read_mask_folders([folder]))


def test_files_that_are_left_out_are_counted(tmp_path):
    folder = pix2gestalt(tmp_path)
    for name in ("._0_whole_mask.png", "readme.txt"):
        (folder / "whole_mask" / name).write_text("x")
    photo(folder / "occlusion" / "7_occlusion.png")
    collector = collect(read_mask_folders([folder]))
    assert collector.bad_records == [] and len(collector.annotations) == 2
    skipped, unused = map(str, collector.notes)
    assert "2 files are no images (._0_whole_mask.png, readme.txt)" in skipped
    assert "1 images have no masks" in unused


def test_masks_that_are_no_images(tmp_path):
    folder = pix2gestalt(tmp_path, 1)
    path = folder / "whole_mask" / "0_whole_mask.png"
    path.rename(path.with_suffix(".npy"))
    with pytest.raises(InputError, match=r"whole_mask: there are no images; 0_whole_mask.npy"):
        collect(read_mask_folders([folder]))


def test_folders_that_do_not_exist(tmp_path):
    with pytest.raises(InputError, match=r"there is no folder occlusion or images; .*--images"):
        collect(read_mask_folders([tmp_path]))
    (tmp_path / "images").mkdir()
    with pytest.raises(InputError, match="whole_mask: there is no such folder"):
        collect(read_mask_folders([tmp_path]))
