"""The command `train`: what it says at its end, which splits it opens, several devices."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
from listed_source import ListedSource
from PIL import Image
from run_files import logged, with_flags
from sample_records import to_records
from test_loop import COMPLETER, OUTLINER

from r2sm_jax import predict, sources, train as train_module
from r2sm_jax.config import Config, default_config, flat_fields, is_read
from r2sm_jax.data.dataset import Instance, Sample, write_records
from r2sm_jax.errors import InputError
from r2sm_jax.inference import load as loading
from r2sm_jax.query import Query
from r2sm_jax.train import main


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


@pytest.mark.parametrize("fault", ["a split that cannot be read", "a split without queries"])
def test_reported_splits_are_opened_before_training_starts(
    fault, tiny_flags, tmp_path, refused, monkeypatch
):
    open_split = sources.open_split

    def open_but_for_val_hard(data, split, **options):
        if split != "val_hard":
            return open_split(data, split, **options)
        if fault == "a split without queries":
            return ListedSource([])
        raise InputError("val_hard.json: damaged")

    monkeypatch.setattr(sources, "open_split", open_but_for_val_hard)
    monkeypatch.setattr(train_module, "make_task", lambda *_, **__: pytest.fail("makes a model"))
    assert "val_hard" in refused(main, *tiny_flags, "--run", tmp_path / "run")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "not in"),
        ("empty", "cannot be read"),
        ("cut", "cannot be read"),
        ("another photo", "9 pixels high and 8 wide"),
        ("a damaged mask", r"annotation \d+: its segmentation cannot be read"),
    ],
)
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_every_image_and_mask_is_looked_at_before_training_starts(
    fault, words, suffix, tiny_flags, tmp_path, refused, monkeypatch
):
    mask = np.zeros((6, 8), bool)
    mask[2:4, 2:5] = True
    samples = []
    for number in range(1, 31):
        image = np.random.default_rng(number).integers(0, 255, (6, 8, 3), np.uint8)
        name = f"{number}.{suffix}"
        Image.fromarray(image).save(tmp_path / name)
        instance = Instance(number, "cow", mask, mask)
        query = Query(number, "a cow", "modal", (number,))
        samples.append(Sample(number, name, image, (instance,), (query,)))
    path = tmp_path / "data.json"
    records = to_records(samples)
    for number in (17, 29):
        photo = tmp_path / f"{number}.{suffix}"
        if fault == "missing":
            photo.unlink()
        elif fault == "empty":
            photo.write_bytes(b"")
        elif fault == "cut":
            photo.write_bytes(photo.read_bytes()[:-40])
        elif fault == "another photo":
            Image.new("RGB", (8, 9)).save(photo)
        else:
            records["annotations"][number - 1]["segmentation"]["counts"] += "0"
    write_records(path, records)

    monkeypatch.setattr(train_module, "make_task", lambda *_, **__: pytest.fail("makes a model"))
    flags = with_flags(tiny_flags, "--data.source", path)
    error = refused(main, *flags, "--run", tmp_path / "run")
    assert re.search(words, error), error
    assert re.search(r"\b(17|29)\b", error)


@pytest.mark.parametrize(
    ("part", "words"),
    [("completer", "no hidden object whose complete shape is known"), ("outliner", "64 or more")],
)
def test_a_crop_model_needs_objects_to_be_judged_by(part, words, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(train_module, "open_selecting", lambda config: ListedSource([]))
    flags = ["--train.part", part, "--data.scenes", 8, "--run", tmp_path / "run"]
    assert words in refused(main, *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("steps_alone")
@pytest.mark.parametrize("part", ["segmenter", "completer", "outliner"])
def test_a_training_reads_what_is_not_refused(part, tiny_flags, tmp_path, command, monkeypatch):
    """Whatever copies, stores or checks a whole configuration does not count. What builds a model
    reads its fields."""
    read = set()

    def record(group: type, prefix: str) -> None:
        def get(self, name):
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.startswith("r2sm_jax") and module not in ("r2sm_jax.config", "r2sm_jax.cli"):
                read.add(prefix + name)
            return object.__getattribute__(self, name)

        monkeypatch.setattr(group, "__getattribute__", get)
        for field in fields(group):
            if is_dataclass(field.default_factory):
                record(field.default_factory, f"{prefix}{field.name}.")

    flags = {"segmenter": tiny_flags, "completer": COMPLETER, "outliner": OUTLINER}[part]
    # A seed of its own: a step that is compiled already reads nothing.
    flags = with_flags(flags, "--train.steps", 2, "--train.seed", 7)
    with monkeypatch.context() as monkeypatch:
        record(Config, "")
        assert command(main, *flags, "--run", tmp_path / "run").code == 0
    names = {name for name, _ in flat_fields(default_config(part)) if is_read(name, part)}
    unread = {name for name in names - read if not name.startswith("model.")}
    # Several processes read it.
    assert unread == {"distributed.local_devices"}
    assert "model.vision.image_size" in read


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one(tiny_flags, tmp_path, command):
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    run = str(tmp_path / "eight")
    arguments = [sys.executable, "-m", "r2sm_jax.train", *tiny_flags, "--run", run]
    done = subprocess.run(
        arguments, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # In eight parts, so that float32 sums have the order of the devices (test_processes.py).
    flags_of_one = [*tiny_flags, "--run", tmp_path / "one", "--train.accumulate", 8]
    assert command(main, *flags_of_one).code == 0
    one, eight = logged(tmp_path / "one"), logged(tmp_path / "eight")
    assert one.keys() == eight.keys()
    for step in one:
        for name, value in one[step].items():
            if name.startswith("train/") and "seconds" not in name:
                assert eight[step][name] == pytest.approx(value, abs=1e-5, rel=1e-5), (step, name)


def test_compiled_programs_are_kept_where_the_user_says_or_in_the_cache_folder(
    monkeypatch, tmp_path
):
    set_to: dict[str, str] = {}
    config = loading.jax.config
    monkeypatch.setattr(config, "update", set_to.__setitem__)
    loading.enable_compilation_cache()
    assert set_to == {}  # the tests have their own folder
    monkeypatch.setattr(loading, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(type(config), "jax_compilation_cache_dir", None, raising=False)
    loading.enable_compilation_cache()
    folder = set_to.pop("jax_compilation_cache_dir")
    assert folder == str(tmp_path / "compiled") and len(set_to) == 1
