"""The command line: flags and config files become a checked configuration, errors an exit code.

python -m r2sm_jax.train configs/scenes_hour.py --train.batch-size 8 --model.head linear

Flags override the values of the config file. A configuration is stored as JSON and read again.
"""

import ctypes
import dataclasses
import difflib
import errno
import functools
import io
import itertools
import json
import os
import platform
import runpy
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import tyro
from tyro.extras import SubcommandApp

from r2sm_jax.config import Config, check_config
from r2sm_jax.errors import InputError
from r2sm_jax.usage import describe_training, offer_configs

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
            # Here, so that a pipe that `head` closed is seen before Python's own last flush.
            sys.stdout.flush()
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
    platforms = os.environ.get("JAX_PLATFORMS")
    # JAX may have raised anything: for cuda without its plugin, an AssertionError without a word.
    if platforms and isinstance(error, RuntimeError | AssertionError) and not _has_device():
        print(
            f"error: JAX_PLATFORMS={platforms}: JAX finds no such device here; leave the variable "
            "out, or install JAX for the device (pip install 'r2sm_jax[cuda]' for NVIDIA)",
            file=sys.stderr,
        )
        return 2
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


def _has_device() -> bool:
    """Whether JAX, where it is loaded, finds a device of the kind that JAX_PLATFORMS names."""
    jax = sys.modules.get("jax")
    if jax is None:
        return True
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False


def _discard_output() -> None:
    """Sends what is left of stdout nowhere: Python's last flush would add lines to the message."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Flags and config files

DEVICE_FLAGS = ("--device", "--devices", "--gpu", "--gpus", "--cuda", "--cpu")
"""Flags of other programs, which some look for here."""
HELP_ALL = "--help-all"


def parse_config(args: Sequence[str], default: Config | None = None) -> Config:
    """Reads `[CONFIG.py] [--flags]` into a checked configuration.

    Flags override the file, or else `default`. `--help` prints the usual flags, `--help-all` all,
    and both end the process. Raises InputError as `load_config_file` and `parse_flags`, or if a
    value is not possible.
    """
    args = list(args)
    if args and not args[0].startswith("-"):
        default = load_config_file(Path(args.pop(0)))
    default = default or Config()
    if HELP_ALL in args:
        args = ["--help"]
    elif "--help" in args or "-h" in args:
        print(describe_training(default))
        sys.exit(0)
    prog = "python -m r2sm_jax.train [CONFIG.py]"
    return check_config(parse_flags(Config, args, prog=prog, default=default, help_flag=HELP_ALL))


def parse_flags(
    cls: type[T],
    args: Sequence[str],
    *,
    prog: str,
    default: T | None = None,
    help_flag: str = "--help",
) -> T:
    """Parses flags into a dataclass with tyro. `--help` prints them and ends the process.

    Args:
        help_flag: the flag that lists all flags, for messages.

    Raises InputError for a bad value, and for an unknown flag, for which it offers the nearest one.
    """
    known = _flags(cls)
    for number, arg in enumerate(args):
        if not arg.startswith("--"):
            continue
        # tyro takes underscores too, and `--no-flag` or `--part.no-flag` for False.
        word, _, value = arg.partition("=")
        name = word.replace("_", "-")
        without_no = name.replace("--no-", "--").replace(".no-", ".")
        if name in known:
            if not value and number + 1 < len(args):
                value = args[number + 1]
            if value:
                _check_number(word, value, known[name])
            if "=" not in arg:
                _check_numbers(word, args[number + 1 :], known[name])
        elif without_no not in known:
            raise InputError(_describe_unknown(word, name, list(known), help_flag))

    extra: dict[str, Any] = {} if default is None else {"default": default}
    with _one_sentence(help_flag):
        return tyro.cli(cls, args=list(args), prog=prog, **extra)


def parse_subcommand(
    app: SubcommandApp, args: Sequence[str], *, prog: str, description: str
) -> Callable[[], None]:
    """Parses the flags of a command that has commands of its own. Returns the call to make.

    Args:
        app: its commands were wrapped by `deferred`.

    Raises InputError for an unknown command or flag, or a bad value.
    """
    with _one_sentence("--help"):
        return app.cli(
            prog=prog,
            description=description,
            args=list(args),
            config=(tyro.conf.FlagCreatePairsOff,),
        )


def deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A command that is not run by tyro, but returned with its arguments.

    So what tyro prints about the flags can be told from what the command itself prints.
    """

    @functools.wraps(command)
    def bind(*args: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(command, *args, **options)

    return bind


@contextmanager
def _one_sentence(help_flag: str) -> Iterator[None]:
    """Turns the box of several lines that tyro prints for an error into an InputError."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as error:
        if not error.code:
            raise
        sentence = _sentence_of(printed.getvalue())
        raise InputError(f"{sentence} ({help_flag} lists all flags)") from None


def _flags(cls: Any, prefix: str = "--") -> dict[str, Any]:
    """All flags of a dataclass with their types; those of a nested one follow a dot."""
    flags: dict[str, Any] = {"--help": None}
    for name, kind in typing.get_type_hints(cls).items():
        flag = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(kind):
            flags |= _flags(kind, f"{flag}.")
        else:
            flags[flag] = kind
    return flags


def _check_number(flag: str, value: str, kind: Any) -> None:
    """Raises InputError for a value of a number's flag that is none."""
    # Of `int | None`, for instance.
    kinds = typing.get_args(kind) or (kind,)
    for number, what in ((int, "a whole number"), (float, "a number")):
        if number not in kinds or kinds not in ((number,), (number, type(None))):
            continue
        try:
            number(value)
        except ValueError:
            raise InputError(f"{flag} {value}: give {what}") from None


def _check_numbers(flag: str, following: Sequence[str], kind: Any) -> None:
    """Raises InputError where a flag that takes several numbers, such as a box, is followed by
    something else. `following`: all arguments after it."""
    # Of `tuple[float, float] | None` or of `tuple[tuple[float, float], ...]`, for instance.
    counts = []
    for part in (kind, *typing.get_args(kind)):
        members = typing.get_args(part)
        if typing.get_origin(part) is tuple and set(members) == {float}:
            counts.append(len(members))
    if not counts:
        return

    values = list(itertools.takewhile(lambda arg: not arg.startswith("--"), following))
    values = values[: counts[0]]
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if len(numbers) != counts[0]:
        raise InputError(f"{' '.join([flag, *values])}: give {counts[0]} numbers")


def _describe_unknown(word: str, name: str, known: list[str], help_flag: str) -> str:
    """The message about a flag that there is not."""
    if name in DEVICE_FLAGS:
        return (
            f"unknown flag {word}: JAX takes a GPU where it is installed for one (pip install "
            "'r2sm_jax[cuda]'), and JAX_PLATFORMS=cpu before the command keeps it on the CPU"
        )
    nearest = difflib.get_close_matches(name, known, n=1)
    offer = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown flag {word}{offer} ({help_flag} lists all)"


def _sentence_of(box: str) -> str:
    """What a box of tyro's says is wrong, in one sentence.

    Its parts stand between lines across. A word that is not known is told before what is missing,
    since it may be the misspelt flag that is missing.
    """
    parts = [""]
    for line in box.splitlines()[1:]:
        text = line.strip("│╰╯ ")
        if text and not text.strip("─"):
            parts.append("")
        else:
            parts[-1] = f"{parts[-1]} {text}".strip()

    unknown = [part for part in parts if part.startswith("Unrecognized options:")]
    if not unknown:
        return parts[0].rstrip(".")
    choices = [part for part in parts if part.startswith(("Available", "Perhaps", "Similar"))]
    return "; ".join([*unknown, *choices]).rstrip(".")


def load_config_file(path: Path) -> Config:
    """Runs a Python file and returns the `Config` of its function `get_config`.

    Raises InputError if the file is missing, does not import, or returns something else or unknown
    values.
    """
    if not path.is_file():
        raise InputError(f"config file {path} does not exist{offer_configs(path)}")
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
