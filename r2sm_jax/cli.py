"""The command line: flags and config files become a checked configuration, errors an exit code.

python -m r2sm_jax.train configs/scenes_hour.py --train.batch-size 8 --model.head linear

Flags override the values of the config file. A configuration is stored as JSON and read again.
"""

import ctypes
import dataclasses
import errno
import functools
import io
import json
import os
import platform
import re
import runpy
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import tyro
from tyro.extras import SubcommandApp

from r2sm_jax.config import Config, check_config
from r2sm_jax.errors import InputError

T = TypeVar("T")


# Errors


def cli_main(main: Callable[[], None]) -> NoReturn:
    """Runs the `main` of a command and ends the process with its exit code (`print_error`)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal cannot show is escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
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
    try:
        try:
            parse()
        finally:
            sys.stdout.flush()  # as in `cli_main`
    except (InputError, BrokenPipeError) as error:
        sys.exit(print_error(error))


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
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full:
        _discard_output()
    if isinstance(error, OSError) and (is_full or error.filename):
        remedy = "free disk space" if is_full else "check the path"
        where = error.filename or "the output"
        print(f"error: {where}: {error.strerror}; {remedy}", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return None


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
    """Parses flags into a dataclass with tyro. `--help` prints them and ends the process.

    Raises InputError for a bad value, an unknown flag, and a flag that is given twice.
    """
    _refuse_repeated(cls, args)
    extra: dict[str, Any] = {} if default is None else {"default": default}
    with _one_sentence():
        return tyro.cli(cls, args=list(args), prog=prog, **extra)


def parse_subcommand(
    app: SubcommandApp, args: Sequence[str], *, prog: str, description: str
) -> Callable[[], None]:
    """Parses the flags of a command that has commands of its own. Returns the call to make.

    Args:
        app: its commands were wrapped by `deferred`.

    Raises InputError for an unknown command or flag, a bad value, or a flag that is given twice.
    """
    _refuse_repeated(object, args)
    with _one_sentence():
        return app.cli(
            prog=prog,
            description=description,
            args=list(args),
            config=(tyro.conf.FlagCreatePairsOff,),
        )


def deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """Wraps a command so that tyro does not run it, but returns it with its arguments.

    So what tyro prints about the flags can be told from what the command itself prints.
    """

    @functools.wraps(command)
    def bind(*args: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(command, *args, **options)

    return bind


def parse_shard(shard: str) -> tuple[int, int]:
    """Reads I and N of `--shard I/N`: every N-th item is meant, from the I-th of 1 to N on."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--shard {shard}: give I/N with I from 1 to N, such as 1/4")
    return int(match[1]), int(match[2])


def _refuse_repeated(cls: type, args: Sequence[str]) -> None:
    """Raises InputError for a flag that is given twice, of which tyro would take the last."""
    counts = Counter(arg.partition("=")[0].replace("_", "-") for arg in args if arg[:2] == "--")
    hints = typing.get_type_hints(cls, include_extras=True)
    for flag, count in counts.items():
        kind = hints.get(flag[2:].replace("-", "_"))
        may_repeat = tyro.conf.UseAppendAction in typing.get_args(kind)
        if count > 1 and not may_repeat:
            raise InputError(f"{flag} is given {count} times; give it once")


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turns the box of several lines that tyro prints for an error into an InputError."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as error:
        if not error.code:
            raise
        # The first paragraph of the box; the next ones quote the help of similar flags.
        text = " ".join(line.strip("│╰╯ ") for line in printed.getvalue().splitlines()[1:])
        sentence = text.partition("──")[0].strip(" .")
        raise InputError(f"{sentence} (--help lists all flags)") from None


def load_config_file(path: Path) -> Config:
    """Runs a Python file and returns the `Config` of its function `get_config`.

    Raises InputError if the file is missing, does not import, or returns something else or unknown
    values.
    """
    if not path.is_file():
        raise InputError(f"config file {path} does not exist; give the path of a Python file")
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

    It pays after the first training step, whose compilation leaves most.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
