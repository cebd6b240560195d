"""`python -m r2sm_jax`, or `r2sm`: lists the commands. `r2sm COMMAND ...` runs one, as
`python -m r2sm_jax.COMMAND ...` does."""

import runpy
import sys

from r2sm_jax import __version__
from r2sm_jax.cli import cli_main
from r2sm_jax.errors import InputError

COMMANDS = {
    "predict": "ask about a photo, or a folder of them: masks and overlays",
    "decide": "which mask a sentence asks for, without an image",
    "train": "train a segmenter on drawn scenes, photos or your annotations, and report on it",
    "evaluate": "score a run, or the masks of any other system",
    "ablate": "compare the heads that decide from the sentence: one table and one figure",
    "data": "convert, check, show, compose and complete data sets; write queries",
    "export": "write a run as a folder to share: safetensors, model card, StableHLO",
    "demo": "a web page to try a run on",
}


def main() -> None:
    """Runs the command that the first argument names, or lists all."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: r2sm COMMAND ...   (or python -m r2sm_jax.COMMAND ...)\n")
        for command, words in COMMANDS.items():
            print(f"  {command:<10}{words}")
        print("\nr2sm COMMAND --help says more about one.")
        return
    if name == "--version":
        print(__version__)
        return
    if name not in COMMANDS:
        raise InputError(f"there is no command {name}; give one of {', '.join(COMMANDS)}")

    # The command reads its own arguments, and runs as `python -m` would run it.
    del sys.argv[1]
    runpy.run_module(f"r2sm_jax.{name}", run_name="__main__", alter_sys=True)


def run() -> None:
    """The console command `r2sm`."""
    cli_main(main)


if __name__ == "__main__":
    run()
