"""`python -m r2sm_jax.export RUN --out DIR`: writes a run as a folder for other programs, servers and the hub.

r2sm_jax/exported.py lists the files of the folder, docs/export.md describes them.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from safetensors.numpy import save

import r2sm_jax
from r2sm_jax import exported
from r2sm_jax.config import Config
from r2sm_jax.data.images import PAD_COLOUR
from r2sm_jax.errors import InputError
from r2sm_jax.exported import CONFIG, LANGUAGE_MODEL, SUMS
from r2sm_jax.flags import parse_flags, to_json
from r2sm_jax.models.lora import merge_lora
from r2sm_jax.models.r2sm import PIXEL_MEAN, PIXEL_STD
from r2sm_jax.models.weights import INDEX, TOKENIZER_FILES, read_tensors, weight_files
from r2sm_jax.predictor import Predictor
from r2sm_jax.runs import Run, open_run
from r2sm_jax.tools.card import model_card
from r2sm_jax.tools.export_functions import export_functions, write_functions
from r2sm_jax.tools.verify import verify


@dataclass(frozen=True)
class ExportConfig:
    """Writes a run as a folder in Hugging Face's layout: safetensors, tokenizer, model card, StableHLO."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest."""
    out: str
    """Folder to write. Its name is the model's name on the card."""
    lm: Literal["embed", "reference"] = "embed"
    """embed: copy the frozen language model into the folder; reference: write its name and checksum, and download it
    at the first use."""
    checkpoint: str = "best"
    """best (dev gIoU), latest, or a step."""
    overwrite: bool = False
    """Replace an earlier export in the folder, with its model card."""
    verify: bool = False
    """Check that the run, the export, and the StableHLO without this package give the same answers."""


def main() -> None:
    """Command line."""
    args = parse_flags(ExportConfig, sys.argv[1:], prog="python -m r2sm_jax.export")
    out = Path(args.out)
    _check_out(out, args.overwrite)
    run = open_run(Path(args.run), checkpoint=args.checkpoint)
    if run.exported:
        raise InputError(f"{args.run}: this is an export already; copy the folder, or give the run that it came from")
    name = run.config.model.text.name
    if args.lm == "reference" and Path(name).expanduser().is_dir():
        raise InputError(f"--lm reference: the language model {name} is a folder of this machine; use --lm embed")
    export(run, out, lm=args.lm)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"wrote {out}: step {run.step}, {size / 1e6:.1f} MB")
    if args.verify:
        print(verify(run, out))


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuses, before any work is done, a folder that holds something else. Raises InputError."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: this is a file; give a folder as --out")
    if (out / "checkpoints").exists():
        raise InputError(f"{out}: this is a run folder; give another --out")
    if (out / CONFIG).exists() and not exported.is_export(out):
        raise InputError(f"{out}: it holds another model's {CONFIG}; give another --out")
    if (out / CONFIG).exists() and not overwrite:
        raise InputError(f"{out}: it holds an export already; give another --out or --overwrite")


def export(run: Run, out: Path, *, lm: str = "embed") -> None:
    """Writes an export of an opened run. Files of an earlier export in `out` are replaced, other files stay.

    Raises:
        InputError: the folder cannot be written, or the model cannot be exported.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            _write(run, Path(work), out.resolve().name, lm)
            _move(Path(work), out)
    except OSError as error:
        raise InputError(f"{out}: the export cannot be written ({error.strerror}); pass another --out") from None


def _write(run: Run, folder: Path, title: str, lm: str) -> None:
    report, run = report_of(run), _without_adapters(run)
    texts, config = run.predictor.texts, portable(run.config)
    weights = {name: variable[...] for name, variable in exported.by_dotted_path(run.predictor.weights).items()}
    written = {
        "architectures": ["R2SM"],
        "model_type": exported.MODEL_TYPE,
        "format_version": exported.FORMAT_VERSION,
        "r2sm_jax_version": r2sm_jax.__version__,
        "language_model": {
            "name": config.model.text.name, "sha256": texts.sha256, "embedded": lm == "embed",
            "folder": LANGUAGE_MODEL if lm == "embed" else None,
        },
        "mask_threshold": run.config.model.mask_threshold,
        "type_temperature": float(weights["type_temperature"]),
        "step": run.step,
        "weights_sha256": run.predictor.weights_sha256,
        "config": to_json(config),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(written, indent=1) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing(run.config), indent=1) + "\n")
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    (folder / exported.WEIGHTS).write_bytes(save(arrays, {"format": "np"}))
    _copy(texts.folder, folder, TOKENIZER_FILES)
    if lm == "embed":
        (folder / LANGUAGE_MODEL).mkdir()
        weight_names = [file.name for file in weight_files(texts.folder)]
        _copy(texts.folder, folder / LANGUAGE_MODEL, (CONFIG, INDEX, *weight_names, *TOKENIZER_FILES))
    functions = export_functions(run.config.model, weights, texts.folder, read_tensors(texts.folder))
    write_functions(folder / exported.FUNCTIONS, functions)
    (folder / exported.CARD).write_text(model_card(title, written, config, report))
    exported.write_sums(folder)


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those of the files that exist."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _move(new: Path, out: Path) -> None:
    """Moves the files of a new export to `out` and removes those of an earlier one."""
    out.mkdir(exist_ok=True)
    # The checksums go first and come last: a folder without them does not load.
    for name in (SUMS, *TOKENIZER_FILES):
        (out / name).unlink(missing_ok=True)
    if (out / LANGUAGE_MODEL).exists():
        shutil.rmtree(out / LANGUAGE_MODEL)
    for path in sorted(new.iterdir(), key=lambda path: path.name == SUMS):
        os.replace(path, out / path.name)


def report_of(run: Run) -> dict[str, Any] | None:
    """The run's own `report.json`, if it is about these weights."""
    try:
        report = json.loads((run.folder / "report.json").read_text())
        return report if report["meta"].get("weights_sha256") == run.predictor.weights_sha256 else None
    except (OSError, ValueError, KeyError):
        return None


def _without_adapters(run: Run) -> Run:
    """The run with its LoRA adapters merged into the weights."""
    graphdef, _ = exported.abstract_model(run.config.model)
    model, graphdef, weights = merge_lora(run.config.model, graphdef, run.predictor.weights)
    if model == run.config.model:
        return run
    predictor = Predictor(model, graphdef, weights, run.predictor.texts)
    return replace(run, config=replace(run.config, model=model), predictor=predictor)


def portable(config: Config) -> Config:
    """A run's configuration with names in place of local folders."""
    kind, colon, where = config.data.source.partition(":")
    data = replace(config.data, source=kind + colon + Path(where).name, images=None, backgrounds=None)
    text, vision = config.model.text, config.model.vision
    vision = replace(vision, init=vision.init and _name(vision.init), name=vision.name and _name(vision.name))
    model = replace(config.model, text=replace(text, name=_name(text.name)), vision=vision)
    return replace(config, run=None, init=None, resume=False, data=data, model=model)


def _name(model: str) -> str:
    """The name of a published model, or of the local folder that holds one."""
    return Path(model).name if Path(model).expanduser().is_dir() else model


def preprocessing(config: Config) -> dict[str, Any]:
    """How an image becomes the frame that `encode_image` takes, in the terms of Hugging Face's image processors."""
    size = config.model.vision.image_size
    fixed = json.loads((files("r2sm_jax.tools") / "preprocessor_config.json").read_text())
    return fixed | {
        "size": {"longest_edge": size},
        "pad_size": {"height": size, "width": size},
        "pad_color": list(PAD_COLOUR),
        "image_mean": PIXEL_MEAN.tolist(),
        "image_std": PIXEL_STD.tolist(),
        "max_tokens": config.model.text.max_tokens,
    }
