"""Errors that the user can mend: one sentence, exit code 2, no traceback."""

import sys
from collections.abc import Callable
from typing import NoReturn


class InputError(Exception):
    """Bad input. The message names the file, field or flag and the remedy in one sentence, on one line whatever the
    names in it hold."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


def exit_cleanly(main: Callable[[], None]) -> NoReturn:
    """Runs a command's `main`; an `InputError` becomes one line on stderr and exit code 2.

    A closed pipe (`... | head`) ends quietly and Ctrl-C exits with 130, as shells expect.
    """
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    sys.exit(0)
