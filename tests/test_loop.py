"""The loop, for every task: resuming to the bit, signals, starting from other weights, logs."""

import json
import os
import signal

import numpy as np
import pytest
from flax import nnx
from run_files import arrays, logged, steps, with_flags
from safetensors.numpy import load_file, save_file
from tiny_efficientnet import DIMS, tiny_tensors

from r2sm_jax import train
from r2sm_jax.inference.load import load_part
from r2sm_jax.models.keys import read_efficientnet
from r2sm_jax.training import run_folder
from r2sm_jax.training.run_folder import Logs

CROPS = """
    --train.steps 4 --train.batch-size 2 --train.log-every 1 --train.checkpoint-every 1
    --train.evaluate-every 2 --train.evaluate-samples 8 --data.scenes 8 --data.source scenes
    --model.vision.image-size 64
""".split()
SIZES = "--model.{0}.size 32 --model.{0}.dims 8 16 --model.{0}.depth 1 --model.{0}.heads 2"
COMPLETER = [*CROPS, "--train.part", "completer", *SIZES.format("completer").split()]
OUTLINER = [*CROPS, "--train.part", "outliner", *SIZES.format("outliner").split()]
OUTLINER += ["--model.outliner.efficientnet", "", *"--model.outliner.block-dims 8 16 8".split()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of completer and outliner that never stopped, by their part."""
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    for part, flags in (("completer", COMPLETER), ("outliner", OUTLINER)):
        patch.setattr("sys.argv", ["train", *flags, "--run", str(folder / part)])
        train.main()
    patch.undo()
    return {part: folder / part for part in ("completer", "outliner")}


def at_step(monkeypatch, step: int, action) -> None:
    """Does something when a step's losses are logged."""
    add = Logs.add

    def patched(self, number, values, **options):
        if number == step:
            action()
        return add(self, number, values, **options)

    monkeypatch.setattr(Logs, "add", patched)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "part",
    [
        "segmenter",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("completer", "outliner")),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    part, runs, tiny_run, tiny_flags, tmp_path, command, monkeypatch
):
    flags = {"segmenter": tiny_flags, "completer": COMPLETER, "outliner": OUTLINER}[part]
    whole = runs.get(part, tiny_run)
    run = tmp_path / "killed"
    with monkeypatch.context() as patch:
        at_step(patch, 3, interrupt)
        assert command(train.main, *flags, "--run", run).code == 130
    assert steps(run) == [1, 2]
    end = command(train.main, "--resume", "--run", run)  # which keeps the run's configuration
    assert end.code == 0 and "resumed at step 2" in end.out, end
    assert (part == "segmenter") == (run / "report.json").exists()

    expected, actual = arrays(whole, 4), arrays(run, 4)
    assert actual.keys() == expected.keys() and len(actual) > 50
    different = [name for name in actual if actual[name].tobytes() != expected[name].tobytes()]
    assert different == []
    names = ("model.safetensors", "config.json")
    weights, config = ((path / names[0]).read_bytes() for path in (whole, run))
    assert weights == config
    one, other = (json.loads((path / names[1]).read_text()) for path in (whole, run))
    assert one.get("calibration") == other.get("calibration") and one["step"] == other["step"]
    assert [line["train/loss"] for line in logged(run).values()] == [
        line["train/loss"] for line in logged(whole).values()
    ]


@pytest.mark.usefixtures("steps_alone")
def test_a_signal_saves_and_ends_and_what_was_learned_can_be_used(
    tiny_flags, tmp_path, command, monkeypatch
):
    run = tmp_path / "run"
    rare = ("--train.checkpoint-every", 100, "--train.evaluate-every", 100)
    flags = with_flags(tiny_flags, *rare)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        end = command(train.main, *flags, "--run", run)
    assert end.code == 0 and "SIGTERM" in end.out and f"--resume --run {run}" in end.out
    assert steps(run) == [2] and (run / "model.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_crop_model_is_scored_beside_rules_and_stored(runs):
    last = logged(runs["completer"], "dev/alone/hidden/amodal_iou")[4]
    assert last["dev/visible mask/hidden/occluded_iou"] == 0
    assert last["dev/hull/hidden/amodal_iou"] > last["dev/visible mask/hidden/amodal_iou"]
    stored = json.loads((runs["completer"] / "config.json").read_text())
    completer = load_part(runs["completer"], "completer")
    assert completer.config.size == 32
    assert completer.threshold == stored["completer"]["threshold"]
    assert logged(runs["outliner"], "dev/click/iou")
    assert load_part(runs["outliner"], "outliner").config.size == 32


@pytest.mark.slow
@pytest.mark.parametrize(("part", "flags"), [("completer", COMPLETER), ("outliner", OUTLINER)])
def test_a_crop_model_starts_from_the_weights_of_another(part, flags, runs, tmp_path, command):
    flags = [*flags, "--init", runs[part], "--optimizer.learning-rate", "0"]
    end = command(train.main, *flags, "--run", tmp_path / "run")
    assert end.code == 0, end.err
    before, after = (load_file(run / "model.safetensors") for run in (runs[part], tmp_path / "run"))
    assert before.keys() == after.keys() and all(name.startswith(part) for name in after)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6)


def test_weights_that_training_makes_worse_stay(
    tiny_run, tiny_flags, tmp_path, command, monkeypatch
):
    def score(weights, step, folder):
        return -step, {"giou": -step}, {}

    monkeypatch.setattr(train, "segmenter_evaluation", lambda *_, **__: score)
    flags = [*tiny_flags, "--train.select-on", "val", "--init", tiny_run, "--run", tmp_path]
    end = command(train.main, *flags)
    assert end.code == 0, end.err
    assert f"no step was better on val than {tiny_run}" in end.out
    before, after = (load_file(run / "model.safetensors") for run in (tiny_run, tmp_path))
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    # Figures have the name of the split that selects.
    assert 0 in logged(tmp_path, "val/giou") and not logged(tmp_path, "dev/giou")


def test_a_segmenter_starts_from_a_run_and_from_an_export_alike(tiny_run, tiny_config):
    from r2sm_jax.inference.load import load_run, load_weights

    weights = load_weights(tiny_run, tiny_config.model)
    expected = nnx.to_flat_state(load_run(tiny_run).predictor.weights)
    for (path, value), (other, stored) in zip(nnx.to_flat_state(weights), expected, strict=True):
        assert path == other and np.array_equal(value[...], stored[...])


@pytest.mark.slow
def test_an_outliner_reads_the_features_of_a_published_backbone(tmp_path, command, refused):
    published = tmp_path / "tiny.safetensors"
    save_file(tiny_tensors(), published)
    flags = with_flags(OUTLINER, "--model.outliner.efficientnet", published, "--train.steps", 2)
    message = refused(train.main, *flags, "--run", tmp_path / "other")
    assert "does not fit its config.json" in message
    assert not (tmp_path / "other").exists()
    fitting = with_flags(flags, "--model.outliner.block-dims", *DIMS[:4])
    end = command(train.main, *fitting, "--run", tmp_path / "run")
    assert end.code == 0, end.err
    tensors = load_file(tmp_path / "run/model.safetensors")
    expected = read_efficientnet(published)["_blocks.3._project_conv.weight"][..., 0, 0]
    kernel = tensors["outliner.efficientnet.blocks.3.project.kernel"]
    np.testing.assert_array_equal(kernel, expected.T)


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
@pytest.mark.usefixtures("steps_alone")
def test_what_is_not_finite_ends_the_run_with_its_step_and_is_not_stored(
    name, tiny_flags, tmp_path, refused, monkeypatch
):
    add = Logs.add

    def broken(self, step, values, *, wait):
        add(self, step, values | {name: values[name] * (np.nan if step == 3 else 1)}, wait=wait)

    run = tmp_path / "run"
    flags = ("--train.log-every", 100, "--train.checkpoint-every", 1, "--train.evaluate-every", 1)
    flags = with_flags(tiny_flags, *flags)
    with monkeypatch.context() as patch:
        patch.setattr(Logs, "add", broken)
        message = refused(train.main, *flags, "--run", run)
    assert f"step 3: the {name.partition('_')[0]} is not finite" in message
    assert steps(run) == [1, 2]
    assert json.loads((run / "config.json").read_text())["step"] == 2
    assert f"--init {run}" in message


def test_the_speed_leaves_out_what_is_no_training(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(run_folder.time, "monotonic", lambda: now)
    loop = train.Config().train
    logs = Logs(tmp_path, run_folder.replace(loop, log_every=1, steps=9), start=0)
    now = 10.0
    losses = {"loss": np.array(1.0), "gradient_norm": np.array(1.0)}
    logs.add(1, losses, wait=True)  # compiles for 10 s
    now = 100.0
    logs.restart_clock(1)  # an evaluation and a checkpoint lie between
    now = 104.0
    logs.add(2, losses, wait=True)
    logs.close()
    assert logged(tmp_path)[2]["train/seconds_per_step"] == 4
