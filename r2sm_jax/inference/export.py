"""Writes an export: weights, configuration, tokenizer, StableHLO and model card in one folder; and
puts it on the Hugging Face hub."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
from safetensors.numpy import save

from r2sm_jax.cli import from_json, to_json
from r2sm_jax.config import FORMAT_VERSION, Config
from r2sm_jax.data.letterbox import PAD_COLOUR
from r2sm_jax.errors import InputError, load_json, write_json
from r2sm_jax.inference import stablehlo
from r2sm_jax.inference.crop_models import CropModel, part_json
from r2sm_jax.inference.load import (
    SEGMENTER,
    Run,
    Tensors,
    fill_shapes,
    published_weights,
    restore_compact,
)
from r2sm_jax.inference.model_card import PART_TEXTS, model_card
from r2sm_jax.inference.model_folder import (
    CARD,
    CHECKSUMS,
    EXPORT_FILES,
    FUNCTIONS,
    LANGUAGE_MODEL,
    PREPROCESSOR,
    TRAINED_ON,
    read_checksums,
    read_stored,
    verify_files,
    write_checksums,
    write_trained_on,
)
from r2sm_jax.inference.predictor import hash_weights
from r2sm_jax.language.tokenizer import write_tokenizer
from r2sm_jax.models.hub import (
    CONFIG,
    DOWNLOAD_ERRORS,
    HUB,
    HUB_NAME,
    INDEX,
    TOKENIZER,
    TOKENIZER_FILES,
    WEIGHTS,
    in_short,
    read_tensors,
    weight_files,
)
from r2sm_jax.models.matching import Tensor, flat_weights
from r2sm_jax.models.r2sm import PIXEL_MEAN, PIXEL_STD


def export(
    run: Run,
    out: Path,
    *,
    embed_language_model: bool = True,
    compact: bool = False,
    parts: Mapping[str, CropModel] | None = None,
    part_folders: Sequence[Path] = (),
) -> None:
    """Writes an export of a run.

    Args:
        embed_language_model: copy the language model; otherwise refer to it by name.
        compact: write the trained weights alone, in few bytes (load.py), without language model and
            StableHLO.
        parts: completer and outliner that are put into it.
        part_folders: the runs or exports that these are of.

    Raises InputError if the model cannot be exported.
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
        },
        "mask_threshold": predictor.mask_threshold,
        "calibration": predictor.calibration._asdict(),
        "compact": compact,
        "weights_sha256": predictor.weights_sha256,
        "config": to_json(config),
    }
    weights = jax.device_get(flat_weights(predictor.weights))
    if compact:
        published = published_weights(SEGMENTER, stored)
        weights = to_compact(weights, published)
        # The hash of the weights once they are loaded: they are rounded.
        rounded = restore_compact(weights, published)
        stored["weights_sha256"] = hash_weights(fill_shapes(predictor.weights, rounded, out))

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
        write_trained_on(folder, (), [run.folder, *part_folders])
        card = model_card(out.resolve().name, stored, config, read_report(run))
        write_files(folder, stored, weights, parts or {}, card)


def add_parts(
    source: Path, out: Path, parts: Mapping[str, CropModel], part_folders: Sequence[Path] = ()
) -> None:
    """Writes a copy of an export that holds these parts, of these folders, in place of those that
    it has.

    Raises InputError if the export is damaged.
    """
    verify_files(source)
    card = source / CARD
    with new_export(out) as folder:
        copy_files(source, folder, read_checksums(source))
        write_trained_on(folder, (), [source, *part_folders])
        write_files(
            folder,
            read_stored(source),
            read_tensors(source / WEIGHTS),
            parts,
            card.read_text("utf-8") if card.exists() else "",
        )


def write_files(
    folder: Path,
    stored: Mapping[str, Any],
    tensors: Tensors,
    parts: Mapping[str, CropModel],
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
        stored[name] = cut_folders(part_json(part))
        weights = jax.device_get(flat_weights(part.weights))
        if stored["compact"]:
            weights = to_compact(weights, published_weights(name, stored))
        prefix = f"{name}."
        tensors = {path: x for path, x in tensors.items() if not path.startswith(prefix)}
        tensors |= {prefix + path: value for path, value in weights.items()}
        if PART_TEXTS[name] not in card:
            card += PART_TEXTS[name]

    # Not save_file(), whose file nobody else may read.
    (folder / WEIGHTS).write_bytes(save(tensors, {"format": "np"}))
    write_json(folder / CONFIG, stored)
    (folder / CARD).write_text(card, "utf-8")


def to_compact(weights: Tensors, published: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Returns what a compact export stores of some weights: in float16, or as the integers that
    they are, all that differ from the published ones, which a user finds by name."""
    stored = {}
    for name, value in weights.items():
        # By value: what is frozen in this run may have been trained in an earlier one.
        if name not in published or not np.array_equal(value, published[name]):
            is_float = np.issubdtype(value.dtype, np.floating)
            stored[name] = value.astype(np.float16) if is_float else value
    return stored


# Files


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
        for name in (FUNCTIONS, TRAINED_ON, *TOKENIZER_FILES):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / LANGUAGE_MODEL, ignore_errors=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CHECKSUMS):
            os.replace(path, out / path.name)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those of the files that exist."""
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
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
    kind, colon, path = config.data.source.rpartition(":")
    source = kind + colon + Path(path).name
    data = replace(config.data, source=source, images=None, backgrounds=None, cutouts=None)
    config = replace(config, run=None, init=None, resume=False, data=data)
    return from_json(Config, cut_folders(to_json(config)), CONFIG)


def cut_folders(value: Any) -> Any:
    """Returns a configuration in JSON in which local folders and files, such as those of published
    models, are cut to their names."""
    if isinstance(value, dict):
        return {key: cut_folders(of_key) for key, of_key in value.items()}
    if isinstance(value, str) and Path(value).expanduser().exists():
        return Path(value).name
    return value


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


# On the hub


def check_can_push(name: str) -> None:
    """Raises InputError for what is no name of a repository, and where no token says who pushes."""
    match = HUB_NAME.fullmatch(HUB + name.removeprefix(HUB))
    if match is None or match[2] is not None:
        raise InputError(f"--push {name}: no name of a repository on the hub; give owner/name")
    if huggingface_hub.get_token() is None:
        raise InputError(
            f"--push {name}: there is no token for the Hugging Face hub; run `hf auth login`, or "
            "set HF_TOKEN to a token that may write"
        )


def push(folder: Path, name: str) -> str:
    """Uploads an export to the repository `owner/name`, which is made if there is none.

    Returns its address. Files of an earlier export that the new one lacks are deleted there; other
    files stay. Raises InputError if the export is damaged, or the hub does not take it.
    """
    verify_files(folder)
    api = huggingface_hub.HfApi()
    repository = name.removeprefix(HUB)
    try:
        address = api.create_repo(repository, exist_ok=True)
        # Only files of an export, in one commit: what else lies in the folder stays here.
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(EXPORT_FILES),
            delete_patterns=list(EXPORT_FILES),
            commit_message="Export of r2sm_jax",
        )
    except DOWNLOAD_ERRORS as error:
        raise InputError(
            f"--push {name}: the Hugging Face hub did not take it ({in_short(error)}); push it "
            f"later with hf upload {repository} {folder}"
        ) from None
    return str(address)
