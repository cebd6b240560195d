"""Writes an export: weights, configuration, tokenizer, StableHLO and model card in one folder."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

import r2sm_jax
from r2sm_jax.cli import to_json
from r2sm_jax.config import Config
from r2sm_jax.data.images import leads_outside
from r2sm_jax.data.letterbox import PAD_COLOUR
from r2sm_jax.data.tokenizer import write_tokenizer
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.inference import stablehlo
from r2sm_jax.inference.crop_models import (
    MaskCompleter,
    MaskOutliner,
    stored_completer,
    stored_outliner,
)
from r2sm_jax.inference.export_folder import (
    CARD,
    CHECKSUMS,
    CONFIG,
    FORMAT_VERSION,
    FUNCTIONS,
    LANGUAGE_MODEL,
    MODEL_TYPE,
    PREPROCESSOR,
    WEIGHTS,
    check_export,
    read_checksums,
    read_export_config,
    write_checksums,
)
from r2sm_jax.inference.export_weights import flat_weights, model_with_weights, published_weights
from r2sm_jax.inference.model_card import PART_TEXTS, model_card
from r2sm_jax.inference.parts import join_tensors, published_backbone, split_tensors
from r2sm_jax.inference.predictor import hash_weights
from r2sm_jax.inference.run import Run
from r2sm_jax.inference.small_weights import from_stored, to_stored
from r2sm_jax.models.hub import INDEX, TOKENIZER, TOKENIZER_FILES, read_tensors, weight_files
from r2sm_jax.models.r2sm import PIXEL_MEAN, PIXEL_STD


def export(
    run: Run,
    out: Path,
    *,
    embed_language_model: bool = True,
    compact: bool = False,
    completer: MaskCompleter | None = None,
    outliner: MaskOutliner | None = None,
) -> None:
    """Writes an export of a run.

    Files of an earlier export in `out` are replaced, other files stay.

    Args:
        embed_language_model: copy the language model; otherwise refer to it by name.
        compact: write the trained weights alone, in few bytes (small_weights.py), without language
            model and StableHLO.
        completer: is put into the export, which can complete given masks then.
        outliner: is put into it, which reads boxes and clicks then.

    Raises InputError if the folder cannot be written, or the model cannot be exported.
    """
    embed_language_model = embed_language_model and not compact
    with _new_export(out) as folder:
        weights_sha256 = _write_weights(run, folder, compact)
        stored = _write_config(run, folder, weights_sha256, embed_language_model, compact)
        _copy_language_model(run, folder, embed_language_model, compact)
        if not compact:
            stablehlo.write_functions(folder / FUNCTIONS, stablehlo.export_functions(run))
        card = model_card(out.resolve().name, stored, portable_config(run.config), read_report(run))
        (folder / CARD).write_text(card, "utf-8")
        _put_in(folder, completer, outliner)


def add_parts(
    source: Path,
    out: Path,
    *,
    completer: MaskCompleter | None = None,
    outliner: MaskOutliner | None = None,
) -> None:
    """Writes a copy of an export that holds these parts, in place of those that it has.

    Raises InputError if the export is damaged, or the folder cannot be written.
    """
    check_export(source)
    with _new_export(out) as folder:
        for name in (CARD, *read_checksums(source)):
            if (source / name).is_file() and not leads_outside(name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        _put_in(folder, completer, outliner)


def _put_in(folder: Path, completer: MaskCompleter | None, outliner: MaskOutliner | None) -> None:
    """Writes the given parts into the files of an export."""
    parts = {}
    if completer is not None:
        parts["completer"] = (stored_completer(completer), completer.weights)
    if outliner is not None:
        parts["outliner"] = (stored_outliner(outliner), outliner.weights)
    if not parts:
        return

    stored = read_export_config(folder)
    stored["format_version"] = FORMAT_VERSION
    tensors = split_tensors(read_tensors(folder / WEIGHTS))
    card = folder / CARD
    text = card.read_text("utf-8") if card.is_file() else ""
    for name, (stored_part, weights) in parts.items():
        stored[name] = _portable_part(stored_part)
        values = {path: np.asarray(value) for path, value in flat_weights(weights).items()}
        if stored["compact"]:
            values = to_stored(values, published_backbone(stored[name]))
        tensors[name] = values
        if PART_TEXTS[name] not in text:
            text += PART_TEXTS[name]
    _write_json(folder / CONFIG, stored)
    save_file(join_tensors(tensors), folder / WEIGHTS, {"format": "np"})
    card.write_text(text, "utf-8")


@contextmanager
def _new_export(out: Path) -> Iterator[Path]:
    """Gives a folder beside `out`. When the block ends, its files go to `out` with checksums, so
    that no half of an export is left. Raises InputError if they cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            folder = Path(work)
            yield folder
            write_checksums(folder)
            _move(folder, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{out}: the export cannot be written ({reason}); pass another --out"
        ) from None


def _write_weights(run: Run, folder: Path, compact: bool) -> str:
    """Writes `model.safetensors`; returns the hash that the weights have once they are loaded."""
    predictor = run.predictor
    weights = {name: np.asarray(value) for name, value in flat_weights(predictor.weights).items()}
    weights_sha256 = predictor.weights_sha256
    if compact:
        published = published_weights(run.config.model)
        weights = to_stored(weights, published)
        model = model_with_weights(run.config.model, from_stored(weights, published), run.folder)
        weights_sha256 = hash_weights(nnx.state(model))
    save_file(weights, folder / WEIGHTS, {"format": "np"})
    return weights_sha256


def _write_config(
    run: Run, folder: Path, weights_sha256: str, embed_language_model: bool, compact: bool
) -> dict[str, Any]:
    """Writes `config.json`, which it returns, and `preprocessor_config.json`."""
    config = portable_config(run.config)
    language_model = {
        "name": config.model.text.name,
        **run.predictor.text_encoder.identity,
        "embedded": embed_language_model,
        "folder": LANGUAGE_MODEL if embed_language_model else None,
    }
    stored = {
        "architectures": ["R2SM"],
        "model_type": MODEL_TYPE,
        "format_version": FORMAT_VERSION,
        "r2sm_jax_version": r2sm_jax.__version__,
        "language_model": language_model,
        "mask_threshold": run.predictor.mask_threshold,
        "calibration": run.predictor.calibration._asdict(),
        "compact": compact,
        "step": run.step,
        "weights_sha256": weights_sha256,
        "config": to_json(config),
    }
    _write_json(folder / CONFIG, stored)
    _write_json(folder / PREPROCESSOR, preprocessor_config(config))
    return stored


def _copy_language_model(run: Run, folder: Path, embed: bool, compact: bool) -> None:
    """Copies the language model, and its tokenizer once more for programs without this package."""
    source = run.predictor.text_encoder.folder
    if embed:
        weights = [file.name for file in weight_files(source)]
        _copy(source, folder / LANGUAGE_MODEL, [*weights, CONFIG, INDEX, *TOKENIZER_FILES])
    if not compact:
        _copy(source, folder, TOKENIZER_FILES)
        if (folder / TOKENIZER).exists():
            write_tokenizer(source / TOKENIZER, folder / TOKENIZER)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", "utf-8")


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those of the files that exist."""
    target.mkdir(exist_ok=True)
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _move(new: Path, out: Path) -> None:
    """Moves the files of a new export to `out` and removes those of an earlier one."""
    out.mkdir(exist_ok=True)
    # The checksums go first and come last: a folder without them does not load.
    for name in (CHECKSUMS, FUNCTIONS, *TOKENIZER_FILES):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / LANGUAGE_MODEL, ignore_errors=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name == CHECKSUMS):
        os.replace(path, out / path.name)


def read_report(run: Run) -> dict[str, Any] | None:
    """Returns the run's own `report.json`, or None where there is none about these weights."""
    path = run.folder / "report.json"
    if not path.exists():
        return None
    report = load_json(path, "the report of the run")
    is_same = report["meta"].get("weights_sha256") == run.predictor.weights_sha256
    return report if is_same else None


def portable_config(config: Config) -> Config:
    """Returns a run's configuration with names in place of local folders."""
    kind, colon, path = config.data.source.partition(":")
    source = kind + colon + Path(path).name
    data = replace(config.data, source=source, images=None, backgrounds=None, cutouts=None)
    text = replace(config.model.text, name=_model_name(config.model.text.name))
    vision = config.model.vision
    vision = replace(
        vision,
        sam=vision.sam and _model_name(vision.sam),
        vit=vision.vit and _model_name(vision.vit),
        efficientnet=vision.efficientnet and _model_name(vision.efficientnet),
    )
    completer, outliner = config.model.completer, config.model.outliner
    completer = replace(completer, efficientnet=_model_name(completer.efficientnet))
    outliner = replace(outliner, efficientnet=_model_name(outliner.efficientnet))
    model = replace(config.model, text=text, vision=vision, completer=completer, outliner=outliner)
    return replace(config, run=None, init=None, resume=False, data=data, model=model)


def _portable_part(stored_part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object of a part with the name of its backbone in place of a local file."""
    sizes = stored_part["config"]
    name = _model_name(sizes["efficientnet"])
    return {**stored_part, "config": sizes | {"efficientnet": name}}


def _model_name(model: str) -> str:
    """Returns the name of a published model, or of the local folder or file that holds one; "" for
    none."""
    return Path(model).name if Path(model).expanduser().exists() else model


def preprocessor_config(config: Config) -> dict[str, Any]:
    """Returns how an image becomes the model's input, in the terms of Hugging Face's processors."""
    size = config.model.vision.image_size
    return {
        "image_processor_type": "R2SMLetterbox",
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 2,  # Pillow's BILINEAR, which is antialiased
        "size": {"longest_edge": size},
        "do_pad": True,
        "pad_side": "right and bottom",
        "pad_size": {"height": size, "width": size},
        "pad_color": list(PAD_COLOUR),
        # encode_image takes uint8 and normalises by itself, in units of 0..255.
        "do_rescale": False,
        "do_normalize": False,
        "image_mean": PIXEL_MEAN.tolist(),
        "image_std": PIXEL_STD.tolist(),
        "max_tokens": config.model.text.max_tokens,
    }
