"""`train --train.part completer`: what a run writes, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from listed_source import ListedSource
from PIL import Image

from r2sm_jax import predict, train
from r2sm_jax.cli import load_config_file
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.inference.completion import load_completer
from r2sm_jax.training.completion import cut_examples
from r2sm_jax.training.parts import EXAMPLES_PER_IMAGE, Examples

CONFIGS = Path(train.__file__).parents[1] / "configs"
FLAGS = """
    --train.part completer --train.steps 2 --train.batch-size 2 --train.log-every 1
    --train.evaluate-every 2 --train.evaluate-samples 8 --data.scenes 8 --data.queries 1
    --model.vision.image-size 64 --model.completer.size 32 --model.completer.dims 8 16
    --model.completer.depth 1 --model.completer.heads 2
""".split()


def test_a_run_writes_a_completer_and_its_figures_beside_those_of_hulls(tmp_path, command, refused):
    done = command(train.main, *FLAGS, "--data.source", "scenes", "--run", tmp_path / "run")
    assert done.code == 0, done.err
    completer = load_completer(tmp_path / "run")
    assert completer.config.size == 32

    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    references = records[0]["references"]
    assert references["visible mask"]["hidden"]["occluded_iou"] == 0
    hull, visible = (references[name]["hidden"] for name in ("hull", "visible mask"))
    assert hull["amodal_iou"] > visible["amodal_iou"]
    assert [record["step"] for record in records if "train/loss" in record] == [1, 2]
    assert records[-1]["dev"]["alone"]["hidden"]["objects"] > 0
    assert records[-1]["threshold"] == completer.threshold

    Image.new("RGB", (40, 40)).save(tmp_path / "photo.png")
    sentence = refused(predict.main, tmp_path / "run", tmp_path / "photo.png", "the cup")
    assert "the run of the part completer" in sentence


def write_visible_objects(folder):
    """A dataset file of 20 images, each with one object that nothing hides."""
    images, annotations = [], []
    for number in range(1, 21):
        Image.new("RGB", (40, 40)).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": 40, "width": 40})
        square = [5, 5, 30, 5, 30, 30, 5, 30]
        annotations.append(
            {"id": number, "image_id": number, "category_id": 1, "segmentation": [square]}
        )
    records = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "cup"}],
        "queries": [],
    }
    path = folder / "data.json"
    path.write_text(json.dumps(records))
    return path


def test_data_in_which_nothing_is_hidden_are_refused(tmp_path, refused):
    path = write_visible_objects(tmp_path)
    sentence = refused(
        train.main, *FLAGS, "--data.source", f"json:{path}", "--run", tmp_path / "run"
    )
    assert "hidden object" in sentence and "compose:FILE" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [["--resume"], ["--init", "runs/other"]])
def test_flags_of_the_segmenter_are_refused(refused, tmp_path, flags):
    sentence = refused(
        train.main, CONFIGS / "completer.py", *FLAGS, *flags, "--run", tmp_path / "run"
    )
    assert flags[0] in sentence
    assert not (tmp_path / "run").exists()


def test_a_picture_gives_as_many_examples_as_a_row_holds_and_none_if_it_has_none():
    image = np.zeros((40, 40, 3), np.uint8)
    whole = np.zeros((40, 40), bool)
    whole[10:30, 10:30] = True
    visible = whole.copy()
    visible[10:20] = False
    samples = [
        Sample(1, "a.png", image, (Instance(1, "cup", visible, whole),), ()),
        Sample(2, "b.png", image, (Instance(1, "cup", visible, None),), ()),
    ]
    examples = Examples(
        ListedSource(samples), lambda sample, rng: cut_examples(sample, 16, rng), (16, 16, 7)
    )
    rows = [examples((index, 0), np.random.default_rng(0)) for index in (0, 1)]
    assert rows[0].shape == rows[1].shape == (EXAMPLES_PER_IMAGE, 16, 16, 7)
    assert rows[0][..., 6].max() == 255 and not rows[1].any()


def test_its_configuration_trains_a_completer():
    config = load_config_file(CONFIGS / "completer.py")
    assert config.train.part == "completer"
