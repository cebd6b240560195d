"""Run folders: what they hold, that nothing is written over, and that a run goes on with what it
was trained with, or not at all."""

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from run_files import arrays, logged, steps, with_flags
from tiny_models import write_bert

from r2sm_jax.cli import to_json
from r2sm_jax.config import Config
from r2sm_jax.errors import InputError
from r2sm_jax.train import main
from r2sm_jax.training import run_folder
from r2sm_jax.training.run_folder import (
    LATEST,
    Checkpoints,
    check_unchanged,
    find_run,
    locked,
    point_latest,
    resolve_auto,
    write_json,
)

LOGGED = [f"train/{name}" for name in ("loss", "modal", "amodal", "slots", "type", "gradient_norm")]


def test_a_run_folder_holds_everything(tiny_run):
    names = {path.name for path in tiny_run.iterdir()}
    expected = "config.json model.safetensors checkpoints metrics.jsonl samples report.json"
    assert {*expected.split(), "report.md"} <= names
    assert any(name.startswith("events.") for name in names)
    pictures = [path.name for path in sorted((tiny_run / "samples").iterdir())]
    assert pictures == ["step_000002.png", "step_000004.png"]
    assert steps(tiny_run) == [3, 4]
    report = json.loads((tiny_run / "report.json").read_text())
    assert set(report["splits"]) == {"val", "val_phrasing", "val_hard"}
    losses = logged(tiny_run)
    assert list(losses) == [1, 2, 3, 4]
    for line in losses.values():
        assert set(LOGGED) <= line.keys() and all(np.isfinite(v) for v in line.values())


def test_a_step_changes_every_module_and_no_constant(tiny_run, bert_folder):
    before, after = arrays(tiny_run, 3), arrays(tiny_run, 4)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    params = {name for name in before if ".params" in name}
    assert len(params & moved) > 10 * len(params - moved)
    # The second of (state, constants); the language model is not among them.
    constants = {name for name in before if name.startswith("[1]")}
    assert constants and not constants & moved
    vocabulary = json.loads((bert_folder / "config.json").read_text())["vocab_size"]
    assert not any(vocabulary in leaf.shape for leaf in after.values())


@pytest.mark.usefixtures("steps_alone")
def test_runs_latest_points_at_the_newest_with_a_checkpoint(
    tmp_path, monkeypatch, command, tiny_flags
):
    monkeypatch.chdir(tmp_path)
    assert command(main, *tiny_flags, "--run", "elsewhere").code == 0
    assert not LATEST.is_symlink()
    assert command(main, *tiny_flags).code == 0
    (run,) = [path for path in Path("runs").iterdir() if not path.is_symlink()]
    assert LATEST.resolve() == run.resolve() and steps(run) == [3, 4]
    # A link is followed at once: the next run moves it.
    assert find_run(Config()) == run.resolve()
    assert resolve_auto(Config(init=str(LATEST))).init == str(run.resolve())


def test_a_folder_in_the_place_of_the_link_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("latest", "new"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    point_latest(Path("runs/new"))
    assert "is a folder and no link" in capsys.readouterr().out
    assert sorted(path.name for path in Path("runs").iterdir()) == ["latest", "new"]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "RUN"], ["holds a run already"]),
        (["--run", "OF_OTHERS"], ["of another program"]),
        (["--run", "NO_WEIGHTS", "--resume"], ["model.safetensors", "missing or damaged"]),
        (["--run", "CUT_WEIGHTS", "--resume"], ["model.safetensors", "missing or damaged"]),
        (["--run", "NO_CHECKPOINT", "--resume"], ["no checkpoint", "--init NO_CHECKPOINT"]),
        (["--run", "FILE/run"], ["FILE/run", "Not a directory"]),
        (["--run", "NEW", "--model.text.dim", 48], ["--model.text.dim 48", "width 32"]),
        (["--run", "NEW", "--init", "NOWHERE"], ["NOWHERE"]),
        (
            ["--run", "NEW", "--init", "RUN", "--model.head", "mlp"],
            ["(attention there, mlp here)"],
        ),
        (["--run", "NEW", "--train.batch-size", 9, "--train.accumulate", 2], ["multiple of 2"]),
        (["--run", "NEW", "--distributed.fsdp", 3], ["--distributed.fsdp 3"]),
        (["--run", "NOWHERE", "--resume"], ["NOWHERE"]),
        (
            ["--run", "RUN", "--resume", "--model.head", "linear", "--train.seed", 3],
            ["model.head (attention in the run, linear now)", "train.seed (0 in the run, 3 now)"],
        ),
        (["--run", "RUN", "--resume", "--train.steps", 9], ["(4 in the run, 9 now)", "--init RUN"]),
        (["--run", "OTHER_TEXT", "--resume"], ["language_model.sha256"]),
    ],
)
def test_refusals(arguments, words, tiny_run, tiny_flags, tmp_path, refused):
    paths = {"RUN": tiny_run, "NEW": tmp_path / "new", "NOWHERE": tmp_path / "nowhere"}
    paths["FILE"] = tmp_path / "file"
    paths["FILE"].write_text("")
    if "OF_OTHERS" in arguments:
        paths["OF_OTHERS"] = tmp_path / "others"
        paths["OF_OTHERS"].mkdir()
        (paths["OF_OTHERS"] / "config.json").write_text('{"model_type": "bert"}')
    for name in ("NO_WEIGHTS", "CUT_WEIGHTS", "NO_CHECKPOINT"):
        if name in arguments:
            paths[name] = Path(shutil.copytree(tiny_run, tmp_path / name))
    if "NO_WEIGHTS" in arguments:
        (paths["NO_WEIGHTS"] / "model.safetensors").unlink()
    if "CUT_WEIGHTS" in arguments:
        os.truncate(paths["CUT_WEIGHTS"] / "model.safetensors", 1000)
    if "NO_CHECKPOINT" in arguments:
        shutil.rmtree(paths["NO_CHECKPOINT"] / "checkpoints")
    if "OTHER_TEXT" in arguments:
        paths["OTHER_TEXT"] = run = Path(shutil.copytree(tiny_run, tmp_path / "text"))
        stored = json.loads((run / "config.json").read_text())
        stored["config"]["model"]["text"]["name"] = str(write_bert(tmp_path / "bert", seed=1))
        write_json(run / "config.json", stored)

    def with_paths(text: str) -> str:
        for name, path in paths.items():
            text = text.replace(name, str(path))
        return text

    flags = [] if "--resume" in arguments else tiny_flags
    given = [with_paths(str(argument)) for argument in arguments]
    message = refused(main, *with_flags(flags, *given))
    assert all(with_paths(word) in message for word in words), message
    assert not (tmp_path / "new").exists()


def test_two_processes_do_not_train_one_run(tiny_run, tmp_path, refused):
    run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    with locked(run):  # as another process would, which opens the file for itself
        message = refused(main, "--resume", "--run", run)
    assert f"{run}: another process trains this run now" in message


def test_a_resumed_run_may_find_its_data_elsewhere_and_be_older_than_a_field(tiny_config, tmp_path):
    inputs = {"data": {"sha256": "12"}}
    write_json(tmp_path / "config.json", {"config": to_json(tiny_config), **inputs})
    moved = replace(tiny_config.data, source="json:new.json", images="elsewhere")
    check_unchanged(tmp_path, replace(tiny_config, data=moved), inputs)
    older = {"config": to_json(tiny_config), **inputs}
    del older["config"]["loss"]["type_smoothing"]  # as if this field were newer than the run
    write_json(tmp_path / "config.json", older)
    check_unchanged(tmp_path, tiny_config, inputs)
    for config, other in (
        (replace(tiny_config, data=replace(moved, seed=1)), inputs),
        (tiny_config, {"data": {"sha256": "13"}}),
    ):
        with pytest.raises(InputError, match=r"data\.(seed|sha256)"):
            check_unchanged(tmp_path, config, other)


# Checkpoints


def test_a_full_disk_while_saving_is_one_sentence_and_spares_earlier_checkpoints(tmp_path):
    noise = np.random.default_rng(0).normal(size=100_000)  # which cannot be compressed
    state = {"w": jnp.asarray(noise)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"best": None})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(InputError, match=r"could not be saved .*free disk space"):
            checkpoints.save(2, state, {"best": None})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    restored = Checkpoints(tmp_path).restore(state)
    assert restored is not None and restored[1] == {"best": None}
    np.testing.assert_array_equal(restored[0]["w"], state["w"])


def test_a_checkpoint_that_is_cut_short_is_named(tiny_run, tmp_path, refused):
    run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    for path in (run / "checkpoints" / "4").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            path.write_bytes(b"")
    message = refused(main, "--resume", "--run", run)
    assert f"{run / 'checkpoints' / '4'}: this checkpoint is damaged" in message
    shutil.rmtree(run / "checkpoints" / "4")
    assert Checkpoints(run)._orbax.latest_step() == 3


# What is used on this machine


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_defaults_that_depend_on_the_machine_are_resolved(precision, monkeypatch):
    monkeypatch.setattr(run_folder, "choose_matmul_precision", lambda: precision)
    resolved = resolve_auto(Config())
    assert (resolved.train.matmul_precision, resolved.train.devices) == (precision, 1)
    assert resolve_auto(resolved) == resolved
