"""Flags, configuration files and stored configurations: what they mean, and what is refused."""

import json
from dataclasses import replace

import pytest

from r2sm_jax.cli import from_json, parse_config, to_json
from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.train import main as train

CHOICE = """from r2sm_jax.config import Config
def get_config():
    config = Config()
    object.__setattr__(config.{}, {!r}, {!r})  # as a file does that no test watches
    return config"""


def test_flags_override_the_defaults():
    config = parse_config(
        ["--train.batch-size", "4", "--model.head=linear", "--data.no-mirror", "--run", "x"]
    )
    assert (config.train.batch_size, config.model.head, config.data.mirror, config.run) == (
        4,
        "linear",
        False,
        "x",
    )
    assert replace(config, run=None).loss == Config().loss


def test_flags_override_a_config_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from r2sm_jax.config import Config, LoopConfig\ndef get_config():\n"
        "    return Config(train=LoopConfig(steps=7, batch_size=3))\n"
    )
    config = parse_config([str(path), "--train.steps", "8"])
    assert (config.train.steps, config.train.batch_size) == (8, 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.step", "5"], ["--train.step", "--train.steps"]),
        (["--trian.batch-size=5"], ["--trian.batch-size", "--train.batch-size"]),
        (["--model.head", "atention"], ["'atention'", "attention", "always_modal"]),
        (["--model.vision.image-size", "50"], ["--model.vision.image-size", "patch-size"]),
        (
            ["--model.vision.dim", "50", "--model.vision.heads", "4"],
            ["--model.vision.dim", "heads"],
        ),
        (["--train.batch-size", "0"], ["--train.batch-size"]),
        (["--model.vision.heads", "0"], ["--model.vision.heads 0", "at least 1"]),
        (["--model.vision.patch-size", "0"], ["--model.vision.patch-size 0", "at least 1"]),
        (["--model.decoder.heads", "0"], ["--model.decoder.heads 0", "at least 1"]),
        (["--train.evaluate-samples", "-1"], ["--train.evaluate-samples -1", "at least 1"]),
        (["--data.token-drop", "3"], ["--data.token-drop 3", "at most"]),
        (["--data.crop", "0"], ["--data.crop 0", "at least"]),
        (["--data.colour-jitter", "1.5"], ["--data.colour-jitter 1.5", "at most"]),
        (["--model.vision.depth", "-2"], ["--model.vision.depth -2", "at least 0"]),
        (["--model.decoder.slots", "-1"], ["--model.decoder.slots -1", "at least 0"]),
        (["--model.decoder.slots", "16"], ["--model.decoder.slots 16", "--data.instances 16"]),
        (
            ["--model.decoder.dim", "127", "--model.decoder.heads", "1"],
            ["--model.decoder.dim", "even"],
        ),
        (["--model.text.layers"], ["--model.text.layers is empty", "2 4 6"]),
        (["--loss.type-smoothing", "2"], ["--loss.type-smoothing 2", "at most"]),
        (["--loss.instance", "0"], ["--loss.instance 0", "--model.decoder.no-refine"]),
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


def test_a_value_of_the_wrong_kind_exits_with_2(command):
    end = command(train, "--train.steps", "many")
    assert end.code == 2 and "--train.steps" in end.err and "Traceback" not in end.err


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import a_module_that_is_not_there",
            "ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
        ),
        ("def get_config(:", "SyntaxError"),
        ("x = 1", "KeyError: 'get_config'"),
        ("def get_config():\n    return 1 / 0", "ZeroDivisionError"),
        ("def get_config():\n    return {'train': 1}", "get_config() must return"),
        (
            "from r2sm_jax.config import Config\ndef get_config():\n    return Config(speed=1)",
            "'speed'",
        ),
        (
            CHOICE.format("optimizer", "name", "adam"),
            "optimizer: name 'adam' is unknown; give one of muon",
        ),
        (
            CHOICE.format("optimizer", "decay", "lin"),
            "optimizer: decay 'lin' is unknown; give one of linear",
        ),
        (
            CHOICE.format("loss", "masks", "foo"),
            "loss: masks 'foo' is unknown; give one of mask2former, lisa",
        ),
        (
            CHOICE.format("train", "matmul_precision", "bf16"),
            "train: matmul_precision 'bf16' is unknown; give one of auto",
        ),
    ],
)
def test_a_config_file_that_does_not_load_is_one_sentence(source, reason, tmp_path, refused):
    (tmp_path / "bad.py").write_text(source)
    message = refused(train, tmp_path / "bad.py")
    assert "bad.py" in message and reason in message


def test_a_config_file_leaves_nothing_behind(tmp_path):
    (tmp_path / "c.py").write_text("from r2sm_jax.config import Config\nget_config = Config\n")
    assert parse_config([str(tmp_path / "c.py")]) == Config()
    assert [p.name for p in tmp_path.iterdir()] == ["c.py"]


def test_json_round_trip_is_exact(tiny_config):
    for config in (Config(), tiny_config):
        assert from_json(Config, json.loads(json.dumps(to_json(config))), "here") == config


def test_json_of_another_version_is_refused():
    values = to_json(Config())
    values["model"]["vision"]["colour_blind"] = True
    with pytest.raises(InputError, match=r"run\.json: model: vision: unknown field 'colour_blind'"):
        from_json(Config, values, "run.json")


def test_flags_say_all_that_is_not_the_default(tiny_flags, tiny_config):
    assert parse_config(tiny_flags) == tiny_config
