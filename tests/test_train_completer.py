"""`train --train.part completer`: what a run writes, and what it refuses."""

import json
import shutil
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from listed_source import ListedSource
from PIL import Image
from safetensors.numpy import load_file, save_file
from tiny_efficientnet import DIMS, tiny_tensors

from r2sm_jax import predict, train
from r2sm_jax.cli import load_config_file
from r2sm_jax.config import CompleterConfig, Config, LoopConfig, ModelConfig
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    load_completer,
    open_completer,
    save_completer,
)
from r2sm_jax.inference.export_folder import RELEASED, write_checksums
from r2sm_jax.inference.exporter import add_parts, portable_config
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.models.keys import read_efficientnet
from r2sm_jax.training import parts
from r2sm_jax.training.crop_models import cut_examples
from r2sm_jax.training.parts import (
    EXAMPLES_PER_IMAGE,
    PictureExamples,
    draw_batches,
    example_batches,
)

TINY = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
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


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The run folder of a tiny completer with random weights."""
    folder = tmp_path_factory.mktemp("start")
    weights = nnx.state(make_completer(TINY, rngs=nnx.Rngs(5)))
    save_completer(folder, MaskCompleter(TINY, weights, threshold=1.5))
    return folder


@pytest.fixture(scope="module")
def export_without(tmp_path_factory):
    """The released model without its completer."""
    folder = shutil.copytree(RELEASED / "photos-small", tmp_path_factory.mktemp("exports") / "bare")
    stored = json.loads((folder / "config.json").read_text())
    del stored["completer"]
    (folder / "config.json").write_text(json.dumps(stored))
    write_checksums(folder)
    return folder


def test_a_run_reads_the_features_of_a_published_backbone(tmp_path, command):
    published = tmp_path / "tiny.safetensors"
    save_file(tiny_tensors(), published)
    flags = [*FLAGS, "--data.source", "scenes", "--model.completer.efficientnet", published]
    fitting = ["--model.completer.block-dims", *map(str, DIMS[:6])]
    done = command(train.main, *flags, *fitting, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    tensors = load_file(tmp_path / "run/completer.safetensors")
    expected = read_efficientnet(published)["_blocks.5._project_conv.weight"][..., 0, 0]
    np.testing.assert_array_equal(tensors["efficientnet.blocks.5.project.kernel"], expected.T)

    # An export names the file alone, and has the weights of the backbone, too.
    completer = load_completer(tmp_path / "run")
    assert completer.config.efficientnet == str(published)
    add_parts(RELEASED / "photos-small", tmp_path / "export", completer=completer)
    assert open_completer(tmp_path / "export").config.efficientnet == "tiny.safetensors"
    config = Config(model=ModelConfig(completer=completer.config))
    assert portable_config(config).model.completer.efficientnet == "tiny.safetensors"
    assert portable_config(Config()).model.completer.efficientnet == ""


def test_a_backbone_of_other_channels_is_refused(tmp_path, refused):
    published = tmp_path / "tiny.safetensors"
    save_file(tiny_tensors(), published)
    flags = [*FLAGS, "--data.source", "scenes", "--model.completer.efficientnet"]
    sentence = refused(train.main, *flags, published, "--run", tmp_path / "run")
    assert "--model.completer.block-dims" in sentence
    sentence = refused(train.main, *flags, "efficientnet-lite9", "--run", tmp_path / "run")
    assert "--model.completer.efficientnet efficientnet-lite9" in sentence
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume"], ["--resume"]),
        (["--init", "runs/other"], ["runs/other"]),
        (["--init", "EXPORT"], ["EXPORT", "no completer"]),
    ],
)
def test_starts_that_cannot_be_are_refused(refused, tmp_path, start, export_without, flags, words):
    paths = {"START": str(start), "EXPORT": str(export_without)}
    flags = [paths.get(flag, flag) for flag in flags]
    sentence = refused(
        train.main, CONFIGS / "completer.py", *FLAGS, *flags, "--run", tmp_path / "run"
    )
    assert all(paths.get(word, word) in sentence for word in words)
    assert not (tmp_path / "run").exists()


def test_a_run_starts_from_the_weights_of_a_completer(tmp_path, command, start):
    flags = [*FLAGS, "--data.source", "scenes", "--run", tmp_path / "run"]
    done = command(train.main, *flags, "--init", start, "--optimizer.learning-rate", "0")
    assert done.code == 0, done.err
    before, after = (
        load_file(path / "completer.safetensors") for path in (start, tmp_path / "run")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6)


def picture(number: int, objects: int) -> Sample:
    """A picture of the colour `number` with some objects of which half is hidden."""
    image = np.full((40, 40, 3), number, np.uint8)
    whole = np.zeros((40, 40), bool)
    whole[10:30, 10:30] = True
    visible = whole.copy()
    visible[10:20] = False
    instances = [Instance(i, "cup", visible, whole) for i in range(1, objects + 1)]
    return Sample(number, "a.png", image, tuple(instances), ())


def cut_small(sample, rng):
    return cut_examples(sample, 16, rng)


def test_a_picture_gives_some_examples_and_none_if_it_has_no_complete_mask():
    hidden = picture(1, objects=6)
    unknown = replace(picture(2, objects=1).instances[0], amodal=None)
    samples = [hidden, replace(hidden, instances=(unknown,))]
    examples = PictureExamples(ListedSource(samples), cut_small)
    of_first, of_second = (examples((i, 0), np.random.default_rng(0)) for i in (0, 1))
    assert [example.shape for example in of_first] == EXAMPLES_PER_IMAGE * [(16, 16, 7)]
    assert all(example[..., 6].max() == 255 for example in of_first) and of_second == []

    with pytest.raises(InputError, match="no object to learn from"):
        next(example_batches(ListedSource(samples[1:]), Config(), cut_small))


def test_batches_mix_pictures_and_the_seed_decides_them():
    source = ListedSource([picture(number, objects=3) for number in range(1, 61)])
    config = Config(train=LoopConfig(batch_size=2))

    def numbers_of_batches(count: int, seed: int) -> list[list[int]]:
        """The picture of each example."""
        seeded = replace(config, train=replace(config.train, seed=seed))
        batches = example_batches(source, seeded, cut_small)
        return [batch[..., 0].max((1, 2)).tolist() for batch in islice(batches, count)]

    numbers = numbers_of_batches(90, seed=0)
    assert {len(batch) for batch in numbers} == {2 * EXAMPLES_PER_IMAGE}
    assert numbers == numbers_of_batches(90, seed=0)
    assert numbers[:5] != numbers_of_batches(5, seed=1)
    # In their order a batch of 8 examples would have 3 or 4 pictures.
    assert np.mean([len(set(batch)) for batch in numbers[10:]]) > 6
    assert {number for batch in numbers for number in batch} == set(range(1, 61))


def test_every_example_leaves_the_pool_once(monkeypatch):
    monkeypatch.setattr(parts, "POOL_SIZE", 20)
    examples = (np.full(1, number) for number in count())
    batches = draw_batches(examples, 4, np.random.default_rng(0))
    drawn = np.concatenate(list(islice(batches, 500))).ravel().tolist()
    assert len(set(drawn)) == len(drawn) == 2000
    assert set(range(1800)) <= set(drawn) and max(drawn) < 2000 + 24


@pytest.mark.parametrize("name", ["completer", "completer_finetune"])
def test_its_configurations_train_a_completer(name):
    config = load_config_file(CONFIGS / f"{name}.py")
    assert config.train.part == "completer"


def test_the_released_completer_has_the_sizes_of_its_fine_tuning():
    config = load_config_file(CONFIGS / "completer_finetune.py")
    assert open_completer(config.init).config == config.model.completer
