"""Exports: what is written, that it predicts as its run, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import jax
import jax.export
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file, save_file
from tiny_crops import COMPLETER, rectangle

import r2sm_jax
from r2sm_jax import evaluate, export as export_command, predict
from r2sm_jax.config import DataConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference import export as exports, load as loading, model_folder, stablehlo
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.export import add_parts, export, to_compact
from r2sm_jax.inference.load import (
    UNIT,
    load_part,
    load_run,
    restore_compact,
)
from r2sm_jax.inference.model_card import model_card
from r2sm_jax.inference.model_folder import RELEASED, find_folder, write_checksums
from r2sm_jax.inference.stablehlo import verify
from r2sm_jax.models.calibration import Calibration
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.models.hub import find_model
from r2sm_jax.models.matching import flat_weights
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.query import AMODAL
from r2sm_jax.sources import open_split

DOCS = Path(__file__).parents[1] / "docs" / "export.md"
COMMANDS = {"export": export_command.main, "predict": predict.main, "evaluate": evaluate.main}


def samples(run):
    """Scenes on which a run and its export are compared."""
    source = open_split(DataConfig(), "val", count=3, size=run.config.model.vision.image_size)
    return [source[index] for index in range(3)]


@pytest.fixture(scope="module")
def run(tiny_run):
    return load_run(tiny_run)


@pytest.fixture(scope="module")
def workplace(tiny_run, tmp_path_factory) -> Path:
    """A folder as the documentation has it: a run, a photo."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "runs").mkdir()
    shutil.copytree(tiny_run, folder / "runs" / "mugs")
    image = open_split(DataConfig(), "val", count=1, size=64)[0].image[:45]
    Image.fromarray(image).save(folder / "photo.jpg")
    return folder


@pytest.fixture(scope="module")
def exported(workplace) -> Path:
    """The export that the documentation's first command writes."""
    patch = pytest.MonkeyPatch()
    patch.chdir(workplace)
    patch.setattr(sys, "argv", code_blocks("")[0].split()[2:])
    export_command.main()
    patch.undo()
    return workplace / "exports" / "mugs"


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    """An export to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.fixture(scope="module")
def compact(run, tmp_path_factory) -> Path:
    """A compact export in the place of a whole one."""
    folder = tmp_path_factory.mktemp("compact") / "small"
    folder.mkdir()
    (folder / "model.stablehlo").write_text("of an earlier export")
    export(run, folder, compact=True)
    return folder


@pytest.fixture
def found_language_model(run, monkeypatch) -> list[str]:
    """Finds the language model of the run by whatever name; gives the names."""
    names = []

    def find(name, flag):
        names.append(name)
        return run.predictor.text_encoder.folder

    monkeypatch.setattr("r2sm_jax.language.states.find_model", find)
    return names


def code_blocks(language: str) -> list[str]:
    """The code blocks of the documentation."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    return [code for name, code in blocks if name == language]


# The documentation, the run and its export.


@pytest.mark.slow
def test_every_command_and_program_of_the_documentation_runs(
    exported, workplace, monkeypatch, command, capsys
):
    monkeypatch.chdir(workplace)
    first, *others = [line for block in code_blocks("") for line in block.splitlines()]
    assert first.startswith("python -m r2sm_jax.export") and len(others) == 2
    for line in others:
        words = re.findall(r'"[^"]*"|\S+', line)
        name = words[2].removeprefix("r2sm_jax.")
        end = command(COMMANDS[name], *(word.strip('"') for word in words[3:]))
        assert end.code == 0, end.err
    assert (workplace / "answer" / "mask.png").exists() and not (exported / "report.json").exists()

    programs = code_blocks("python")
    assert len(programs) == 3
    assert "jax import export" in programs[2] and "r2sm_jax" not in programs[2]
    capsys.readouterr()
    printed = []
    names = {}
    for program in programs:
        names = {}
        exec(compile(program, str(DOCS), "exec"), names)
        printed.append(capsys.readouterr().out)
    assert (workplace / "overlay.jpg").exists()
    # The program without our code decides like the one with it.
    decisions = [line.split()[0] for line in printed[0].splitlines()]
    assert printed[2].split()[0] == decisions[1]
    # Without padding among its tokens it finds the same mask, too.
    sentence = "the whole red mug, hidden parts included"
    predictor = r2sm_jax.load(exported)
    ((expected,),) = predictor.predict_logits([predictor.frame("photo.jpg")], [[sentence]])
    found = names["found"]["amodal"][0, 0]
    np.testing.assert_allclose(found, expected.masks[:, AMODAL], atol=1e-3)


def test_an_export_predicts_as_its_run_and_other_weights_do_not(run, copy):
    (copy / "README.md").write_text("Mine.")  # the card may be edited
    text = verify(run, copy, samples(run))
    differences = [float(value) for value in re.findall(r"([\d.e-]+) in mask logits", text)]
    assert len(differences) == 2 and differences[0] == 0 and differences[1] <= 1e-4
    name = "decoder.image.kernel"
    kernel = load_file(copy / "model.safetensors")[name]
    change(copy / "model.safetensors", name, 1.01 * kernel)
    write_checksums(copy)
    with pytest.raises(InputError, match="safetensors, differs from the run"):
        verify(run, copy, samples(run))


def test_the_stablehlo_of_other_weights_is_noticed(run, copy, monkeypatch):
    decode = R2SM.decode

    def wrong(*inputs):
        output = decode(*inputs)
        return output._replace(masks=output.masks + 0.01)

    with monkeypatch.context() as patch:
        patch.setattr(R2SM, "decode", wrong)
        patch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
        functions = stablehlo.export_functions(run)
    stablehlo.write_functions(copy / "model.stablehlo", functions)
    write_checksums(copy)
    with pytest.raises(InputError, match=r"StableHLO without r2sm_jax, differs from the run"):
        verify(run, copy, samples(run))


@pytest.mark.slow
def test_no_setting_of_jax_changes_an_export(workplace, tmp_path):
    """Matrix products are float32 in the StableHLO and in the verification, whatever JAX's default
    precision is."""
    command = [sys.executable, "-m", "r2sm_jax.export", "runs/mugs", "--verify", "--out"]
    ended = subprocess.run(
        [*command, tmp_path / "mugs"],
        cwd=workplace,
        env=os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"([\d.e-]+) in mask logits", ended.stdout)[0] == "0"
    with zipfile.ZipFile(tmp_path / "mugs" / "model.stablehlo") as file:
        for name in file.namelist():
            function = jax.export.deserialize(bytearray(file.read(name)))
            products = re.findall(
                r"stablehlo\.(?:dot_general|convolution).*", function.mlir_module()
            )
            assert products and all("HIGHEST" in line for line in products)


# The files.


def test_the_folder_has_hugging_faces_layout(exported, run, workplace):
    names = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    expected = "config.json model.safetensors tokenizer.json preprocessor_config.json README.md"
    assert {*expected.split(), "SHA256SUMS", "model.stablehlo"} <= names
    language_model = exported / "language_model"
    assert find_model(str(language_model), "--model.text.name") == language_model
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=exported).returncode == 0
    # Others may read each file as far as the umask lets them.
    for name in ("model.safetensors", "language_model/model.safetensors", "tokenizer.json"):
        assert (exported / name).stat().st_mode == (exported / "config.json").stat().st_mode
    config = json.loads((exported / "config.json").read_text())
    assert config["format_version"] == 2 and config["architectures"] == ["R2SM"]
    assert config["calibration"] == run.predictor.calibration._asdict()
    weights = load_file(exported / "model.safetensors")
    assert "decoder.blocks.0.mlp.layers.0.kernel" in weights
    assert "decoder.positions" in weights  # a constant
    # To the bit: an export merges and rounds nothing.
    for name, value in flat_weights(run.predictor.weights).items():
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], value)
    text = (exported / "config.json").read_text() + (exported / "README.md").read_text()
    assert str(workplace) not in text and str(Path.home()) not in text and "/tmp" not in text
    assert not list(exported.parent.glob(".*"))  # no half-written folder is left


def test_the_card_has_the_figures_of_these_weights_alone(exported, run, tmp_path):
    card = huggingface_hub.ModelCard.load(exported / "README.md")
    report = json.loads((run.folder / "report.json").read_text())
    results = {(r.dataset_split, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert results["val_hard", "giou"] == report["splits"]["val_hard"]["all"]["giou"]
    for split, digest in report["meta"]["data_sha256"].items():
        assert f"| `{split}` |" in card.text and digest in card.text
    assert run.predictor.text_encoder.sha256 in card.text

    report["meta"]["weights_sha256"] = "0" * 64
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert exports.read_report(replace(run, folder=tmp_path)) is None
    stored = json.loads((exported / "config.json").read_text())
    without = model_card("mugs", stored, exports.portable_config(run.config), None)
    assert "no report about these weights" in without


def test_a_language_model_by_reference_replaces_an_earlier_export(
    run, copy, monkeypatch, found_language_model
):
    (copy / "notes.txt").write_text("mine")
    monkeypatch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    export(run, copy, embed_language_model=False)
    assert (copy / "notes.txt").read_text() == "mine"
    assert not (copy / "language_model").exists() and (copy / "tokenizer.json").exists()
    checksums = (copy / "SHA256SUMS").read_text()
    assert "language_model" not in checksums and "model.stablehlo" in checksums
    text_encoder = run.predictor.text_encoder
    assert r2sm_jax.load(copy).text_encoder.sha256 == text_encoder.sha256
    assert found_language_model == [text_encoder.folder.name]


# What does not load.


def test_float64_is_named_and_not_the_encoder(exported):
    """JAX_ENABLE_X64 changes the weights of an encoder that is folded, and with them the hash."""
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(InputError, match="float64 is on"):
            r2sm_jax.load(exported)
    finally:
        jax.config.update("jax_enable_x64", False)


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change(file: Path, name: str, value: np.ndarray | None) -> None:
    """Gives a weight another value, or takes it out."""
    weights = load_file(file)
    del weights[name]
    save_file(weights if value is None else weights | {name: value}, file)


def change_a_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def take_out(folder: Path) -> None:
    change(folder / "model.safetensors", "decoder.positions", None)
    write_checksums(folder)


def change_language_model(folder: Path) -> None:
    bias = np.ones(32, np.float32)
    change(folder / "language_model/model.safetensors", "embeddings.LayerNorm.bias", bias)
    write_checksums(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "language_model/tokenizer.json").unlink(), "tokenizer.json: "),
        (change_a_byte, "model.safetensors: missing, ch"),
        (lambda folder: edit_config(folder, format_version=9), "format version 9"),
        (take_out, "does not fit its config.json: missing decoder.pos"),
        (change_language_model, "its weights have sha256"),
    ],
)
def test_what_is_missing_or_changed_is_refused(spoil, words, copy):
    spoil(copy)
    with pytest.raises(InputError, match=re.escape(words)):
        r2sm_jax.load(copy)


def test_the_fitted_mask_threshold_is_kept_and_older_exports_open_without(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    shifted = run.predictor.updated(calibration=Calibration(mask_shift=0.3))
    out = tmp_path / "shifted"
    export(replace(run, predictor=shifted), out)
    config = json.loads((out / "config.json").read_text())
    assert config["mask_threshold"] == run.config.model.mask_threshold + 0.3
    assert r2sm_jax.load(out).mask_threshold == config["mask_threshold"]
    # As the StableHLO and the file of weights compute it.
    assert "differences" in verify(replace(run, predictor=shifted), out, samples(run))

    del config["calibration"]["mask_shift"]
    edit_config(out, calibration=config["calibration"])
    write_checksums(out)
    assert r2sm_jax.load(out).mask_threshold == run.config.model.mask_threshold


# Compact exports.


def test_a_compact_export_is_the_run_in_float16(run, compact, found_language_model):
    names = {"config.json", "model.safetensors", "preprocessor_config.json"}
    names |= {"README.md", "SHA256SUMS", "trained_on.txt"}
    assert {file.name for file in compact.iterdir()} == names
    assert "stablehlo" not in (compact / "README.md").read_text()
    stored = load_file(compact / "model.safetensors")
    predictor = r2sm_jax.load(compact)
    weights, loaded = (flat_weights(one.weights) for one in (run.predictor, predictor))
    assert stored.keys() == weights.keys() == loaded.keys()
    for name, value in weights.items():
        rounded = np.asarray(value).astype(np.float16)
        assert stored[name].dtype == np.float16
        np.testing.assert_array_equal(stored[name], rounded)
        np.testing.assert_array_equal(loaded[name], rounded)
    assert predictor.calibration == run.predictor.calibration


@pytest.mark.parametrize("change", [0, 1])
def test_another_published_encoder_of_a_compact_export_is_refused(
    change, compact, tmp_path, monkeypatch, found_language_model
):
    folder = Path(shutil.copytree(compact, tmp_path / "copy"))
    weights = load_file(folder / "model.safetensors")
    name, value = weights.popitem()
    save_file(weights, folder / "model.safetensors")
    write_checksums(folder)
    published = {name: value.astype(np.float32) + change}
    monkeypatch.setattr(loading, "published_weights", lambda *_: published)
    if change:
        with pytest.raises(InputError, match="published image encoder"):
            r2sm_jax.load(folder)
    else:
        r2sm_jax.load(folder)


# Finding exports.


def test_a_released_model_is_found_by_its_name(
    run, compact, tmp_path, monkeypatch, found_language_model
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_folder, "RELEASED", compact.parent)
    assert find_folder("small") == compact
    assert r2sm_jax.load("small").config.vision == run.config.model.vision
    with pytest.raises(InputError, match=r"no such run folder.*small"):
        r2sm_jax.load("large")
    (tmp_path / "small").mkdir()
    assert find_folder("small") == Path("small")  # a folder of one's own goes first


def test_of_the_hub_an_export_is_fetched_and_nothing_else(exported, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(exported, tmp_path / "hub"))
    requested = []

    def hub(name, *, allow_patterns, **options):
        requested.append(allow_patterns)
        if name == "somebody/else":
            raise OSError("no route")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert find_folder("hf:somebody/mugs") == folder
    assert len(requested) == 2 and requested[0] == ["config.json"]
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    for name in (*files, "evil.py", "data/all.bin"):
        is_fetched = any(fnmatch(name, pattern) for pattern in requested[1])
        assert is_fetched == (name in files), name

    with pytest.raises(InputError, match=r"hf:somebody/else: .*no route"):
        find_folder("hf:somebody/else")
    requested.clear()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="neither a run folder nor an export"):
        find_folder("hf:somebody/mugs")
    assert requested == [["config.json"]]


# Refusals of the command.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["EXPORT", "--out", "CARD"], "holds README.md already"),
        (["RUN", "--out", "EXPORT"], "--overwrite"),
        (["RUN", "--out", "RUN", "--overwrite"], "run folder"),
        (["RUN", "--out", "OTHER", "--overwrite"], "another model"),
        (["RUN", "--out", "OTHER/file", "--overwrite"], "give another --out"),
        (["RUN", "--out", "NEW", "--lm", "reference"], "--lm reference"),
        (["RUN", "--out", "NEW", "--compact"], "--compact"),
        (["RUN", "--out", "NEW", "--compact", "--verify"], "--verify"),
        (["OTHER/nowhere", "--out", "NEW"], "no such run folder"),
        (["EXPORT", "--completer", "RUN", "--out", "NEW"], "has no completer"),
    ],
)
def test_refusals(arguments, word, tiny_run, exported, tmp_path, refused):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    (other / "config.json").write_text("{}")
    card = tmp_path / "card"
    card.mkdir()
    (card / "README.md").write_text("Somebody's notes.")
    paths = {"EXPORT": exported, "RUN": tiny_run, "NEW": tmp_path / "new", "OTHER": other}
    paths["CARD"] = card
    for name, path in paths.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    assert word in refused(export_command.main, *arguments)
    assert not (tmp_path / "new").exists()
    assert (card / "README.md").read_text() == "Somebody's notes."


# Parts


@pytest.fixture(scope="module")
def completer() -> MaskCompleter:
    weights = nnx.state(make_completer(COMPLETER, rngs=nnx.Rngs(0)))
    return MaskCompleter(COMPLETER, weights, threshold=-2.0)


def completed(completer: MaskCompleter) -> np.ndarray:
    image = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
    (completion,) = completer.complete(image, [rectangle(40, 50, 10, 10, 30, 25)])
    return completion.mask


def test_a_part_is_put_into_a_released_export_in_place_of_its_own(completer, tmp_path):
    source = RELEASED / "photos-small"
    calibration = {"alone": Calibration(kept_below=0.25)}
    completer = completer.updated(calibration=calibration)
    add_parts(source, tmp_path / "new", {"completer": completer})
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "new"))
    for name in before.keys() | after.keys():
        if not name.startswith("completer."):
            np.testing.assert_array_equal(after[name], before[name])
    stored = json.loads((tmp_path / "new" / "config.json").read_text())
    assert stored.pop("completer")["threshold"] == -2
    released = json.loads((source / "config.json").read_text())
    del released["completer"]
    assert stored == released
    opened = load_part(tmp_path / "new", "completer")
    assert opened.config == completer.config and opened.threshold == -2
    assert opened.calibration == calibration
    assert completed(opened).sum() == pytest.approx(completed(completer).sum(), rel=0.05)


@pytest.mark.slow
def test_a_run_is_exported_with_a_part(run, completer, tmp_path, monkeypatch):
    monkeypatch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    export(run, tmp_path / "new", parts={"completer": completer})
    exported = r2sm_jax.load(tmp_path / "new")
    assert exported.weights_sha256 == run.predictor.weights_sha256
    np.testing.assert_array_equal(completed(exported.parts.completer), completed(completer))
    assert "## Completer" in (tmp_path / "new" / "README.md").read_text()
    # The StableHLO is that of the segmenter, and runs beside the completer's weights.
    assert "StableHLO" in verify(run, tmp_path / "new", samples(run))


# Float16, nothing, or differences in 8 bits


def test_what_is_published_is_left_out_and_all_else_has_float16():
    kernel = np.random.default_rng(0).normal(size=(3, 3, 4, 8)).astype(np.float32)
    weights = {"frozen": kernel, "trained": kernel + 0.01, "own": kernel + 1}
    published = {"frozen": kernel, "trained": kernel}
    stored = to_compact(weights, published)
    assert stored.keys() == {"trained", "own"}
    restored = restore_compact(stored, published)
    for name, value in weights.items():
        np.testing.assert_array_equal(restored[name], stored.get(name, value).astype(np.float32))


def test_differences_of_earlier_exports_are_added_to_published_weights():
    units = np.array([0.5, 0.25], np.float32)
    stored = {"kernel": np.array([[-4, 127], [1, 0]], np.int8), "kernel" + UNIT: units}
    restored = restore_compact(stored, {"kernel": np.ones((2, 2), np.float16)})
    np.testing.assert_array_equal(restored["kernel"], [[-1, 32.75], [1.5, 1]])
