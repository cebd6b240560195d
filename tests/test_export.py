import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import jax
import jax.export
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import r2sm_jax
from r2sm_jax import evaluate, predict
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError
from r2sm_jax.inference import exporter as export
from r2sm_jax.inference.exported import by_dotted_path, find_export, with_weights, write_sums
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import open_run
from r2sm_jax.inference.verify import verify
from r2sm_jax.models.r2sm import R2SM, Calibration
from r2sm_jax.models.weights import find_model

DOCS = Path(__file__).parents[1] / "docs" / "export.md"
QUERIES = ["the red mug", "the whole red mug, hidden parts included"]
COMMANDS = {"export": export.main, "predict": predict.main, "evaluate": evaluate.main}


@pytest.fixture(scope="module")
def run(tiny_run):
    return open_run(tiny_run)


@pytest.fixture(scope="module")
def workplace(tiny_run, tmp_path_factory) -> Path:
    """A folder as the documentation has it: a run, a photo."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "runs").mkdir()
    shutil.copytree(tiny_run, folder / "runs" / "mugs")
    Image.fromarray(open_source("scenes", "val", count=1, size=64)[0].image[:45]).save(
        folder / "photo.jpg"
    )
    return folder


@pytest.fixture(scope="module")
def exported(workplace) -> Path:
    """The export that the documentation's first command writes."""
    patch = pytest.MonkeyPatch()
    patch.chdir(workplace)
    patch.setattr(sys, "argv", blocks("")[0].split()[2:])
    export.main()
    patch.undo()
    return workplace / "exports" / "mugs"


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    """An export to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def blocks(language: str) -> list[str]:
    """The code blocks of the documentation."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    return [code for name, code in found if name == language]


def test_every_command_and_program_of_the_documentation_runs(
    exported, workplace, monkeypatch, command, capsys
):
    monkeypatch.chdir(workplace)
    first, *others = [line for block in blocks("") for line in block.splitlines()]
    assert first.startswith("python -m r2sm_jax.export") and len(others) == 2
    for line in others:
        words = re.findall(r'"[^"]*"|\S+', line)
        name = words[2].removeprefix("r2sm_jax.")
        end = command(COMMANDS[name], *(word.strip('"') for word in words[3:]))
        assert end.code == 0, end.err
    assert (workplace / "answer" / "mask.png").exists() and not (exported / "report.json").exists()
    programs = blocks("python")
    assert (
        len(programs) == 3 and "jax import export" in programs[2] and "r2sm_jax" not in programs[2]
    )
    capsys.readouterr()
    printed = []
    for program in programs:
        exec(compile(program, str(DOCS), "exec"), {})
        printed.append(capsys.readouterr().out)
    assert (workplace / "overlay.jpg").exists()
    # The program without our code decides like the one with it.
    decided = [line.split()[0] for line in printed[0].splitlines()]
    assert printed[2].split()[0] == decided[1]


def test_an_export_says_what_its_run_says(run, exported, workplace):
    predictor = r2sm_jax.load(exported)
    for one in (run.predictor, predictor):
        one.set_image(workplace / "photo.jpg")
    for a, b in zip(run.predictor.predict(QUERIES), predictor.predict(QUERIES), strict=True):
        assert a.amodal_probability == b.amodal_probability and np.array_equal(a.amodal, b.amodal)
        assert a.instances == () == b.instances or len(a.instances) == len(b.instances)
    assert predictor.weights_sha256 == run.predictor.weights_sha256


def test_verification_measures_and_refuses(run, exported, copy):
    said = verify(run, copy)
    found = [float(figure) for figure in re.findall(r"([\d.e-]+) in mask logits", said)]
    assert len(found) == 3 and found[0] == 0 and found[1] <= 1e-4 and "without r2sm_jax" in said
    weights, name = load_file(copy / "model.safetensors"), "decoder.image.kernel"
    save_file(weights | {name: 1.01 * weights[name]}, copy / "model.safetensors")
    write_sums(copy)
    with pytest.raises(InputError, match="safetensors, differs from the run"):
        verify(run, copy)


def stablehlo(folder: Path) -> dict[str, list[str]]:
    """The programs of an export as text, without the places in Python that they come from."""
    with zipfile.ZipFile(folder / "model.stablehlo") as file:
        functions = {
            name: jax.export.deserialize(bytearray(file.read(name))) for name in file.namelist()
        }
    modules = {name: function.mlir_module().splitlines() for name, function in functions.items()}
    return {
        name: [line.split(" loc(")[0] for line in lines if not line.startswith("#loc")]
        for name, lines in modules.items()
    }


def test_no_setting_of_jax_changes_an_export(exported, workplace, tmp_path):
    """Matrix products are float32 in the StableHLO and in the verification, whatever JAX's default precision is."""
    command = [
        sys.executable,
        "-m",
        "r2sm_jax.export",
        "runs/mugs",
        "--out",
        str(tmp_path / "mugs"),
        "--verify",
    ]
    environment = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"}
    done = subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"([\d.e-]+) in mask logits", done.stdout)[0] == "0"
    programs = stablehlo(tmp_path / "mugs")
    assert programs == stablehlo(exported) and any(
        "HIGHEST" in line for line in programs["encode_image"]
    )


def test_the_stablehlo_of_other_weights_is_noticed(run, copy, monkeypatch):
    answer = R2SM.answer

    def wrong(*inputs):
        found = answer(*inputs)
        return found._replace(amodal=found.amodal + 0.01)

    folder = run.predictor.text_encoder.folder
    tensors = load_file(folder / "model.safetensors")
    weights = by_dotted_path(run.predictor.weights)
    with monkeypatch.context() as patch:
        patch.setattr(R2SM, "answer", wrong)
        patch.setattr(export, "PLATFORMS", ("cpu",))  # lowering takes most of the time
        spoilt = export.export_functions(run.config.model, weights, Calibration(), folder, tensors)
    export.write_functions(copy / "model.stablehlo", spoilt)
    write_sums(copy)
    with pytest.raises(InputError, match=r"StableHLO without r2sm_jax, .* differs from the run"):
        verify(run, copy)


def test_the_folder_has_hugging_faces_layout(exported, run, workplace):
    names = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "README.md",
    } <= names
    assert {"model.stablehlo", "SHA256SUMS", "language_model/model.safetensors"} <= names
    assert (
        find_model(str(exported / "language_model"), "--model.text.name")
        == exported / "language_model"
    )
    checked = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=exported, capture_output=True
    )
    assert checked.returncode == 0, checked
    config = json.loads((exported / "config.json").read_text())
    assert config["format_version"] == 1 and config["architectures"] == ["R2SM"]
    weights = load_file(exported / "model.safetensors")
    assert config["calibration"] == run.predictor.calibration._asdict()
    assert (
        "decoder.blocks.0.mlp.layers.0.kernel" in weights and "decoder.positions" in weights
    )  # a constant
    text = (exported / "config.json").read_text() + (exported / "README.md").read_text()
    assert str(workplace) not in text and str(Path.home()) not in text and "/tmp" not in text
    assert not list(exported.parent.glob(".*"))  # no half-written folder is left


def test_the_card_has_the_runs_own_figures(exported, run, tiny_run):
    loaded = huggingface_hub.ModelCard.load(exported / "README.md")
    report = json.loads((tiny_run / "report.json").read_text())
    assert loaded.data.license == "apache-2.0" and loaded.data.library_name == "r2sm_jax"
    results = {(r.dataset_split, r.metric_type): r.metric_value for r in loaded.data.eval_results}
    assert results["val_hard", "giou"] == report["splits"]["val_hard"]["all"]["giou"]
    for split, digest in report["meta"]["data_sha256"].items():
        assert f"| `{split}` |" in loaded.text and digest in loaded.text
    assert run.predictor.text_encoder.sha256 in loaded.text and "procedural scenes" in loaded.text
    written = json.loads((exported / "config.json").read_text())
    without = export.model_card("mugs", written, export.portable(run.config), None)
    assert "There is no report about these weights." in without and "model-index" not in without


def test_figures_of_other_weights_do_not_go_on_the_card(run, tmp_path, tiny_run):
    report = json.loads((tiny_run / "report.json").read_text())
    other = shutil.copytree(
        tiny_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")
    )
    assert export.report_of(run) == report
    report["meta"]["weights_sha256"] = "0" * 64
    for content in (report, [], {"meta": []}, {"meta": "x"}):
        (other / "report.json").write_text(json.dumps(content))
        assert export.report_of(type(run)(other, run.config, run.step, run.predictor)) is None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.stablehlo", "config.json", "language_model/tokenizer.json"]
)
@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_file_that_is_missing_or_changed_is_named_with_its_hash(how, name, copy):
    lines = [line.split("  ") for line in (copy / "SHA256SUMS").read_text().splitlines()]
    digest = next(digest for digest, file in lines if file == name)
    if how == "missing":
        (copy / name).unlink()
    else:
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: {how}.*sha256.*{digest}"):
        r2sm_jax.load(copy)


def test_other_products_are_refused(copy):
    with pytest.raises(InputError, match='products is \'half\'; give "float32" or "bfloat16"'):
        r2sm_jax.load(copy, matmul_precision="half")


def test_the_card_may_be_edited(copy):
    (copy / "README.md").write_text("Mine.")
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert r2sm_jax.load(copy)


def change(copy: Path, **values) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))


def test_a_version_from_the_future_is_one_sentence(copy):
    change(copy, format_version=2)
    with pytest.raises(
        InputError, match="format version 2, but this r2sm_jax reads up to 1; upgrade it"
    ):
        r2sm_jax.load(copy)


def test_weights_and_sums_that_do_not_fit_are_one_sentence(copy):
    weights = load_file(copy / "model.safetensors")
    save_file(
        {name: x for name, x in weights.items() if name != "decoder.positions"},
        copy / "model.safetensors",
    )
    write_sums(copy)
    with pytest.raises(
        InputError, match=r"safetensors does not fit its config\.json: missing decoder\.positions"
    ):
        r2sm_jax.load(copy)
    (copy / "SHA256SUMS").write_text("nothing here\n")
    with pytest.raises(InputError, match="SHA256SUMS: missing or not readable"):
        r2sm_jax.load(copy)


def test_another_language_model_is_refused(copy):
    weights = load_file(copy / "language_model" / "model.safetensors")
    name = "embeddings.LayerNorm.bias"
    save_file(weights | {name: weights[name] + 1}, copy / "language_model" / "model.safetensors")
    write_sums(copy)
    with pytest.raises(InputError, match="but this export needs"):
        r2sm_jax.load(copy)


def test_an_export_with_the_language_model_by_reference_replaces_an_earlier_one(
    run, copy, monkeypatch
):
    (copy / "notes.txt").write_text("mine")
    monkeypatch.setattr(export, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    export.export(run, copy, lm="reference")
    assert (copy / "notes.txt").read_text() == "mine"
    assert not (copy / "language_model").exists() and (copy / "tokenizer.json").exists()
    sums = (copy / "SHA256SUMS").read_text()
    assert "language_model" not in sums and "model.stablehlo" in sums
    found = []
    monkeypatch.setattr(
        "r2sm_jax.data.text_states.find_model",
        lambda name, flag: found.append(name) or run.predictor.text_encoder.folder,
    )
    assert r2sm_jax.load(copy).text_encoder.sha256 == run.predictor.text_encoder.sha256
    assert found == [run.predictor.text_encoder.folder.name]


@pytest.fixture(scope="module")
def compact(run, tmp_path_factory) -> Path:
    """A compact export in the place of a whole one."""
    folder = tmp_path_factory.mktemp("compact") / "small"
    folder.mkdir()
    (folder / "model.stablehlo").write_text("of an earlier export")
    export.export(run, folder, compact=True)
    return folder


def test_a_compact_export_answers_like_the_run_in_float16(run, compact, workplace, monkeypatch):
    texts = run.predictor.text_encoder
    monkeypatch.setattr("r2sm_jax.data.text_states.find_model", lambda name, flag: texts.folder)
    weights = {
        k: np.asarray(x).astype(np.float16)
        for k, x in by_dotted_path(run.predictor.weights).items()
    }
    stored = load_file(compact / "model.safetensors")
    assert stored.keys() == weights.keys() and all(
        np.array_equal(stored[k], weights[k]) for k in weights
    )
    model = with_weights(
        run.config.model, {k: x.astype(np.float32) for k, x in weights.items()}, compact
    )
    calibration = run.predictor.calibration
    rounded = Predictor(run.config.model, *nnx.split(model), texts, calibration)
    loaded = r2sm_jax.load(compact)
    assert loaded.weights_sha256 == rounded.weights_sha256 != run.predictor.weights_sha256
    for one in (rounded, loaded):
        one.set_image(workplace / "photo.jpg")
    for a, b in zip(rounded.predict(QUERIES), loaded.predict(QUERIES), strict=True):
        assert a.amodal_probability == b.amodal_probability and np.array_equal(a.amodal, b.amodal)


def test_another_published_encoder_of_a_compact_export_is_refused(
    run, compact, tmp_path, monkeypatch
):
    folder, encoder = (
        Path(shutil.copytree(compact, tmp_path / "copy")),
        export.exported.published_weights,
    )
    monkeypatch.setattr(
        "r2sm_jax.data.text_states.find_model", lambda name, flag: run.predictor.text_encoder.folder
    )
    stored = load_file(folder / "model.safetensors")
    name, value = stored.popitem()
    save_file(stored, folder / "model.safetensors")
    write_sums(folder)
    for changed in (0, 1):
        found = {name: value.astype(np.float32) + changed}
        monkeypatch.setattr(
            export.exported,
            "published_weights",
            lambda config, found=found: encoder(config) | found,
        )
        if changed:
            with pytest.raises(
                InputError,
                match="with the published image encoder that was found, its weights have",
            ):
                r2sm_jax.load(folder)
        else:
            r2sm_jax.load(folder)


def test_a_compact_export_is_small(compact, exported):
    names = {file.name for file in compact.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "README.md",
        "SHA256SUMS",
    }
    assert "stablehlo" not in (compact / "README.md").read_text()
    assert "stablehlo" in (exported / "README.md").read_text()
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (compact, exported)]
    assert sizes[0] < 0.7 * sizes[1]


def test_a_released_model_is_found_by_its_name(run, compact, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "r2sm_jax.data.text_states.find_model", lambda name, flag: run.predictor.text_encoder.folder
    )
    monkeypatch.setattr("r2sm_jax.inference.exported.RELEASED", compact.parent)
    assert (
        find_export("small") == compact
        and r2sm_jax.load("small").config.vision == run.config.model.vision
    )
    with pytest.raises(InputError, match="no such run folder"):
        r2sm_jax.load("large")
    (tmp_path / "small").mkdir()
    assert find_export("small") == Path("small")  # a folder of one's own goes first


def test_an_export_is_found_on_the_hub_or_in_its_cache(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--somebody--mugs"
    with pytest.raises(
        InputError, match="hf:somebody/mugs: the Hugging Face hub did not give this export"
    ):
        r2sm_jax.load("hf:somebody/mugs")
    shutil.copytree(exported, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert (
        r2sm_jax.load("hf:somebody/mugs").weights_sha256 == r2sm_jax.load(exported).weights_sha256
    )


def test_of_the_hub_an_export_is_fetched_and_nothing_else(exported, tmp_path, monkeypatch):
    asked = []

    def hub(name, *, allow_patterns, **options):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    folder = Path(shutil.copytree(exported, tmp_path / "hub"))
    assert (
        find_export("hf:somebody/mugs") == folder
        and asked[0] == ["config.json"]
        and len(asked) == 2
    )
    names = [
        file.relative_to(exported).as_posix() for file in exported.rglob("*") if file.is_file()
    ]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in asked[1])] == []
    assert not any(
        fnmatch("evil.py", pattern) or fnmatch("data/all.bin", pattern) for pattern in asked[1]
    )
    asked.clear()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match="no export of r2sm_jax"):
        find_export("hf:somebody/mugs")
    assert asked == [["config.json"]]


def test_a_missing_run_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/latest", tmp_path / "a" / "b", "nowhere", "exports/mugs"):
        with pytest.raises(InputError, match="no such run folder"):
            r2sm_jax.load(name)


def test_what_cannot_be_exported_is_one_sentence(
    tiny_run, exported, tmp_path, refused, monkeypatch
):
    main = export.main
    assert "an export already" in refused(main, exported, "--out", tmp_path / "again")
    assert "--overwrite" in refused(main, tiny_run, "--out", exported)
    assert "is a folder of this machine" in refused(
        main, tiny_run, "--out", tmp_path / "new", "--lm", "reference"
    )
    assert "--compact: the language model" in refused(
        main, tiny_run, "--out", tmp_path / "new", "--compact"
    )
    said = refused(main, tiny_run, "--out", tmp_path / "new", "--compact", "--verify")
    assert (
        "--verify compares float32 weights with the StableHLO; leave it out with --compact" in said
    )
    assert "no such run folder" in refused(main, tmp_path / "nowhere", "--out", tmp_path / "new")
    (tmp_path / "file").write_text("")
    (tmp_path / "config.json").write_text("{}")
    for taken in (tiny_run, tmp_path / "file", tmp_path):
        assert "a file, a run folder, or has another model's" in refused(
            main, tiny_run, "--out", taken, "--overwrite"
        )
    monkeypatch.setattr(
        export, "save_file", Mock(side_effect=SafetensorError("No space left on device"))
    )
    assert "cannot be written (No space left on device)" in refused(
        main, tiny_run, "--out", tmp_path / "new"
    )
    assert "holds one only" in refused(evaluate.main, exported, "--checkpoint", "latest")
    assert not (tmp_path / "new").exists() and not (tmp_path / "again").exists()
