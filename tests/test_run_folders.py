"""Run folders: which are one, what cannot be written, and that nothing is written over."""

import os
import resource
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_train import at_step

from r2sm_jax.errors import InputError
from r2sm_jax.inference.run import load
from r2sm_jax.train import main
from r2sm_jax.training import checkpoints as checkpoints_module, run_folder
from r2sm_jax.training.checkpoints import Checkpoints
from r2sm_jax.training.run_folder import LATEST, make_folder, read_config, write_config
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


def test_a_full_disk_while_saving_is_one_sentence_and_spares_earlier_checkpoints(
    tiny_run, tiny_flags, tmp_path, refused, monkeypatch, small_files
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        # The save of step 2 is done when that of step 3 begins.
        at_step(patch, 3, lambda: (Checkpoints(run), small_files()))
        message = refused(main, *tiny_flags, "--run", run, "--train.evaluate-every", 100)
    assert "a checkpoint could not be saved" in message and "free disk space" in message
    assert Checkpoints(run).steps[-1] <= 2
    assert load(run, checkpoint="latest").step == Checkpoints(run).steps[-1] >= 1


def damage(folder: Path) -> None:
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(bytes(largest.stat().st_size))


def iterator(position: int) -> grain.DatasetIterator:
    batches = iter(grain.MapDataset.range(9).to_iter_dataset())
    batches.set_state(batches.get_state() | {"next_index": position})
    return batches


def test_a_damaged_checkpoint_is_written_again_and_never_taken_for_another(tmp_path, capsys):
    """Step 4 is damaged: a run goes on from step 2 and saves step 4 anew. Who asks for step 4 gets
    it or a sentence."""
    checkpoints, constants = Checkpoints(tmp_path), nnx.State({})

    def state(step: int, value: float) -> TrainState:
        return TrainState(nnx.State({"w": jnp.full(2000, value)}), (), jnp.array(step))

    for step in (2, 4):
        checkpoints.save(state(step, step), constants, iterator(step), None)
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "4")
    checkpoints, batches = Checkpoints(tmp_path), iterator(0)
    with pytest.raises(
        InputError, match=r"checkpoint 4 is damaged .*; give another one, .* are 2, 4"
    ):
        checkpoints.restore(state(0, 0), constants, step=4, only=True)
    restored = checkpoints.restore(state(0, 0), constants)
    batches.set_state(restored.position)
    assert int(restored.state.step) == 2 == batches.get_state()["next_index"]
    assert "checkpoint 4 is" in capsys.readouterr().err
    checkpoints.save(state(4, 5), constants, iterator(7), None)
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore(state(0, 0), constants, step=4, only=True)
    batches.set_state(restored.position)
    assert restored.state.params["w"][0] == 5 and batches.get_state()["next_index"] == 7


def test_each_file_of_a_checkpoint_cut_short(tmp_path, capsys):
    """Another checkpoint is taken, or the file makes no difference, or one sentence names it."""
    constants = nnx.State({})
    checkpoints = Checkpoints(tmp_path)
    state = TrainState(nnx.State({"w": jnp.arange(2000.0)}), (), jnp.array(1))
    for step in (1, 2):
        state = state._replace(step=jnp.array(step))
        checkpoints.save(state, constants, iterator(step), step / 10)
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


def test_a_disk_without_room_for_a_checkpoint_ends_the_run_before_it_writes(tmp_path, monkeypatch):
    checkpoints, constants = Checkpoints(tmp_path), nnx.State({})
    first, second = (
        TrainState(nnx.State({"w": jnp.ones(2000)}), (), jnp.array(step)) for step in (1, 2)
    )
    checkpoints.save(first, constants, iterator(1), None)
    assert checkpoints.steps == [1]  # `save` returns when all is on disk

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9000, 2000, 7000))
    with pytest.raises(InputError, match=r"disk has .* left.*free disk space.*up to step 1 are"):
        checkpoints.save(second, constants, iterator(2), None)
    checkpoints.close()

    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    restored = Checkpoints(tmp_path).restore(second, constants, step=1, only=True)
    assert int(restored.state.step) == 1


def test_a_full_disk_while_logging_is_one_sentence(tiny_flags, tmp_path, refused):
    if not Path("/dev/full").exists():
        pytest.skip(
            "there is no /dev/full here"
        )  # Linux only; nothing else makes a write fail on demand
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    message = refused(main, *tiny_flags, "--run", tmp_path / "run")
    assert "metrics.jsonl: cannot be written" in message and "free disk space" in message


def test_a_folder_without_write_permission_is_one_sentence(tiny_flags, tmp_path, refused):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")  # permissions do not bind root, as in containers
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "cannot write" in refused(main, *tiny_flags, "--run", tmp_path / "closed" / "run")


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


def test_runs_latest_points_at_the_newest(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(make_folder("elsewhere"), replace(tiny_config, run="elsewhere"))
    assert not LATEST.exists()
    config = replace(tiny_config, run=None)
    first = make_folder(None)
    write_config(first, config)
    assert LATEST.resolve() == first.resolve() and read_config(LATEST) == config
