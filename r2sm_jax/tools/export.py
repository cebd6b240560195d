"""`python -m r2sm_jax.export RUN --out DIR`: a run as a folder that other programs, servers and the hub can use.

The folder is described in exports/folder.py and docs/export.md.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from safetensors.numpy import save

import r2sm_jax
from r2sm_jax.config import Config
from r2sm_jax.data.images import PAD_COLOUR
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.exported import (
    CARD,
    CONFIG,
    FORMAT_VERSION,
    FUNCTIONS,
    LANGUAGE_MODEL,
    MODEL_TYPE,
    SUMS,
    WEIGHTS,
    is_export,
    write_sums,
)
from r2sm_jax.flags import parse_flags, to_json
from r2sm_jax.models.lora import merge_lora
from r2sm_jax.models.r2sm import PIXEL_MEAN, PIXEL_STD
from r2sm_jax.models.weights import INDEX, TOKENIZER_FILES, read_tensors, weight_files
from r2sm_jax.predictor import Predictor
from r2sm_jax.runs import Run, open_run
from r2sm_jax.tools.card import model_card
from r2sm_jax.tools.functions import abstract_model, export_functions, named, write_functions
from r2sm_jax.tools.verify import verify


@dataclass(frozen=True)
class ExportConfig:
    """Writes a run as a folder in Hugging Face's layout: safetensors, tokenizer, model card, StableHLO."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest."""
    out: str
    """Folder to write. Its name is the model's name on the card."""
    lm: Literal["embed", "reference"] = "embed"
    """embed: the frozen language model is copied into the folder; reference: its name and hash are, and it is fetched
    at the first use."""
    checkpoint: str = "best"
    """best (dev gIoU), latest, or a step."""
    overwrite: bool = False
    """Replace an earlier export in the folder; its model card too."""
    verify: bool = False
    """Check that the run, the export and the StableHLO without our code say the same."""


def export(run: Run, out: Path, *, lm: str = "embed") -> None:
    """Writes an export of a run that was opened. Files of an earlier export are replaced at the end, others stay.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            _write(run, Path(work), out.resolve().name, lm)
            _replace(Path(work), out)
    except OSError as error:
        raise InputError(f"{out}: the export cannot be written ({error.strerror}); pass another --out") from None


def _write(run: Run, folder: Path, title: str, lm: str) -> None:
    report, run = report_of(run), without_adapters(run)
    texts, weights, config = run.predictor.texts, named(run.predictor.weights), portable(run.config)
    written = {
        "architectures": ["R2SM"],
        "model_type": MODEL_TYPE,
        "format_version": FORMAT_VERSION,
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
    (folder / WEIGHTS).write_bytes(save({name: np.asarray(value) for name, value in weights.items()}, {"format": "np"}))
    _copy(texts.folder, folder, TOKENIZER_FILES)
    if lm == "embed":
        (folder / LANGUAGE_MODEL).mkdir()
        files = [file.name for file in weight_files(texts.folder)]
        _copy(texts.folder, folder / LANGUAGE_MODEL, (CONFIG, INDEX, *files, *TOKENIZER_FILES))
    functions = export_functions(run.config.model, weights, texts.folder, read_tensors(texts.folder))
    write_functions(folder / FUNCTIONS, functions)
    (folder / CARD).write_text(model_card(title, written, config, report))
    write_sums(folder)


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those files that there are."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def without_adapters(run: Run) -> Run:
    """The same run with LoRA merged into the weights; the one that came in where it has none."""
    graphdef, _ = abstract_model(run.config.model)
    model, graphdef, weights = merge_lora(run.config.model, graphdef, run.predictor.weights)
    if model == run.config.model:
        return run
    predictor = Predictor(model, graphdef, weights, run.predictor.texts)
    return replace(run, config=replace(run.config, model=model), predictor=predictor)


def portable(config: Config) -> Config:
    """A run's configuration without the folders of the machine that it was trained on."""
    kind, colon, where = config.data.source.partition(":")
    data = replace(config.data, source=kind + colon + Path(where).name, images=None, backgrounds=None)
    text, vision = config.model.text, config.model.vision
    init, name = (None if source is None else _name(source) for source in (vision.init, vision.name))
    vision = replace(vision, init=init, name=name)
    model = replace(config.model, text=replace(text, name=_name(text.name)), vision=vision)
    return replace(config, run=None, init=None, resume=False, data=data, model=model)


def _name(model: str) -> str:
    """A published model's name, or the last part of a folder of this machine."""
    return Path(model).name if Path(model).expanduser().is_dir() else model


def preprocessing(config: Config) -> dict[str, Any]:
    """From an image to the frame that `encode_image` takes, in the words of Hugging Face's image processors."""
    size = config.model.vision.image_size
    return {
        "image_processor_type": "R2SMLetterbox",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": size},
        "resample": 2,
        "do_pad": True,
        "pad_size": {"height": size, "width": size},
        "pad_color": list(PAD_COLOUR),
        "pad_side": "right and bottom",
        "do_rescale": False,
        "do_normalize": False,
        "image_mean": PIXEL_MEAN.tolist(),
        "image_std": PIXEL_STD.tolist(),
        "comment": "resample 2 is Pillow's antialiased BILINEAR; encode_image takes uint8 and normalises by itself, "
        "in units of 0..255",
        "max_tokens": config.model.text.max_tokens,
    }


def report_of(run: Run) -> dict[str, Any] | None:
    """The run's own report, if it is about these weights."""
    try:
        report = json.loads((run.folder / "report.json").read_text())
        return report if report["meta"].get("weights_sha256") == run.predictor.weights_sha256 else None
    except (OSError, ValueError, KeyError):
        return None


def _replace(new: Path, out: Path) -> None:
    """Moves the files of an export into `out`; what an earlier one had more than them goes."""
    out.mkdir(exist_ok=True)
    if (out / SUMS).exists():
        (out / SUMS).unlink()  # from now on the folder is not whole, until the new sums come last
    for name in TOKENIZER_FILES:
        (out / name).unlink(missing_ok=True)
    if (out / LANGUAGE_MODEL).exists():
        shutil.rmtree(out / LANGUAGE_MODEL)
    files = sorted(p.relative_to(new) for p in new.rglob("*") if p.is_file())
    for name in sorted(files, key=lambda name: name == Path(SUMS)):
        (out / name).parent.mkdir(exist_ok=True)
        os.replace(new / name, out / name)


def check_out(out: Path, overwrite: bool) -> None:
    """Refuses a folder that holds something else, before any work is done.

    Raises:
        InputError: it is a file, a run, or an export that is not to be overwritten.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: this is a file; give a folder as --out")
    if (out / "checkpoints").exists():
        raise InputError(f"{out}: this is a run folder; give another --out")
    if (out / CONFIG).exists() and not is_export(out):
        raise InputError(f"{out}: it holds another model's {CONFIG}; give another --out")
    if (out / CONFIG).exists() and not overwrite:
        raise InputError(f"{out}: it holds an export already; give another --out or --overwrite")


def main() -> None:
    """Command line."""
    args = parse_flags(ExportConfig, sys.argv[1:], prog="python -m r2sm_jax.export")
    out = Path(args.out)
    check_out(out, args.overwrite)
    run = open_run(Path(args.run), checkpoint=args.checkpoint)
    if run.exported:
        raise InputError(f"{args.run}: this is an export already; copy the folder, or give the run that it came from")
    name = run.config.model.text.name
    if args.lm == "reference" and Path(name).expanduser().is_dir():
        raise InputError(f"--lm reference: the language model {name} is a folder of this machine; use --lm embed")
    export(run, out, lm=args.lm)
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    print(f"wrote {out}: step {run.step}, {size / 1e6:.1f} MB")
    if args.verify:
        print(verify(run, out))


if __name__ == "__main__":
    exit_cleanly(main)
