"""Flags, configuration files and stored configurations: what they mean, and what is refused."""

import json
from dataclasses import replace

import pytest

from r2sm_jax.cli import from_json, parse_config, to_json
from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.train import main as train

FILE = """from r2sm_jax.config import Config, LoopConfig
def get_config():
    return Config({})
"""


def test_flags_override_a_config_file_and_that_the_defaults(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format("train=LoopConfig(steps=7, batch_size=3)"))
    config = parse_config([str(path), "--train.steps", "8", "--model.head=mlp", "--data.no-mirror"])
    expected = replace(Config().train, steps=8, batch_size=3)
    assert (config.train, config.model.head, config.data.mirror) == (expected, "mlp", False)
    assert config.loss == Config().loss
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.vision.image-size", "50"], ["--model.vision.image-size", "patch-size"]),
        (
            ["--model.vision.dim", "50", "--model.vision.heads", "4"],
            ["--model.vision.dim", "heads"],
        ),
        (["--train.batch-size", "0"], ["--train.batch-size 0", "at least 1"]),
        (["--model.decoder.heads", "0"], ["--model.decoder.heads 0", "at least 1"]),
        (["--data.workers", "-1"], ["--data.workers -1", "at least 0"]),
        (["--data.crop", "0"], ["--data.crop 0", "at least"]),
        (["--train.ema", "1.0"], ["--train.ema 1.0", "at most"]),
        (["--model.decoder.slots", "16"], ["--model.decoder.slots 16", "--data.instances 16"]),
        (["--model.decoder.dim", "127", "--model.decoder.heads", "1"], ["--model.decoder.dim"]),
        (["--loss.instance", "0"], ["--loss.instance 0", "--model.decoder.no-refine"]),
        (["--train.select-on", "train"], ["--train.select-on train"]),
        (["--train.steps", "5", "--train.steps=6"], ["--train.steps", "2 times"]),
        (["missing.py"], ["missing.py", "does not exist"]),
    ],
)
def test_bad_flags_are_refused_with_the_remedy(flags, words, refused):
    message = refused(train, *flags)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "flags",
    [["--model.decoder.type", "sam"], ["--model.head", "none"], ["--model.decoder.no-refine"]],
)
def test_instances_can_be_left_out_where_nothing_looks_again(flags):
    assert parse_config([*flags, "--loss.instance", "0"]).loss.instance == 0


def test_json_round_trip_is_exact(tiny_config):
    for config in (Config(), tiny_config):
        assert from_json(Config, json.loads(json.dumps(to_json(config))), "here") == config


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("vision", "colour_blind", True, r"unknown field model\.vision\.colour_blind"),
        ("vision", "encoder", "cnn", r"'cnn'.*model\.vision\.encoder"),
        ("text", "max_tokens", "5", r"int.*model\.text\.max_tokens"),
    ],
)
def test_json_of_another_version_is_refused(part, field, value, words):
    """A config file is read as such JSON, too."""
    values = to_json(Config())
    values["model"][part][field] = value
    with pytest.raises(InputError, match=rf"run\.json: .*{words}"):
        from_json(Config, values, "run.json")


@pytest.mark.parametrize(
    "code", ["get_config = 1 / 0", "def make_config(): ...", "def get_config(:"]
)
def test_a_config_file_that_does_not_load_is_named(tmp_path, code):
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(InputError, match=r"mine\.py: .*get_config"):
        parse_config([str(file)])


def test_flags_say_all_that_is_not_the_default(tiny_flags, tiny_config):
    assert parse_config(tiny_flags) == tiny_config
