"""Run folders: which are one, what cannot be written, that nothing is written over, and that a run
goes on and answers with what it was trained with, or not at all."""

import json
import os
import re
import resource
import shutil
import signal
import sys
from collections import namedtuple
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import write_bert

from r2sm_jax.config import Config
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.data.tokenizer import check_language_model
from r2sm_jax.errors import InputError
from r2sm_jax.inference.run import load
from r2sm_jax.train import main
from r2sm_jax.training import checkpoints as checkpoints_module, run_folder
from r2sm_jax.training.checkpoints import Checkpoints
from r2sm_jax.training.logs import Logs
from r2sm_jax.training.run_folder import (
    LATEST,
    check_unchanged,
    make_folder,
    new_run,
    read_config,
)
from r2sm_jax.training.step import TrainState


def test_runs_of_one_second_have_a_folder_each(tmp_path, monkeypatch):
    times = iter([datetime(2026, 1, 2, 3, 4, 5)] * 2 + [datetime(2026, 1, 2, 3, 4, 6)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "datetime", SimpleNamespace(now=lambda: next(times)))
    names = [make_folder(None).name for _ in range(2)]
    assert names == ["20260102-030405", "20260102-030406"]


def test_an_existing_run_is_not_overwritten(tiny_run, tiny_flags, refused):
    before = sorted(tiny_run.rglob("*"))
    assert "holds a run already" in refused(main, *tiny_flags, "--run", tiny_run)
    assert sorted(tiny_run.rglob("*")) == before


@pytest.fixture
def small_files():
    """Lets no file grow beyond 64 KiB after it is called, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def damage(folder: Path) -> None:
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(bytes(largest.stat().st_size))


def test_a_damaged_checkpoint_is_written_again_and_never_taken_for_another(tmp_path, capsys):
    """Step 4 is damaged: a run goes on from step 2 and saves step 4 anew. Who asks for step 4 gets
    it or a sentence."""
    checkpoints, constants = Checkpoints(tmp_path), nnx.State({})

    def state(step: int, value: float) -> TrainState:
        return TrainState(nnx.State({"w": jnp.full(2000, value)}), (), jnp.array(step))

    for step in (2, 4):
        checkpoints.save(state(step, step), constants, None)
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "4")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(
        InputError, match=r"checkpoint 4 is damaged .*; give another one, .* are 2, 4"
    ):
        checkpoints.restore(state(0, 0), constants, step=4, only=True)
    restored = checkpoints.restore(state(0, 0), constants)
    assert int(restored.state.step) == 2
    assert "checkpoint 4 is" in capsys.readouterr().err
    checkpoints.save(state(4, 5), constants, None)
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore(state(0, 0), constants, step=4, only=True)
    assert restored.state.params["w"][0] == 5


def test_each_file_of_a_checkpoint_cut_short(tmp_path, capsys):
    """Another checkpoint is taken, or the file makes no difference, or one sentence names it."""
    constants = nnx.State({})
    checkpoints = Checkpoints(tmp_path)
    state = TrainState(nnx.State({"w": jnp.arange(2000.0)}), (), jnp.array(1))
    for step in (1, 2):
        state = state._replace(step=jnp.array(step))
        checkpoints.save(state, constants, step / 10)
    checkpoints.close()
    for path in sorted((tmp_path / "checkpoints" / "2").rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        if path.name == "metrics":
            with pytest.raises(InputError, match=r"metrics: the score .* remove the file"):
                Checkpoints(tmp_path)
        else:
            restored = Checkpoints(tmp_path).restore(state, constants)
            is_damaged = "checkpoint 2 is damaged" in capsys.readouterr().err
            assert int(restored.state.step) == (1 if is_damaged else 2)
            np.testing.assert_array_equal(restored.state.params["w"], state.params["w"])
        path.write_bytes(content)


def test_threads_of_a_failed_save_print_nothing(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    checkpoints_module._silence_late_callbacks()
    hook = sys.unraisablehook
    checkpoints_module._silence_late_callbacks()
    assert sys.unraisablehook is hook
    for message in ("Event loop is closed", "something else"):
        hook(SimpleNamespace(exc_value=RuntimeError(message)))
    assert [str(one.exc_value) for one in printed] == ["something else"]


def test_a_full_disk_while_saving_is_one_sentence_and_spares_earlier_checkpoints(
    tmp_path, small_files
):
    checkpoints, constants = Checkpoints(tmp_path), nnx.State({})
    noise = np.random.default_rng(0).normal(size=100_000)  # which cannot be compressed
    first, second = (
        TrainState(nnx.State({"w": jnp.asarray(noise)}), (), jnp.array(step)) for step in (1, 2)
    )
    checkpoints.save(first, constants, None)
    small_files()
    with pytest.raises(InputError, match=r"could not be saved .*free disk space"):
        checkpoints.save(second, constants, None)
    restored = Checkpoints(tmp_path).restore(second, constants)
    assert int(restored.state.step) == 1


def test_a_disk_without_room_for_a_checkpoint_ends_the_run_before_it_writes(tmp_path, monkeypatch):
    checkpoints, constants = Checkpoints(tmp_path), nnx.State({})
    first, second = (
        TrainState(nnx.State({"w": jnp.ones(2000)}), (), jnp.array(step)) for step in (1, 2)
    )
    checkpoints.save(first, constants, None)
    assert checkpoints.steps == [1]  # `save` returns when all is on disk

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9000, 2000, 7000))
    with pytest.raises(InputError, match=r"disk has .* left.*free disk space.*up to step 1 are"):
        checkpoints.save(second, constants, None)
    checkpoints.close()

    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    restored = Checkpoints(tmp_path).restore(second, constants, step=1, only=True)
    assert int(restored.state.step) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_while_logging_is_one_sentence(tiny_config, tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    logs = Logs(tmp_path, tiny_config, start=0)
    values = {"loss": jnp.array(1.0), "gradient_norm": jnp.array(1.0)}
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be written.*free disk space"):
        logs.add(1, values, wait=True)


def test_a_run_folder_below_a_file_is_one_sentence(tiny_flags, tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(main, *tiny_flags, "--run", tmp_path / "file" / "run")


def test_folders_that_are_no_run_are_told_apart(tiny_run, tmp_path):
    with pytest.raises(InputError, match="no such run folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json is missing"):
        load(tmp_path)
    shutil.copy(tiny_run / "config.json", tmp_path)
    with pytest.raises(InputError, match="no checkpoint yet"):
        load(tmp_path)
    with pytest.raises(InputError, match="best, latest or one of the steps"):
        load(tiny_run, checkpoint="17")
    (tmp_path / "config.json").write_text('{"run": ')
    with pytest.raises(InputError, match="not a readable configuration"):
        load(tmp_path)


# A start that fails.


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def interrupt(config: Config, save: str = "") -> Path:
    """Begins a run, writes as it does, perhaps saves something, and interrupts it with SIGTERM."""
    with pytest.raises(KeyboardInterrupt), new_run(config) as folder:
        (folder / "metrics.jsonl").write_text("{}")
        (folder / "checkpoints" / "1.tmp").mkdir(parents=True)
        if save:
            (folder / save).mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return folder


def test_a_start_that_fails_leaves_nothing(tiny_flags, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--model.text.dim 48" in refused(main, *tiny_flags, "--model.text.dim", 48)
    assert files(tmp_path) == set()


def test_an_interrupted_run_stays_only_if_it_has_saved_weights(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    interrupt(replace(tiny_config, run="a/b"))
    interrupt(replace(tiny_config, run=None))
    assert files(tmp_path) == set()

    # What was in the folder before is not the run's.
    mine = tmp_path / "mine" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("")
    interrupt(replace(tiny_config, run="mine"))
    assert files(tmp_path) == {"mine", "mine/notes.txt"}

    for save in ("checkpoints/2", "not_finite/checkpoints/3", "completer.json"):
        folder = interrupt(replace(tiny_config, run=f"run of {save[:9]}"), save)
        assert (folder / save).exists() and read_config(folder).run == str(folder)


def test_a_folder_that_another_process_trains_in_is_left_alone(tiny_config, tmp_path):
    config = replace(tiny_config, run=str(tmp_path / "run"))
    with new_run(config):
        before = files(tmp_path)
        with pytest.raises(InputError, match="another process"), new_run(config):
            pass
        assert files(tmp_path) == before


@pytest.mark.usefixtures("steps_alone")
def test_runs_latest_points_at_the_newest_with_a_checkpoint(
    tiny_config, tmp_path, monkeypatch, command, tiny_flags
):
    monkeypatch.chdir(tmp_path)
    flags = [*tiny_flags, "--train.checkpoint-every", 2, "--train.evaluate-every", 100]
    assert command(main, *flags, "--train.steps", 2, "--run", "elsewhere").code == 0
    assert not LATEST.is_symlink()

    def exit_code(step: int) -> int:
        def add(self, number, values, **options):
            if number == step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Logs, "add", add)
            return command(main, *flags).code

    assert exit_code(3) == 130
    (first,) = [path for path in Path("runs").iterdir() if not path.is_symlink()]
    assert LATEST.resolve() == first.resolve() and (first / "checkpoints" / "2").is_dir()
    assert exit_code(2) == 130
    assert set(Path("runs").iterdir()) == {first, LATEST} and LATEST.resolve() == first.resolve()


def test_more_steps_are_answered_with_init(tiny_run, refused):
    sentence = refused(main, "--resume", "--run", tiny_run, "--train.steps", 9)
    assert "train.steps (4 in the run, 9 now)" in sentence and f"--init {tiny_run}" in sentence


# What a run was trained with.


@pytest.fixture
def changed(tiny_run, tmp_path):
    """A copy of the tiny run after a change of its configuration, as if what that names had been
    replaced."""

    def change(group: str, **fields) -> Path:
        run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
        config = json.loads((run / "config.json").read_text())
        (config["model"]["text"] if group == "text" else config[group]).update(fields)
        (run / "config.json").write_text(json.dumps(config))
        return run

    return change


def test_replaced_weights_of_the_language_model_are_refused(changed, tmp_path, refused):
    run = changed("text", name=str(write_bert(tmp_path / "other", seed=1)))
    sentence = f"other: its weights have sha256 .*, but the run {run} needs .*; get the"
    with pytest.raises(InputError, match=sentence):
        load(run)
    assert re.search(sentence, refused(main, "--resume", "--run", run))
    (run / "inputs.json").unlink()  # a run of an earlier version
    assert load(run).step


def test_a_replaced_tokenizer_is_refused_but_not_the_same_in_another_file(
    changed, bert_folder, tmp_path
):
    folder = Path(shutil.copytree(bert_folder, tmp_path / "other"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    run = changed("text", name=str(folder))
    assert load(run).step
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="its tokenizer has sha256"):
        load(run)


def test_a_revision_of_the_hub_is_stored_and_asked_for(tiny_run, bert_folder, tmp_path):
    folder = Path(shutil.copytree(bert_folder, tmp_path / "models--a--b" / "snapshots" / "12ab"))
    texts = TextStates(str(folder), layers=(1, 2), max_tokens=24)
    stored = json.loads((tiny_run / "inputs.json").read_text())["language_model"] | {
        "revision": "12ab"
    }
    assert texts.identity | {"name": stored["name"]} == stored
    with pytest.raises(InputError, match="get the a/b that it was trained with, revision 12ab"):
        check_language_model(
            texts.folder, texts.identity, stored | {"name": "a/b", "sha256": "0" * 64}, "this run"
        )


def test_other_training_data_are_refused(changed, refused):
    run = changed("data", seed=1)
    message = refused(main, "--resume", "--run", run)
    assert (
        f"scenes: not the training data that the run {run} began with" in message
        and "--init" in message
    )


def test_a_resumed_run_may_find_its_data_elsewhere(tiny_config, tmp_path):
    data = tiny_config.data
    moved = replace(tiny_config, data=replace(data, source="json:new.json", images="elsewhere"))
    check_unchanged(tmp_path, tiny_config, moved)
    with pytest.raises(InputError, match=r"data\.seed"):
        other = replace(tiny_config, data=replace(data, seed=data.seed + 1))
        check_unchanged(tmp_path, tiny_config, other)
