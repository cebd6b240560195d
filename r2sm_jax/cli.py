"""The command line: flags and config files become a checked configuration, errors an exit code.

python -m r2sm_jax.train configs/scenes_hour.py --train.batch-size 8 --model.head linear

Flags override the values of the config file. A configuration is stored as JSON and read again.
"""

import dataclasses
import errno
import io
import json
import os
import re
import runpy
import shutil
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import tyro

from r2sm_jax.config import CompleterConfig, Config, check_config, default_config
from r2sm_jax.errors import InputError

T = TypeVar("T")
MIN_WIDTH = 40
"""Columns of a terminal that help is written for at least."""
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


# Errors


def cli_main(main: Callable[[], None]) -> NoReturn:
    """Runs the `main` of a command and ends the process with its exit code (`print_error`)."""
    prepare_output()
    # Python's own format shows a file and a line of code.
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        main()
        # Here, so that a full disk or a closed pipe is seen before Python's own last flush.
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = print_error(error)
        if code is None:
            raise
        sys.exit(code)
    finally:
        warnings.formatwarning = formatwarning
    sys.exit(0)


def check_first(parse: Callable[[], object]) -> None:
    """Parses the command line before a command imports what takes seconds.

    Ends the process where there is no more to do: after `--help`, and for an error, as `cli_main`.
    """
    prepare_output()
    try:
        try:
            parse()
        finally:
            sys.stdout.flush()  # as in `cli_main`
    except (InputError, BrokenPipeError) as error:
        sys.exit(print_error(error))


def prepare_output() -> None:
    """Lets a command print whatever its output is: closed, a narrow terminal, or one that cannot
    show all characters."""
    if sys.stdout is None:
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # tyro does not end its help where no word fits into a line.
    width = shutil.get_terminal_size().columns
    if width < MIN_WIDTH:
        os.environ["COLUMNS"] = str(MIN_WIDTH)


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
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_IS_FULL):
        if not error.filename:
            _discard_output()
        print(f"error: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 2
    return None


def _discard_output() -> None:
    """Sends what is left of stdout nowhere: Python's last flush would add lines to the message."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Flags and config files


def parse_config(args: Sequence[str], default: Config | None = None) -> Config:
    """Reads `[CONFIG.py] [--flags]` into a checked configuration.

    Flags override the file, else `default`, else the defaults of the part that is trained. Raises
    InputError as `load_config_file`, `parse_flags` and `check_config`.
    """
    args = list(args)
    if args and not args[0].startswith("-"):
        default = load_config_file(Path(args.pop(0)))
    parse = partial(parse_flags, Config, args, prog="python -m r2sm_jax.train [CONFIG.py]")
    config = parse(default=default or Config())
    if default is None and config.train.part != "segmenter":
        config = parse(default=default_config(config.train.part))
    return check_config(config)


def parse_flags(cls: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Parses flags into a dataclass with tyro, which ends the process after `--help` and, with exit
    code 2, for an unknown flag or a bad value. Raises InputError for a flag that is given twice."""
    refuse_repeated(args, cls)
    extra: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(args), prog=prog, **extra)


def refuse_repeated(args: Sequence[str], cls: type = object) -> None:
    """Raises InputError for a flag that is given twice, of which tyro would take the last.

    `cls`: the dataclass of the flags, which says which of them may be repeated.
    """
    counts = Counter(arg.partition("=")[0].replace("_", "-") for arg in args if arg[:2] == "--")
    hints = typing.get_type_hints(cls, include_extras=True)
    for flag, count in counts.items():
        kind = hints.get(flag[2:].replace("-", "_"))
        may_repeat = tyro.conf.UseAppendAction in typing.get_args(kind)
        if count > 1 and not may_repeat:
            raise InputError(f"{flag} is given {count} times; give it once")


def parse_shard(shard: str) -> tuple[int, int]:
    """Reads I and N of `--shard I/N`: every N-th item is meant, from the I-th of 1 to N on."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--shard {shard}: give I/N with I from 1 to N, such as 1/4")
    return int(match[1]), int(match[2])


def load_config_file(path: Path) -> Config:
    """Runs a Python file and returns the `Config` of its function `get_config`.

    Raises InputError if there is no such file, its code fails, or a value has another type than its
    field.
    """
    if not path.is_file():
        raise InputError(f"config file {path} does not exist; give the path of a Python file")
    try:
        config = runpy.run_path(str(path))["get_config"]()
    except Exception as error:  # whatever a user's own code raises
        raise InputError(
            f"config file {path}: {type(error).__name__}: {error}; write a function get_config() "
            "that returns a Config, as configs/smoke.py does"
        ) from error
    # Dataclasses do not check the types of their fields; reading them from JSON does.
    return from_json(Config, to_json(config), f"config file {path}")


def to_json(config: Any) -> dict[str, Any]:
    """Returns a configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Makes a configuration of what `to_json` returned.

    Raises InputError for a value that its field cannot have, and for an unknown field, as after an
    incompatible version.
    """
    values = without_backbone(values, is_completer=cls is CompleterConfig)
    try:
        config = msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from error
    for name in _unknown_fields(values, to_json(config)):
        raise InputError(f"{where}: unknown field {name}, which another version of r2sm_jax wrote")
    return config


def without_backbone(values: dict[str, Any], *, is_completer: bool) -> dict[str, Any]:
    """Leaves out what older versions wrote about the backbone of a completer that had none: no
    completer has one now."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = without_backbone(value, is_completer=name == "completer")
        of_backbone = name in ("efficientnet", "block_dims")
        if not (is_completer and of_backbone and not values.get("efficientnet")):
            kept[name] = value
    return kept


def _unknown_fields(values: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    """Yields the dotted names of the values that are not among the known ones."""
    for name, value in values.items():
        if name not in known:
            yield name
        elif isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _unknown_fields(value, known[name]))
