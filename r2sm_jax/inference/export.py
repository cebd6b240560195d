"""Writes an export: weights, configuration, tokenizer, StableHLO and model card in one folder."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from r2sm_jax.cli import to_json
from r2sm_jax.config import FORMAT_VERSION, Config
from r2sm_jax.data.letterbox import PAD_COLOUR
from r2sm_jax.data.tokenizer import write_tokenizer
from r2sm_jax.errors import load_json
from r2sm_jax.inference import stablehlo
from r2sm_jax.inference.crop_models import MaskCompleter, MaskOutliner
from r2sm_jax.inference.load import (
    UNIT,
    Part,
    Run,
    fill,
    flat_weights,
    published_weights,
    restore_differences,
)
from r2sm_jax.inference.model_card import PART_TEXTS, model_card
from r2sm_jax.inference.model_folder import (
    CARD,
    CHECKSUMS,
    CONFIG,
    FUNCTIONS,
    LANGUAGE_MODEL,
    PREPROCESSOR,
    WEIGHTS,
    check_files,
    read_checksums,
    read_stored,
    write_checksums,
)
from r2sm_jax.inference.predictor import hash_weights
from r2sm_jax.models.hub import INDEX, TOKENIZER, TOKENIZER_FILES, read_tensors, weight_files
from r2sm_jax.models.matching import Tensor
from r2sm_jax.models.r2sm import PIXEL_MEAN, PIXEL_STD

Parts = Mapping[Part, MaskCompleter | MaskOutliner | None]
LARGEST = 127
"""Of the whole numbers that a difference is stored in."""
SMALLEST = 1e-30
"""Counts as the largest difference of a channel that did not change."""
MAX_ERROR = 1e-3
"""How far a stored weight may be from the true one, as a share of the largest weight of its array.
A difference that would be rounded more is stored as a weight in float16."""


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

    Args:
        embed_language_model: copy the language model; otherwise refer to it by name.
        compact: write the trained weights alone, in few bytes (load.py), without language model and
            StableHLO.
        completer: is put into the export, which can complete given masks then.
        outliner: is put into it, which reads boxes and clicks then.

    Raises InputError if the folder cannot be written, or the model cannot be exported.
    """
    embed = embed_language_model and not compact
    config = portable_config(run.config)
    predictor = run.predictor
    stored = read_stored(run.folder) | {
        "format_version": FORMAT_VERSION,
        "language_model": {
            "name": config.model.text.name,
            **predictor.text_encoder.identity,
            "embedded": embed,
            "folder": LANGUAGE_MODEL if embed else None,
        },
        "mask_threshold": predictor.mask_threshold,
        "calibration": predictor.calibration._asdict(),
        "compact": compact,
        "weights_sha256": predictor.weights_sha256,
        "config": to_json(config),
    }
    weights = {name: np.asarray(value) for name, value in flat_weights(predictor.weights).items()}
    if compact:
        published = published_weights("segmenter", stored)
        weights = to_differences(weights, published)
        # The hash of the weights once they are loaded: they are rounded.
        rounded = restore_differences(weights, published)
        stored["weights_sha256"] = hash_weights(fill(predictor.weights, rounded, out))

    parts: Parts = {"completer": completer, "outliner": outliner}
    with new_export(out) as folder:
        source = predictor.text_encoder.folder
        if embed:
            names = [file.name for file in weight_files(source)]
            copy_files(source, folder / LANGUAGE_MODEL, [*names, CONFIG, INDEX, *TOKENIZER_FILES])
        if not compact:
            # Once more for programs without this package.
            copy_files(source, folder, TOKENIZER_FILES)
            if (folder / TOKENIZER).exists():
                write_tokenizer(source / TOKENIZER, folder / TOKENIZER)
            stablehlo.write_functions(folder / FUNCTIONS, stablehlo.export_functions(run))
        write_json(folder / PREPROCESSOR, preprocessor_config(config))
        card = model_card(out.resolve().name, stored, config, read_report(run))
        write_model(folder, stored, weights, parts, card)


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
    check_files(source)
    tensors = read_tensors(source / WEIGHTS)
    card = (source / CARD).read_text("utf-8") if (source / CARD).is_file() else ""
    with new_export(out) as folder:
        for name in read_checksums(source):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        parts: Parts = {"completer": completer, "outliner": outliner}
        write_model(folder, read_stored(source), tensors, parts, card)


def write_model(
    folder: Path,
    stored: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    parts: Parts,
    card: str,
) -> None:
    """Writes weights, configuration and card of an export.

    Args:
        stored: its config.json.
        tensors: as they are stored, by dotted path.
        parts: are put in, in place of those that it has.
    """
    stored, tensors = dict(stored), dict(tensors)
    for name, part in parts.items():
        if part is None:
            continue
        sizes = to_json(part.config)
        stored[name] = {"config": sizes | {"efficientnet": portable_name(sizes["efficientnet"])}}
        if isinstance(part, MaskCompleter):
            stored[name]["threshold"] = part.threshold
        weights = {path: np.asarray(value) for path, value in flat_weights(part.weights).items()}
        if stored["compact"]:
            weights = to_differences(weights, published_weights(name, stored))
        prefix = f"{name}."
        tensors = {path: x for path, x in tensors.items() if not path.startswith(prefix)}
        tensors |= {prefix + path: value for path, value in weights.items()}
        if PART_TEXTS[name] not in card:
            card += PART_TEXTS[name]

    save_file(tensors, folder / WEIGHTS, {"format": "np"})
    write_json(folder / CONFIG, stored)
    (folder / CARD).write_text(card, "utf-8")


def to_differences(
    weights: Mapping[str, np.ndarray], published: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """Returns the tensors that a compact export has of some weights.

    Args:
        published: weights that a user finds by name, by the same paths.
    """
    stored = {}
    for name, value in weights.items():
        if name not in published:
            stored[name] = value.astype(np.float16)
            continue
        difference = value - np.asarray(published[name], np.float32)
        # By value: what is frozen in this run may have been trained in an earlier one.
        if not difference.any():
            continue
        # For each output channel, the last axis, the difference that one step of 8 bits means. No
        # unit may be 0, since differences are divided by it.
        largest = np.abs(difference).max(axis=tuple(range(difference.ndim - 1)))
        unit = (np.maximum(largest, SMALLEST) / LARGEST).astype(np.float32)
        if value.ndim < 2 or unit.max() / 2 > MAX_ERROR * np.abs(value).max():
            stored[name] = value.astype(np.float16)
            continue
        stored[name] = np.rint(difference / unit).astype(np.int8)
        stored[name + UNIT] = unit
    return stored


@contextmanager
def new_export(out: Path) -> Iterator[Path]:
    """Gives a folder beside `out`. When the block ends, its files go to `out` with checksums, so
    that no half of an export is left. Files of an earlier one are replaced, others stay."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        folder = Path(work)
        yield folder
        write_checksums(folder)
        # The checksums come last: a folder with an old one of them does not load.
        out.mkdir(exist_ok=True)
        for name in (FUNCTIONS, *TOKENIZER_FILES):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / LANGUAGE_MODEL, ignore_errors=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CHECKSUMS):
            os.replace(path, out / path.name)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(values, indent=1) + "\n", "utf-8")


def copy_files(source: Path, target: Path, names: list[str] | tuple[str, ...]) -> None:
    """Copies those of the files that exist."""
    target.mkdir(exist_ok=True)
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


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
    text = replace(config.model.text, name=portable_name(config.model.text.name))
    vision = config.model.vision
    vision = replace(
        vision,
        sam=vision.sam and portable_name(vision.sam),
        vit=vision.vit and portable_name(vision.vit),
        efficientnet=vision.efficientnet and portable_name(vision.efficientnet),
    )
    completer, outliner = config.model.completer, config.model.outliner
    completer = replace(completer, efficientnet=portable_name(completer.efficientnet))
    outliner = replace(outliner, efficientnet=portable_name(outliner.efficientnet))
    model = replace(config.model, text=text, vision=vision, completer=completer, outliner=outliner)
    return replace(config, run=None, init=None, resume=False, data=data, model=model)


def portable_name(model: str) -> str:
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
