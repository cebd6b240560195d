"""One frozen dataclass tree holds a whole experiment; a config file returns one, and flags override its fields.

python -m r2sm_jax.train configs/scenes_hour.py --train.batch-size 8 --model.head linear
"""

import dataclasses
import difflib
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tyro

from r2sm_jax.errors import InputError
from r2sm_jax.models.heads import check_head
from r2sm_jax.models.products import Products
from r2sm_jax.models.r2sm import ModelConfig
from r2sm_jax.training.losses import LossConfig
from r2sm_jax.training.optimizer import OptimizerConfig

T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from."""

    source: str = "scenes"
    """scenes (procedural), cutouts:DIR (composed of RGBA images), json:FILE (COCO-style, with queries) or tfds:DIR."""
    images: str | None = None
    """Folder of the images of a json source; default: beside the file."""
    backgrounds: str | None = None
    """Folder of photos to lay cut-outs over; default: drawn backdrops."""
    scenes: int = 8192
    """Procedural or composed training scenes."""
    seed: int = 0
    """Of the scenes. Not the training seed: the data stays the same across runs."""
    queries: int = 8
    """Queries an image and step."""
    instances: int = 8
    """Instances an image that are supervised; those that a query means come first."""
    token_drop: float = 0.2
    """Share of a query's tokens that the mask-type head does not see, drawn anew at each visit."""
    free_sentences: int = 6000
    """Sentences about anything, without an image, that the mask-type head alone learns from beside the queries."""
    mirror: bool = True
    """Mirror half of the images; queries that say left or right are left out then."""
    crop: float = 1.0
    """Smallest share of each side that a random crop keeps; 1 = none. Queries whose instances are cut are left out."""
    colour_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation. Hues stay, since queries name colours."""
    cache_features: str | None = None
    """Folder for what frozen models make of sentences and, without augmentation, of images: computed once, read by
    every later run."""


@dataclass(frozen=True)
class LoopConfig:
    """The training loop."""

    steps: int = 2000
    batch_size: int = 16
    """Images a step, over all devices."""
    accumulate: int = 0
    """Parts that a batch is worked off in, to need the memory of one; the step is that of the whole batch. 0: no need
    to save memory."""
    products: Products = "auto"
    """Operands of dense layers, 3x3 convolutions and Muon in training, and in encoding its sentences unless they are
    kept (`--data.cache-features`). auto: bfloat16 on CPUs with matrix units for it (AMX), float32 elsewhere."""
    seed: int = 0
    """Of the initial weights, the order of examples and augmentation."""
    log_every: int = 50
    """Steps."""
    evaluate_every: int = 1000
    """Steps between quick evaluations with sample sheets."""
    checkpoint_every: int = 500
    """Steps."""
    evaluate_samples: int = 64
    """Images of the validation split in a quick evaluation."""
    report_samples: int = 256
    """Images of each split in the final report; procedural and composed scenes only, files are evaluated whole."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    run: str | None = None
    """Run folder; default: a new dated one in runs/, which runs/latest then points at."""
    resume: bool = False
    """Continue the run folder (default: runs/latest) from its last checkpoint."""
    init: str | None = None
    """Run whose weights are the starting point (fine-tuning)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)


def parse_config(args: Sequence[str], default: Config | None = None) -> Config:
    """`[CONFIG.py] [--flags]` -> a checked configuration. Flags override the file, or else `default`.

    Raises:
        InputError: the file does not import or has no `get_config`, or a value cannot be.
    """
    args = list(args)
    if args and not args[0].startswith("-"):
        default = load_config_file(Path(args.pop(0)))
    prog = "python -m r2sm_jax.train [CONFIG.py]"
    return check_config(parse_flags(Config, args, prog=prog, default=default or Config()))


def parse_flags(cls: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """tyro's parser with our manners: an unknown flag or a bad value is one sentence and exit code 2."""
    known = _flags(cls)
    for arg in args:
        name = arg.split("=")[0].replace("_", "-")
        if arg.startswith("--") and name not in known and name.replace("--no-", "--").replace(".no-", ".") not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InputError(
                f"unknown flag {arg.split('=')[0]}{f'; did you mean {near[0]}?' if near else ''} (--help lists all)"
            )
    extra: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(args), prog=prog, **extra)


def _flags(cls: type, prefix: str = "--") -> list[str]:
    names = ["--help"]
    for f, kind in _typed_fields(cls):
        if dataclasses.is_dataclass(kind):
            names += _flags(typing.cast(type, kind), f"{prefix}{f.name.replace('_', '-')}.")
        else:
            names.append(prefix + f.name.replace("_", "-"))
    return names


def _typed_fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls)
    return [(f, hints[f.name]) for f in dataclasses.fields(cls)]


def load_config_file(path: Path) -> Config:
    """The `Config` that `get_config()` of a Python file returns.

    Raises:
        InputError: the file is missing, does not import, or returns something else.
    """
    if not path.is_file():
        raise InputError(f"config file {path} does not exist")
    spec = importlib.util.spec_from_file_location("r2sm_config", path)
    if spec is None or spec.loader is None:
        raise InputError(f"config file {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:  # whatever a user's file raises
        raise InputError(f"config file {path} does not load: {type(error).__name__}: {error}") from None
    finally:
        sys.dont_write_bytecode = before
    if not isinstance(config, Config):
        raise InputError(f"config file {path}: get_config() must return r2sm_jax.config.Config")
    return config


def check_config(config: Config) -> Config:
    """Refuses values that could only fail later.

    Raises:
        InputError: naming the flag and what it may be.
    """
    check_head(config.model.head)
    if config.model.vision.init is None and config.model.vision.name is None:
        check_sizes(config.model)  # published sizes are known, and checked, when training starts
    if not 0 < config.data.crop <= 1:
        raise InputError(f"--data.crop {config.data.crop} is not a share; give one above 0 and up to 1 (1 = no crops)")
    if not 0 <= config.data.colour_jitter < 1:
        raise InputError(f"--data.colour-jitter {config.data.colour_jitter} is not in [0, 1); 0 = none")
    if config.model.looks_again and config.loss.instance <= 0:
        raise InputError(
            f"--loss.instance {config.loss.instance} leaves the second look untrained; give a weight above 0, or "
            "--model.decoder.no-second-look"
        )
    if config.train.accumulate < 0:
        raise InputError(f"--train.accumulate {config.train.accumulate} is below 0; give the number of parts, or 0")
    positive = {
        "--train.steps": config.train.steps, "--train.batch-size": config.train.batch_size,
        "--train.log-every": config.train.log_every, "--train.checkpoint-every": config.train.checkpoint_every,
        "--train.evaluate-every": config.train.evaluate_every, "--data.queries": config.data.queries,
        "--data.scenes": config.data.scenes, "--data.instances": config.data.instances,
        "--model.text.max-tokens": config.model.text.max_tokens - 2,
    }  # fmt: skip
    for flag, value in positive.items():
        if value < 1:
            raise InputError(f"{flag} is too small; it must be at least {3 if 'tokens' in flag else 1}")
    return config


def check_sizes(model: ModelConfig) -> None:
    """Refuses sizes of the encoder and the decoder that do not fit together.

    Raises:
        InputError: naming the flag and what it may be.
    """
    vision, decoder = model.vision, model.decoder
    if vision.image_size % vision.patch_size:
        raise InputError(
            f"--model.vision.image-size {vision.image_size} is not a multiple of "
            f"--model.vision.patch-size {vision.patch_size}"
        )
    if vision.stem == "conv" and vision.patch_size not in (8, 16):
        raise InputError(
            f"--model.vision.patch-size {vision.patch_size}: the conv stem halves 3 or 4 times, so 8 or 16"
        )
    for name, dim, heads in (("vision", vision.dim, vision.heads), ("decoder", decoder.dim, decoder.heads)):
        if dim % heads:
            raise InputError(f"--model.{name}.dim {dim} is not a multiple of --model.{name}.heads {heads}")
    if vision.stem == "none" and vision.name is None:
        raise InputError("--model.vision.stem none leaves no image encoder; give a plain ViT as --model.vision.name")
    if vision.frozen and vision.init is None:
        raise InputError("--model.vision.frozen keeps published weights as they are; give them as --model.vision.init")
    if vision.lora_rank and vision.init is None and vision.name is None:
        raise InputError("--model.vision.lora-rank adapts published weights; give --model.vision.init or .name")
    if decoder.kind == "sam" and decoder.dim != vision.out_dim:
        raise InputError(
            f"--model.decoder.dim {decoder.dim}: SAM's decoder reads image tokens as they are, so it must be equal to "
            f"--model.vision.out-dim {vision.out_dim}"
        )
    if decoder.kind == "sam" and (decoder.dim % 8 or decoder.dim % (2 * decoder.heads)):
        raise InputError(
            f"--model.decoder.dim {decoder.dim}: SAM's decoder needs a multiple of 8 and of 2 for each of its "
            f"{decoder.heads} heads"
        )


def to_json(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(cls: type[T], values: dict[str, Any], where: str) -> T:
    """The inverse of `to_json`.

    Raises:
        InputError: a field is unknown, as after an incompatible version.
    """
    known = {f.name: kind for f, kind in _typed_fields(cls)}
    if unknown := sorted(set(values) - set(known)):
        raise InputError(f"{where}: unknown field {unknown[0]!r}; it was written by another version of r2sm_jax")
    return cls(**{name: _decode(known[name], value, f"{where}: {name}") for name, value in values.items()})


def _decode(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_json(typing.cast(type, kind), value, where)
    if isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple:
        return tuple(value)
    return value


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the fields in which two configurations differ, with both values."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} ({a} in the run, {b} now)")
    return found
