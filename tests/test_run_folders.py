"""Run folders: which are one, what cannot be written, and that nothing is written over."""

import os
import resource
import shutil
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train import at_step

from r2sm_jax import runs
from r2sm_jax.errors import InputError
from r2sm_jax.runs import open_run, read_config
from r2sm_jax.train import main
from r2sm_jax.training.checkpoints import Checkpoints


def test_runs_of_one_second_have_a_folder_each(tiny_config, tmp_path, monkeypatch):
    times = iter([datetime(2026, 1, 2, 3, 4, 5)] * 2 + [datetime(2026, 1, 2, 3, 4, 6)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "datetime", SimpleNamespace(now=lambda: next(times)))
    with ExitStack() as locks:
        made = [runs.start_folder(replace(tiny_config, run=None), locks).name for _ in range(2)]
    assert made == ["20260102-030405", "20260102-030406"] and runs.LATEST.resolve().name == made[1]


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
    assert open_run(run, checkpoint="latest").step == Checkpoints(run).steps[-1] >= 1


def test_a_full_disk_while_logging_is_one_sentence(tiny_flags, tmp_path, refused):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")  # Linux only; nothing else makes a write fail on demand
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
        open_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json is missing"):
        open_run(tmp_path)
    shutil.copy(tiny_run / "config.json", tmp_path)
    with pytest.raises(InputError, match="no checkpoint yet"):
        open_run(tmp_path)
    with pytest.raises(InputError, match="best, latest or one of the steps"):
        open_run(tiny_run, checkpoint="17")
    (tmp_path / "config.json").write_text('{"run": ')
    with pytest.raises(InputError, match="not a readable configuration"):
        open_run(tmp_path)


def test_runs_latest_points_at_the_newest(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ExitStack() as locks:
        assert runs.start_folder(replace(tiny_config, run="elsewhere"), locks) == Path("elsewhere")
        assert not runs.LATEST.exists()
        first = runs.start_folder(replace(tiny_config, run=None), locks)
    assert runs.LATEST.resolve() == first.resolve() and read_config(runs.LATEST) == replace(tiny_config, run=None)
