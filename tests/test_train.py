"""Training: what a run folder holds, resuming to the bit, starting from another run, what stops
one."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from listed_source import ListedSource

from r2sm_jax import predict, train as train_module
from r2sm_jax.config import Config, LoopConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference import run as runs
from r2sm_jax.inference.run import load
from r2sm_jax.train import main
from r2sm_jax.training import run_folder
from r2sm_jax.training.checkpoints import Checkpoints, flatten
from r2sm_jax.training.logs import Logs
from r2sm_jax.training.run_folder import lock_run, read_config, resolve_auto
from r2sm_jax.training.sharding import make_mesh
from r2sm_jax.training.step import abstract_state


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """Everything that a checkpoint holds."""
    _, state, constants = abstract_state(read_config(run))
    restored = Checkpoints(run).restore(state, constants, step=step)
    return {name: np.asarray(leaf) for name, leaf in flatten(restored).items()}


def assert_bit_identical(one: Path, other: Path, step: int = 4) -> None:
    a, b = arrays(one, step), arrays(other, step)
    assert a.keys() == b.keys() and len(a) > 100
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    assert different == []


LOGGED = [f"train/{name}" for name in ("loss", "modal", "amodal", "slots", "type", "gradient_norm")]


def losses(run: Path) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "train/loss" in line}


def at_step(monkeypatch, step: int, action) -> None:
    """Does something when a step's losses are logged."""
    add = Logs.add

    def patched(self, number, values, **options):
        if number == step:
            action()
        return add(self, number, values, **options)

    monkeypatch.setattr(Logs, "add", patched)


# A whole run.


def test_a_run_folder_holds_everything(tiny_run):
    names = {path.name for path in tiny_run.iterdir()}
    assert {
        "config.json",
        "checkpoints",
        "metrics.jsonl",
        "samples",
        "report.json",
        "report.md",
    } <= names
    assert any(name.startswith("events.") for name in names)
    assert [p.name for p in sorted((tiny_run / "samples").iterdir())] == [
        "step_000002.png",
        "step_000004.png",
    ]
    report = json.loads((tiny_run / "report.json").read_text())
    assert set(report["splits"]) == {"val", "val_phrasing", "val_hard"}
    assert report["splits"]["val"]["all"]["queries"] > 0


def test_every_loss_is_logged_for_every_step(tiny_run):
    logged = losses(tiny_run)
    assert list(logged) == [1, 2, 3, 4]
    for line in logged.values():
        assert set(LOGGED) <= line.keys() and all(np.isfinite(v) for v in line.values())


def test_a_run_learns_something_in_every_module(tiny_run):
    before, after = arrays(tiny_run, 3), arrays(tiny_run, 4)
    moved = [
        name
        for name in before
        if "params" in name and not np.array_equal(before[name], after[name])
    ]
    still = [name for name in before if "params" in name and name not in moved]
    assert len(moved) > 10 * len(still), still
    constants = [name for name in before if name.startswith(".constants")]
    assert constants and all(np.array_equal(before[name], after[name]) for name in constants)


def test_the_language_model_is_not_in_the_checkpoint(tiny_run, bert_folder):
    vocabulary = json.loads((bert_folder / "config.json").read_text())["vocab_size"]
    assert not any(vocabulary in leaf.shape for leaf in arrays(tiny_run, 4).values())


# Stopping and going on.


@pytest.mark.slow
def test_a_killed_run_goes_on_to_bit_identical_parameters(tiny_run, tiny_flags, tmp_path, command):
    run = tmp_path / "killed"
    arguments = [sys.executable, "-m", "r2sm_jax.train", *tiny_flags, "--run", str(run)]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = []
    for line in process.stdout or ():
        output.append(line)
        if line.startswith("step 3/"):
            process.kill()
    assert process.wait() == -signal.SIGKILL, "".join(output)
    end = command(main, "--resume", "--run", run)  # which keeps the run's configuration
    assert end.code == 0 and "resumed at step" in end.out, end.err
    assert (run / "report.json").exists()
    assert_bit_identical(tiny_run, run)


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
def test_sigterm_saves_exits_with_0_and_the_run_goes_on_exactly(
    tiny_run, tiny_flags, tmp_path, command, monkeypatch
):
    """With the default optimizer, batches in two parts, and products of bfloat16, which change the
    first loss a little."""
    flags = [*tiny_flags, "--optimizer.name", "muon", "--train.matmul-precision", "bfloat16"]
    flags += ["--train.accumulate", 2, "--train.steps", 3]
    flags += ["--train.checkpoint-every", 100, "--train.evaluate-every", 100]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert command(main, *flags, "--run", whole).code == 0
    loss, exact_loss = (losses(run)[1]["train/loss"] for run in (whole, tiny_run))
    assert loss != exact_loss and loss == pytest.approx(exact_loss, rel=1e-2)

    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        end = command(main, *flags, "--run", parts)
    assert end.code == 0 and "SIGTERM" in end.out and f"--resume --run {parts}" in end.out
    assert Checkpoints(parts).steps[-1] == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert command(main, *flags, "--run", parts, "--resume").code == 0
    assert_bit_identical(whole, parts, 3)


def test_a_finished_run_can_be_resumed_and_only_reports(tiny_run, command, tmp_path):
    run = Path(shutil.copytree(tiny_run, tmp_path / "a copy"))
    (run / "report.json").unlink()
    end = command(main, "--resume", "--run", run)
    assert end.code == 0 and "resumed at step 4" in end.out and (run / "report.json").exists()

    # It ends with what it reached, on what, where the report is, and a command that works.
    reached, on, report, following = end.out.splitlines()[-4:]
    figures = json.loads((run / "report.json").read_text())["splits"]["val"]["all"]
    assert f"{100 * figures['giou']:.2f}" in reached
    assert f"{figures['queries']:,} queries" in on
    assert Path(report.partition(": ")[2]) == run / "report.html"
    arguments = shlex.split(following.partition(": ")[2])
    assert arguments[:3] == ["python", "-m", "r2sm_jax.predict"]
    answer = command(predict.main, *arguments[3:], "--out", tmp_path / "answer")
    assert answer.code == 0, answer


def test_resuming_with_another_configuration_is_refused_by_field(tiny_run, tiny_flags, refused):
    message = refused(
        main, "--resume", "--run", tiny_run, "--model.head", "linear", "--train.seed", 3
    )
    assert (
        "model.head (attention in the run, linear now)" in message
        and "train.seed (0 in the run, 3 now)" in message
    )
    assert "train.steps" not in message


def test_two_processes_do_not_train_one_run(tiny_run, tmp_path, refused):
    run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    with lock_run(run):  # as another process would, which opens the file for itself
        message = refused(main, "--resume", "--run", run)
    assert f"{run}: another process trains this run now" in message


# Starting from another run.


def test_the_weights_of_another_run_are_a_starting_point(tiny_run, tiny_config, tmp_path):
    from r2sm_jax.train import load_initial, split_model

    _, params, constants = split_model(tiny_config.model, 5)
    loaded, _ = load_initial(replace(tiny_config, init=str(tiny_run)), params, constants, tmp_path)
    best = load(tiny_run).step
    saved = arrays(tiny_run, best)
    assert all(
        np.array_equal(leaf, saved[f".state.params{name}"])
        for name, leaf in flatten(loaded).items()
    )
    other = replace(
        tiny_config, init=str(tiny_run), model=replace(tiny_config.model, head="linear")
    )
    with pytest.raises(InputError, match="its model differs"):
        load_initial(other, params, constants, tmp_path)


# Things that go wrong.


def test_a_loss_that_is_not_finite_stops_with_step_images_and_state(
    tiny_flags, tmp_path, refused, monkeypatch
):
    compile_step, indices = train_module.compile_step, []

    def broken(*arguments):
        step = compile_step(*arguments)

        def train_step(state, constants, batch, names):
            indices.append(np.asarray(batch["index"]).tolist())
            state, values = step(state, constants, batch, names)
            return state, values | ({"loss": values["loss"] * np.nan} if len(indices) == 3 else {})

        return train_step

    monkeypatch.setattr(train_module, "compile_step", broken)
    flags = ["--train.log-every", 100, "--train.checkpoint-every", 2, "--train.evaluate-every", 100]
    message = refused(main, *tiny_flags, "--run", tmp_path / "run", *flags)
    assert "step 3: " in message and f"images {', '.join(map(str, indices[2]))};" in message
    assert len(list((tmp_path / "run" / "not_finite").rglob("*"))) > 3
    assert Checkpoints(tmp_path / "run").steps == [2]  # from where --resume goes on


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tiny_run, tmp_path, capsys):
    run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    steps = Checkpoints(run).steps
    assert steps[-1] == 4 and len(steps) > 1
    largest = max(
        (run / "checkpoints" / "4").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    largest.write_bytes(content)
    opened = load(run, checkpoint="latest")
    assert opened.step == steps[-2]
    captured = capsys.readouterr()
    assert "checkpoint 4 is damaged" in captured.err and captured.out == ""


def test_a_run_with_nothing_but_damaged_checkpoints_is_one_sentence(tiny_run, tmp_path):
    run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            path.write_bytes(b"")
    with pytest.raises(InputError, match="no usable checkpoint"):
        load(run)


def test_the_width_of_the_language_model_must_be_configured(tiny_flags, tmp_path, refused):
    message = refused(main, *tiny_flags, "--model.text.dim", 48, "--run", tmp_path / "run")
    assert "--model.text.dim 48" in message and "32" in message


@pytest.mark.parametrize("fault", ["a split that cannot be read", "a split without queries"])
def test_reported_splits_are_opened_before_training_starts(
    fault, tiny_flags, tmp_path, refused, monkeypatch
):
    open_dataset = train_module.open_dataset

    def open_but_for_val_hard(data, split, **options):
        if split != "val_hard":
            return open_dataset(data, split, **options)
        if fault == "a split without queries":
            return ListedSource([])
        raise InputError("val_hard.json: damaged")

    monkeypatch.setattr(train_module, "open_dataset", open_but_for_val_hard)
    monkeypatch.setattr(train_module, "split_model", lambda *_: pytest.fail("it makes a model"))
    assert "val_hard" in refused(main, *tiny_flags, "--run", tmp_path / "run")


# Several devices.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 12},
            r"--train\.batch-size 12 does not divide by the 8 devices .* a multiple of 8",
        ),
        ({"devices": 9}, r"--train\.devices 9: this machine has 8"),
        (
            {"batch_size": 24, "accumulate": 2},
            r"the 2 parts of --train\.accumulate; give a multiple of 16",
        ),
    ],
)
def test_a_batch_that_does_not_divide_by_the_devices_is_refused(monkeypatch, changes, message):
    monkeypatch.setattr(train_module.jax, "device_count", lambda: 8)
    with pytest.raises(InputError, match=message):
        make_mesh(LoopConfig(**{"devices": 8, "accumulate": 1} | changes))


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one(tiny_run, tiny_flags, tmp_path):
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    arguments = [
        sys.executable,
        "-m",
        "r2sm_jax.train",
        *tiny_flags,
        "--run",
        str(tmp_path / "eight"),
    ]
    done = subprocess.run(
        arguments, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    one, eight = losses(tiny_run), losses(tmp_path / "eight")
    assert one.keys() == eight.keys()
    for step in one:
        for name in one[step]:
            if name.startswith("train/") and "seconds" not in name:
                assert eight[step][name] == pytest.approx(one[step][name], abs=1e-5, rel=1e-5), (
                    step,
                    name,
                )


# What is used on this machine.


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_defaults_that_depend_on_the_machine_are_resolved(precision, monkeypatch):
    monkeypatch.setattr(run_folder, "choose_matmul_precision", lambda: precision)
    loop = resolve_auto(Config()).train
    assert loop.matmul_precision == precision
    assert (loop.devices, loop.select_on) == (1, "dev")
    assert resolve_auto(resolve_auto(Config())) == resolve_auto(Config())


@pytest.mark.slow
def test_a_run_says_what_it_used_and_keeps_it_on_another_processor(
    tiny_flags, tmp_path, monkeypatch, command
):
    """The run is started where bfloat16 is the default, and resumed where it is not."""
    run = tmp_path / "run"
    flags = [
        *tiny_flags,
        "--run",
        run,
        "--train.matmul-precision",
        "auto",
        "--train.accumulate",
        2,
        "--train.steps",
        1,
    ]
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "choose_matmul_precision", lambda: "bfloat16")
        assert command(main, *flags).code == 0
    used = {"matmul_precision": "bfloat16", "accumulate": 2, "devices": 1, "select_on": "dev"}
    config = json.loads((run / "config.json").read_text())["train"]
    assert used == {name: config[name] for name in used}
    (run / "report.json").unlink()
    end = command(main, "--resume", "--run", run)
    assert end.code == 0 and "resumed at step 1" in end.out, end.err
    meta = json.loads((run / "report.json").read_text())["meta"]
    assert used == {name: meta[name] for name in used if name != "select_on"} | {
        "select_on": meta["selected_on"]
    }


def test_compiled_programs_are_kept_where_the_user_says_or_in_the_cache_folder(
    monkeypatch, tmp_path
):
    set_to: dict[str, str] = {}
    monkeypatch.setattr(runs.jax.config, "update", set_to.__setitem__)
    runs.enable_compilation_cache()
    assert set_to == {}  # the tests have their own folder
    monkeypatch.setattr(runs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(type(runs.jax.config), "jax_compilation_cache_dir", None, raising=False)
    runs.enable_compilation_cache()
    assert (
        set_to.pop("jax_compilation_cache_dir") == str(tmp_path / "compiled") and len(set_to) == 1
    )
