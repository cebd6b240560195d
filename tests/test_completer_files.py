"""Files of a completer: its own folder, and exports of a segmenter that hold one."""

import json
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax import export
from r2sm_jax.config import CompleterConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference import stablehlo
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    load_completer,
    open_completer,
    save_completer,
)
from r2sm_jax.inference.export_folder import FORMAT_VERSION, RELEASED, check_export, write_checksums
from r2sm_jax.inference.exporter import add_parts
from r2sm_jax.inference.run import load_export, load_run
from r2sm_jax.inference.verification import verify
from r2sm_jax.models.crop_unet import make_completer

TINY = CompleterConfig(size=32, dims=(8, 16), depth=1, heads=2)
MASK = np.zeros((40, 50), bool)
MASK[10:25, 10:30] = True
IMAGE = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)


@pytest.fixture(scope="module")
def completer() -> MaskCompleter:
    _, weights = nnx.split(make_completer(TINY, rngs=nnx.Rngs(0)))
    return MaskCompleter(TINY, weights, threshold=-2.0)


@pytest.fixture(scope="module")
def folder(completer, tmp_path_factory):
    """The run folder of a completer."""
    folder = tmp_path_factory.mktemp("completer")
    save_completer(folder, completer)
    return folder


@pytest.fixture(scope="module")
def with_completer(folder, tmp_path_factory):
    """The released model with this completer."""
    out = tmp_path_factory.mktemp("exports") / "completing"
    add_parts(RELEASED / "photos-small", out, completer=load_completer(folder))
    return out


def assert_equal(one: MaskCompleter, other: MaskCompleter) -> None:
    assert one.config == other.config and one.threshold == other.threshold
    np.testing.assert_array_equal(one(IMAGE, [MASK]), other(IMAGE, [MASK]))


def test_a_completer_is_stored_and_loaded(folder, completer):
    for path in (folder, folder / "completer.safetensors", folder / "completer.json"):
        assert_equal(load_completer(path), completer)
    assert_equal(open_completer(folder), completer)
    stored = json.loads((folder / "completer.json").read_text())
    assert stored["threshold"] == -2 and stored["config"]["size"] == 32


def test_a_completer_is_put_into_an_export(with_completer, folder, tmp_path, command):
    source = RELEASED / "photos-small"
    check_export(with_completer)
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in with_completer.iterdir()} == names

    before = load_file(source / "model.safetensors")
    after = load_file(with_completer / "model.safetensors")
    # The released model has a completer already, which is replaced.
    segmenter = {name for name in before if not name.startswith("completer.")}
    for name in segmenter:
        np.testing.assert_array_equal(after[name], before[name])
    added = {name: value for name, value in after.items() if name not in segmenter}
    assert all(name.startswith("completer.") for name in added)
    assert all(value.dtype == np.float16 for value in added.values())  # it is a compact export

    stored = json.loads((with_completer / "config.json").read_text())
    assert stored.pop("completer")["threshold"] == -2
    released = json.loads((source / "config.json").read_text())
    del released["completer"]
    assert stored == released | {"format_version": FORMAT_VERSION}

    out = tmp_path / "again"
    end = command(export.main, with_completer, "--completer", folder, "--out", out)
    assert end.code == 0, end.err
    for path in with_completer.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_completer_of_an_export_is_opened_without_its_segmenter(with_completer, completer):
    opened = open_completer(with_completer)
    assert opened.config == completer.config and opened.threshold == completer.threshold
    (mask,) = opened(IMAGE, [MASK])
    assert (mask | MASK == mask).all()


@pytest.mark.slow
def test_a_run_is_exported_with_a_completer(
    tiny_run, folder, tmp_path, command, completer, monkeypatch
):
    monkeypatch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    out = tmp_path / "export"
    end = command(export.main, tiny_run, "--completer", folder, "--out", out)
    assert end.code == 0, end.err
    run = load_run(tiny_run)
    exported = load_export(out).predictor
    assert run.predictor.completer is None and exported.completer is not None
    assert exported.weights_sha256 == run.predictor.weights_sha256
    assert_equal(exported.completer, completer)
    assert "## Completer" in (out / "README.md").read_text()
    # The StableHLO is that of the segmenter, and runs beside the completer's weights.
    assert "StableHLO" in verify(run, out)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["photos-small", "--completer", "NOWHERE"], "completer.json"),
        (["photos-small", "--completer", "FOLDER", "--compact"], "--compact"),
        (["photos-small", "--completer", "FOLDER", "--verify"], "--verify"),
    ],
)
def test_export_refuses(arguments, word, folder, tmp_path, refused):
    paths = {"NOWHERE": str(tmp_path), "FOLDER": str(folder)}
    arguments = [paths.get(argument, argument) for argument in arguments]
    assert word in refused(export.main, *arguments, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_damaged_files_are_refused(folder, with_completer, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "completer.json").write_text("[]")
    with pytest.raises(InputError, match="config"):
        load_completer(copy)
    shutil.copy(folder / "completer.json", copy)
    (copy / "completer.safetensors").unlink()
    with pytest.raises(InputError, match="missing"):
        load_completer(copy)

    spoilt = shutil.copytree(with_completer, tmp_path / "spoilt")
    tensors = load_file(spoilt / "model.safetensors")
    del tensors["completer.positions"]
    save_file(tensors, spoilt / "model.safetensors")
    with pytest.raises(InputError, match="changed or damaged"):
        open_completer(spoilt)
    write_checksums(spoilt)
    with pytest.raises(InputError, match="completer lack positions"):
        open_completer(spoilt)


def test_models_without_a_completer_say_so(tiny_run):
    config = json.loads((RELEASED / "photos-small" / "config.json").read_text())
    if "completer" not in config:
        with pytest.raises(InputError, match="photos-small has no completer"):
            open_completer("photos-small")
    with pytest.raises(InputError, match=r"completer\.json"):
        open_completer(tiny_run)
