"""Masks of a detector are scored as pycocotools scores them, visible and complete ones."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from r2sm_jax.data import masks
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.detectors import score_detections

SIZE = (48, 64)
CLASSES = [{"id": 3, "name": "cup"}, {"id": 7, "name": "dog"}, {"id": 8, "name": "owl"}]
NAMES = ("ap", "ap50", "ap75")


def some_boxes(rng: np.random.Generator) -> tuple[dict, dict]:
    """A complete box, and what shows of it."""
    x, y, width, height = rng.integers([0, 0, 8, 8], [40, 30, 24, 18])
    whole = np.zeros(SIZE, bool)
    whole[y : y + height, x : x + width] = True
    visible = whole.copy()
    visible[:, : x + int(rng.choice([0, 0, 2, 5]))] = False
    return masks.encode(whole), masks.encode(visible)


def moved(rle: dict, rng: np.random.Generator) -> dict:
    return masks.encode(np.roll(masks.decode(rle), tuple(rng.integers(-1, 2, 2)), (0, 1)))


@pytest.fixture(scope="module", params=range(4))
def data(request, tmp_path_factory) -> Path:
    """A folder with a dataset file, and a detector's results about it."""
    folder = tmp_path_factory.mktemp("detector")
    rng = np.random.default_rng(request.param)
    images, annotations, results = [], [], []
    for image_id in (9, 4, 6, 2):
        name = f"photo_{image_id}.jpg"
        images.append({"id": image_id, "file_name": name, "height": 48, "width": 64})
        for _ in range(rng.integers(0, 5)):
            whole, visible = some_boxes(rng)
            annotation = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": int(rng.choice([3, 7])),
                "segmentation": whole,
                "visible_mask": visible,
                "iscrowd": int(rng.random() < 0.15),
            }
            annotations.append(annotation)
            for _ in range(rng.integers(0, 3)):
                # Few different scores, so that many are tied.
                result = {"image_id": image_id, "score": float(rng.integers(1, 5) / 5)}
                mask = moved(whole if rng.random() < 0.5 else visible, rng)
                results.append(
                    result | {"category_id": annotation["category_id"], "segmentation": mask}
                )
    content = {"images": images, "annotations": annotations, "categories": CLASSES}
    (folder / "data.json").write_text(json.dumps(content))
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def pycocotools_of(folder: Path, field: str) -> COCOeval:
    """COCO's own evaluation, of the truth in a field."""
    content = json.loads((folder / "data.json").read_text())
    for annotation in content["annotations"]:
        annotation["segmentation"] = annotation[field]
        annotation["area"] = float(masks.area(masks.decode(annotation[field])))
    truth = COCO()
    with contextlib.redirect_stdout(io.StringIO()):
        truth.dataset = content
        truth.createIndex()
        found = truth.loadRes(json.loads((folder / "results.json").read_text()))
        evaluation = COCOeval(truth, found, "segm")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


@pytest.mark.parametrize(("kind", "field"), [("modal", "visible_mask"), ("amodal", "segmentation")])
def test_figures_are_those_of_pycocotools(data, kind, field):
    figures = score_detections(data / "results.json", data / "data.json")[kind]
    expected = pycocotools_of(data, field).stats
    names = {"ap": 0, "ap50": 1, "ap75": 2, "ar1": 6, "ar10": 7, "ar": 8}
    for name, place in names.items():
        assert figures[name] == pytest.approx(expected[place], abs=1e-12), name


def save(folder: Path, annotations: list[dict], results: list[dict]) -> list:
    images = [{"id": 1, "file_name": "a.jpg", "height": 48, "width": 64}]
    content = {"images": images, "annotations": annotations, "categories": CLASSES}
    (folder / "data.json").write_text(json.dumps(content))
    (folder / "results.json").write_text(json.dumps(results))
    return ["--predictions", folder / "results.json", "--data", folder / "data.json"]


WHOLE, SEEN = masks.encode(np.ones(SIZE, bool)), masks.encode(np.arange(64) < np.full((48, 1), 40))
TRUE = {"id": 1, "image_id": 1, "category_id": 3, "segmentation": WHOLE, "visible_mask": SEEN}
FOUND = {"image_id": 1, "category_id": 3, "segmentation": WHOLE, "score": 0.9}


def test_a_detector_that_tells_what_is_hidden(tmp_path, command):
    """Of the object 3/8 are hidden. The name of its photo stands for the id."""
    flags = save(tmp_path, [TRUE], [FOUND | {"image_id": "a", "visible_mask": SEEN}])
    assert command(main, *flags, "--out", tmp_path).code == 0
    figures = json.loads((tmp_path / "detections.json").read_text())
    for kind in ("modal", "amodal"):
        by_share = [figures[kind][f"{name}_occluded_25"] for name in ("ap", "ar")]
        assert by_share == [pytest.approx(1), 1] and figures[kind]["ar_occluded_40"] is None


def test_a_name_that_two_photos_have_is_refused(tmp_path, refused):
    flags = save(tmp_path, [TRUE], [FOUND | {"image_id": "a"}])
    content = json.loads((tmp_path / "data.json").read_text())
    content["images"].append(content["images"][0] | {"id": 2, "file_name": "b/a.jpg"})
    (tmp_path / "data.json").write_text(json.dumps(content))
    assert "entry 0: 'a' is not one image of the data: 1, 2, ..." in refused(main, *flags)


def test_visible_masks_alone_are_scored_alone(tmp_path, command):
    flags = save(tmp_path, [FOUND | {"id": 1, "iscrowd": 0}], [FOUND])
    shown = command(main, *flags).out
    assert "modal masks" in shown and "amodal" not in shown


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        ({"image_id": 5}, [], "entry 0: 5 is not one image of the data: a, 1, ..."),
        ({"category_id": 0}, [], "entry 0: 0 is not one category of the data: 3, 7, 8, ..."),
        ({"segmentation": masks.encode(np.ones((3, 4), bool))}, [], "entry 0: the RLE's size"),
        ({"score": None}, [], "$[0].score"),
        ({}, ["--split", "val"], "leave them out"),
        ({}, ["--images", "photos"], "leave them out"),
        ({}, ["--backgrounds", "photos"], "leave them out"),
    ],
)
def test_what_cannot_be_scored_is_refused(change, flags, words, tmp_path, refused):
    assert words in refused(main, *save(tmp_path, [TRUE], [FOUND | change]), *flags)
