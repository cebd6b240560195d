"""Flags, configuration files and stored configurations: what they mean, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from r2sm_jax.cli import from_json, load_config_file, parse_config, to_json
from r2sm_jax.config import Config, default_config, flat_fields, is_read, refuse_unread
from r2sm_jax.errors import InputError
from r2sm_jax.train import main as train

CONFIGS = Path(__file__).parents[1] / "configs"
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


PARTS = ("segmenter", "completer", "outliner")


def changed(config: Any, name: str) -> Any:
    """A configuration with another value in one field, by its dotted name."""
    name, _, rest = name.partition(".")
    value = getattr(config, name)
    if rest:
        return replace(config, **{name: changed(value, rest)})
    hint = get_type_hints(type(config))[name]
    choices = [choice for choice in get_args(hint) if isinstance(choice, str | int)]
    if choices and choices != [value]:
        other = next(choice for choice in choices if choice != value)
    elif isinstance(value, tuple):
        other = (1, 2)
    elif isinstance(value, str) or value is None:
        other = "other"
    else:
        other = not value if isinstance(value, bool) else type(value)(value + 1)
    return replace(config, **{name: other})


@pytest.mark.parametrize("part", PARTS)
def test_a_field_that_a_part_does_not_read_is_refused(part):
    """tests/test_train.py shows that all others are read."""
    default = default_config(part)
    unread = [name for name, _ in flat_fields(default) if not is_read(name, part)]
    assert unread
    for name in unread:
        flag = f"--{name.replace('_', '-')} "
        with pytest.raises(InputError, match=f"{flag}.*--train.part {part} does not read it"):
            refuse_unread(changed(default, name))


@pytest.mark.parametrize("part", PARTS[1:])
def test_completer_and_outliner_have_a_recipe_of_their_own(part):
    """With flags alone it is that of their config file, and Muon is refused."""
    config = parse_config(["--train.part", part, "--optimizer.learning-rate", "2e-4"])
    file = load_config_file(CONFIGS / f"{part}.py")
    assert config.optimizer == replace(file.optimizer, learning_rate=2e-4)
    assert config.train.ema == file.train.ema > 0
    with pytest.raises(InputError, match=f"muon: --train.part {part} .* configs/{part}.py"):
        parse_config(["--train.part", part, "--optimizer.name", "muon"])
