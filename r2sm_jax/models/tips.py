"""TIPS and TIPSv2 (google-deepmind/tips): finding and reading their JAX checkpoints.

A checkpoint is two `.npz` files, one for each tower: NAME_vision.npz and NAME_text.npz. They are
read without pickle. No `config.json` comes with them: sizes are read from the shapes.
"""

import sys
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import numpy as np

from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.models import hub

Tower = Literal["vision", "text"]

ADDRESS = "https://storage.googleapis.com/tips_data/"
CHECKPOINTS = {
    "tips-s14": "v1_0/checkpoints/scenic/tips_oss_s14_highres_distilled",
    "tips-b14": "v1_0/checkpoints/scenic/tips_oss_b14_highres_distilled",
    "tipsv2-b14": "v2_0/checkpoints/scenic/tips_v2_b14",
}
"""By the name that a flag gives: the published address, without the tower at its end."""
TOKENIZER = "v1_0/checkpoints/tokenizer.model"
"""The address of the tokenizer of all of them."""
TIMEOUT_SECONDS = 10


# Finding


def find_tips(name: str, tower: Tower, flag: str) -> Path | None:
    """The `.npz` file of a tower; None if `name` is no TIPS. `flag` is where it was given.

    `name` is one of `CHECKPOINTS`, a file that ends in `.npz`, or a folder with NAME_vision.npz or
    NAME_text.npz. Raises InputError if the file is missing, cannot be downloaded, or is one of
    several.
    """
    if name in CHECKPOINTS:
        return find_published(name, f"{CHECKPOINTS[name]}_{tower}.npz", flag)

    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.glob(f"*_{tower}.npz"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise InputError(f"{flag} {name}: it holds {names}; give one of these files")
        return files[0] if files else None
    if path.suffix != ".npz":
        return None
    if not path.exists():
        raise InputError(
            f"{flag} {name}: there is no such file; give a file of TIPS, or one of "
            f"{', '.join(CHECKPOINTS)}"
        )
    return path


def find_published(name: str, address: str, flag: str) -> Path:
    """A published file in the cache of this package, downloaded if it is not there. Raises
    InputError if that fails."""
    file = hub.cache_dir() / name / address.rpartition("/")[2]
    if file.exists():
        return file
    print(f"downloading {file.name} from {ADDRESS} ({flag})", file=sys.stderr)
    try:
        with urllib.request.urlopen(ADDRESS + address, timeout=TIMEOUT_SECONDS) as response:
            content = response.read()
    except (OSError, HTTPException) as error:
        raise InputError(
            f"{flag} {name}: {ADDRESS}{address} cannot be downloaded ({hub.describe(error)}); "
            f"download it elsewhere and put it into {file.parent}, or give {flag} FILE"
        ) from None
    with atomic_write(file) as part:
        part.write_bytes(content)
    return file


def find_tips_tokenizer(name: str, text_tower: Path, flag: str) -> Path:
    """The tokenizer of a text tower: published with it, or `tokenizer.model` beside its file, which
    need not exist. Raises InputError if it cannot be downloaded."""
    if name in CHECKPOINTS:
        return find_published(name, TOKENIZER, flag)
    return text_tower.with_name("tokenizer.model")


# Reading


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file by name, in their stored type. Nothing is unpickled.

    Raises InputError if the file is damaged or of another format, or an array has no real numbers.
    """
    arrays: dict[str, np.ndarray] = {}
    name = ""
    try:
        with np.load(file, allow_pickle=False) as opened:
            for name in opened.files:
                arrays[name] = opened[name]
    except Exception as error:  # whatever a damaged or hostile file provokes
        where = f"its array {name}" if name else "it"
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{file}: {where} cannot be read as NumPy writes arrays without pickle ({reason}); "
            "download it again"
        ) from None
    for name, value in arrays.items():
        if not np.issubdtype(value.dtype, np.floating):
            raise InputError(
                f"{file}: its array {name} has numbers of type {value.dtype}; TIPS has float32"
            )
    return arrays


def shape_of(
    arrays: Mapping[str, np.ndarray], name: str, num_axes: int, file: Path, tower: Tower
) -> tuple[int, ...]:
    """The shape of an array from which sizes are read. Raises InputError if the file does not have
    it, or it has another number of axes."""
    if name not in arrays:
        raise InputError(
            f"{file}: not the {tower} tower of a TIPS, since it has no array {name}; give the JAX "
            f"file NAME_{tower}.npz of a TIPS with a plain MLP (S, B, L, So400m)"
        )
    shape = arrays[name].shape
    if len(shape) != num_axes:
        raise InputError(
            f"{file}: its array {name} has shape {shape}, where TIPS has {num_axes} axes; download "
            "it again"
        )
    return shape


def check_shapes(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], file: Path
) -> None:
    """Raises InputError for the first array that does not have the shape that `shapes` has for
    it."""
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise InputError(
                f"{file}: its array {name} has shape {arrays[name].shape}, but its other arrays "
                f"ask for {shape}; download it again"
            )
