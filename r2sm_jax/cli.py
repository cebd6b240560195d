"""The command line: flags and config files become a checked configuration, errors an exit code.

python -m r2sm_jax.train configs/scenes_hour.py --train.batch-size 8 --model.head linear

Flags override the values of the config file. A configuration is stored as JSON and read again.
"""

import ctypes
import dataclasses
import difflib
import errno
import io
import json
import os
import platform
import runpy
import sys
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import tyro

from r2sm_jax.config import Config, check_config
from r2sm_jax.errors import InputError

T = TypeVar("T")


# Errors


def cli_main(main: Callable[[], None]) -> NoReturn:
    """Runs the `main` of a command and ends the process with its exit code (`print_error`)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal cannot show is escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
        # Here, so that a full disk or a closed pipe is seen before Python's own last flush.
        sys.stdout.flush()
    except (InputError, KeyboardInterrupt, OSError) as error:
        code = print_error(error)
        if code is None:
            raise
        sys.exit(code)
    sys.exit(0)


def print_error(error: BaseException) -> int | None:
    """Prints one line for an error that the user can mend, and returns the exit code.

    Ctrl-C gives 130 and a closed pipe (`... | head`) 0, as shells expect; other errors of the user
    give 2. Returns None for any other error, which is a bug and deserves its traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, InputError):
        print(f"error: {error}", file=sys.stderr)
        return 2
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return 0
    if not isinstance(error, OSError):
        return None

    # An output that no code of ours opened, such as a redirected stdout.
    if error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)[:40]
        problem = f"{name}...: this is too long for the name of a file; check the arguments"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the output"
        problem = f"{where}: cannot be written ({error.strerror}); free disk space"
    else:
        return None
    _discard_output()
    print(f"error: {problem}", file=sys.stderr)
    return 2


def _discard_output() -> None:
    """Sends what is left of stdout nowhere: Python's last flush would add lines to the message."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Flags and config files


def parse_config(args: Sequence[str], default: Config | None = None) -> Config:
    """Reads `[CONFIG.py] [--flags]` into a checked configuration.

    Flags override the file, or else `default`. Raises InputError as `load_config_file` and
    `parse_flags`, or if a value is not possible.
    """
    args = list(args)
    if args and not args[0].startswith("-"):
        default = load_config_file(Path(args.pop(0)))
    prog = "python -m r2sm_jax.train [CONFIG.py]"
    return check_config(parse_flags(Config, args, prog=prog, default=default or Config()))


def parse_flags(cls: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Parses flags into a dataclass with tyro.

    Bad values end the command with exit code 2 and tyro's message. Raises InputError for an unknown
    flag, which offers the nearest one.
    """
    known = _flags(cls)
    for arg in args:
        if not arg.startswith("--"):
            continue
        # tyro takes underscores too, and `--no-flag` or `--part.no-flag` for False.
        name = arg.split("=")[0].replace("_", "-")
        without_no = name.replace("--no-", "--").replace(".no-", ".")
        if name in known or without_no in known:
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        offer = f"; did you mean {nearest[0]}?" if nearest else ""
        raise InputError(f"unknown flag {arg.split('=')[0]}{offer} (--help lists all)")
    extra: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(args), prog=prog, **extra)


def _flags(cls: Any, prefix: str = "--") -> list[str]:
    """Lists all flags of a dataclass; those of a nested one follow a dot."""
    names = ["--help"]
    for name, kind in typing.get_type_hints(cls).items():
        flag = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(kind):
            names += _flags(kind, f"{flag}.")
        else:
            names.append(flag)
    return names


def load_config_file(path: Path) -> Config:
    """Runs a Python file and returns the `Config` of its function `get_config`.

    Raises InputError if the file is missing, does not import, or returns something else or unknown
    values.
    """
    if not path.is_file():
        raise InputError(f"config file {path} does not exist")
    try:
        config = runpy.run_path(str(path))["get_config"]()
        if not isinstance(config, Config):
            raise TypeError(f"get_config() must return a Config, not {config!r}")
        # Dataclasses do not check the types of their fields; reading them from JSON does.
        return from_json(Config, to_json(config), f"config file {path}")
    except InputError:
        raise
    except Exception as error:  # whatever a user's file raises
        problem = f"{type(error).__name__}: {error}"
        raise InputError(
            f"config file {path} does not load ({problem}); write get_config() in Python"
        ) from None


def to_json(config: Any) -> dict[str, Any]:
    """Returns a configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Makes a configuration of what `to_json` returned.

    Raises InputError if a field is unknown, as after an incompatible version, or has none of its
    few possible values.
    """
    types: dict[str, Any] = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(types))
    if unknown:
        raise InputError(
            f"{where}: unknown field {unknown[0]!r}; it was written by another version of r2sm_jax"
        )

    fields = dict(values)
    for name, value in values.items():
        field_type = types[name]
        if dataclasses.is_dataclass(field_type):
            fields[name] = from_json(types[name], value, f"{where}: {name}")
        elif typing.get_origin(field_type) is tuple:
            # JSON has lists only.
            fields[name] = tuple(value)
        elif typing.get_origin(field_type) is Literal and value not in typing.get_args(field_type):
            choices = ", ".join(map(str, typing.get_args(field_type)))
            raise InputError(f"{where}: {name} {value!r} is unknown; give one of {choices}")
    return cls(**fields)


# Memory


def trim_memory() -> None:
    """Gives free memory back to the system, which glibc keeps by default.

    It pays after sentences are encoded, and after the first training step, whose compilation leaves
    most.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
