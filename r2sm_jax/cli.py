"""Configurations from Python files, from the command line, whose flags override the file, and from
JSON; and what a command does for its memory.

python -m r2sm_jax.train configs/scenes_hour.py --train.batch-size 8 --model.head linear
"""

import ctypes
import dataclasses
import difflib
import json
import platform
import runpy
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from r2sm_jax.config import Config, check_config
from r2sm_jax.errors import InputError

T = TypeVar("T")


def parse_config(args: Sequence[str], default: Config | None = None) -> Config:
    """`[CONFIG.py] [--flags]` -> a checked configuration. Flags override the file, or else
    `default`. Raises InputError if the file does not import or has no `get_config`, or a value is
    not possible."""
    args = list(args)
    if args and not args[0].startswith("-"):
        default = load_config_file(Path(args.pop(0)))
    prog = "python -m r2sm_jax.train [CONFIG.py]"
    return check_config(parse_flags(Config, args, prog=prog, default=default or Config()))


def parse_flags(cls: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Parses with tyro. An unknown flag is one sentence that offers the nearest one. Raises
    InputError if a flag is unknown. Bad values end the command with exit code 2."""
    known = _flags(cls)
    for arg in args:
        name = arg.split("=")[0].replace("_", "-")
        if (
            arg.startswith("--")
            and name not in known
            and name.replace("--no-", "--").replace(".no-", ".") not in known
        ):
            near = difflib.get_close_matches(name, known, n=1)
            raise InputError(
                f"unknown flag {arg.split('=')[0]}{f'; did you mean {near[0]}?' if near else ''} "
                "(--help lists all)"
            )
    extra: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(args), prog=prog, **extra)


def _flags(cls: Any, prefix: str = "--") -> list[str]:
    names = ["--help"]
    for name, kind in typing.get_type_hints(cls).items():
        flag = prefix + name.replace("_", "-")
        names += _flags(kind, f"{flag}.") if dataclasses.is_dataclass(kind) else [flag]
    return names


def load_config_file(path: Path) -> Config:
    """The `Config` that `get_config()` of a Python file returns. Raises InputError if the file is
    missing, does not import, or returns something else or unknown values."""
    if not path.is_file():
        raise InputError(f"config file {path} does not exist")
    try:
        config = runpy.run_path(str(path))["get_config"]()
        if not isinstance(config, Config):
            raise TypeError(f"get_config() must return a Config, not {config!r}")
        return from_json(Config, to_json(config), f"config file {path}")
    except InputError:
        raise
    except Exception as error:  # whatever a user's file raises
        problem = f"{type(error).__name__}: {error}"
        raise InputError(
            f"config file {path} does not load ({problem}); write get_config() in Python"
        ) from None


def to_json(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(cls: type[T], values: dict[str, Any], where: str) -> T:
    """The inverse of `to_json`. Raises InputError if a field is unknown, as after an incompatible
    version, or has none of its few possible values."""
    kinds, values = typing.get_type_hints(cls), dict(values)
    if unknown := sorted(set(values) - set(kinds)):
        raise InputError(
            f"{where}: unknown field {unknown[0]!r}; it was written by another version of r2sm_jax"
        )
    for name, value in values.items():
        if dataclasses.is_dataclass(kinds[name]):
            values[name] = from_json(kinds[name], value, f"{where}: {name}")
        elif typing.get_origin(kinds[name]) is tuple:
            values[name] = tuple(value)
        elif typing.get_origin(kinds[name]) is Literal and value not in typing.get_args(
            kinds[name]
        ):
            known = ", ".join(map(str, typing.get_args(kinds[name])))
            raise InputError(f"{where}: {name} {value!r} is unknown; give one of {known}")
    return cls(**values)


def trim_memory() -> None:
    """Gives free memory back to the system, which glibc keeps by default: after encoding sentences,
    and after the first training step, whose compilation leaves most."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
