"""The help of training: the configurations that there are, and the usual flags in plain words."""

import ast
import difflib
import textwrap
from operator import attrgetter
from pathlib import Path

from r2sm_jax.config import Config

USUAL = (
    ("run DIR", "folder of this run; default: a new one in runs/, and runs/latest points at it"),
    ("resume", "go on with runs/latest, or with --run DIR, where it stopped"),
    ("init RUN", "start from the weights of another run"),
    (
        "data.source SPEC",
        "what to train on: scenes (drawn), json:FILE (annotated photos with queries), compose:FILE "
        "(photos with any masks), cutouts:DIR (objects on transparent ground), tfds:DIR",
    ),
    ("data.images DIR", "folder of the photos, if they are not beside the file"),
    ("data.cutouts DIR", "objects on transparent ground, laid over composed photos as well"),
    ("data.backgrounds DIR", "photos to lay cut-outs over"),
    ("data.scenes N", "pictures to draw or to compose"),
    ("data.fresh", "draw or compose new pictures at every visit, instead of the same ones again"),
    ("data.workers N", "processes that make the pictures of the next steps"),
    ("data.cache-dir DIR", "keep what was prepared for later runs"),
    ("model.head NAME", "what decides: linear, mlp, layers, attention, decoder or a reference"),
    ("model.vision.image-size N", "pixels of the square that the model sees"),
    ("loss.supervise WHICH", "both: learn both masks of every query; requested: the one asked for"),
    ("optimizer.learning-rate X", "peak learning rate"),
    ("train.part WHICH", "segmenter (finds), completer (completes) or outliner (boxes, clicks)"),
    ("train.steps N", "steps of training"),
    ("train.batch-size N", "images a step"),
    ("train.seed N", "another seed gives another run"),
    ("train.evaluate-every N", "steps between quick evaluations"),
    ("train.checkpoint-every N", "steps between checkpoints, from which --resume goes on"),
    ("train.matmul-precision P", "auto, float32, tensorfloat32 or bfloat16"),
)
"""The usual flags, with a word for the value where there is one, and what they do."""

COLUMN = 32
WIDTH = 100


def find_configs() -> list[Path]:
    """The configuration files of this folder, or else of the clone that the package is in."""
    for folder in (Path("configs"), Path(__file__).parents[1] / "configs"):
        paths = sorted(folder.glob("*.py"))
        if paths:
            return paths
    return []


def offer_configs(path: Path) -> str:
    """The end of a sentence about a configuration file that there is not: the nearest one and a
    list of all."""
    names = {config.stem: str(config) for config in find_configs()}
    if not names:
        return "; give the path of a Python file"
    near = difflib.get_close_matches(path.stem, names, n=1)
    offer = f"; did you mean {names[near[0]]}? There" if near else "; there"
    return f"{offer} are {', '.join(names.values())}"


def describe_training(default: Config) -> str:
    """The help of `train`, with the values of a configuration."""
    lines = [
        "usage: python -m r2sm_jax.train [CONFIG.py] [--flag VALUE ...]",
        "",
        "Trains a segmenter and reports on it. Flags override what the file says.",
    ]
    configs = find_configs()
    if configs:
        lines += ["", "configurations:"]
    for path in configs:
        lines += _entry(str(path), _first_sentence(path))

    lines += ["", "usual flags (--help-all lists all):"]
    for flag, words in USUAL:
        name = flag.split()[0].replace("-", "_")
        value = attrgetter(name)(default)
        # None says nothing, and nobody needs to know that a switch is off.
        stated = "" if value is None or value is False else f" (now {value})"
        lines += _entry(f"--{flag}", words + stated)
    return "\n".join(lines)


def _entry(name: str, words: str) -> list[str]:
    """A name and what it means, in two columns."""
    wrapped = textwrap.wrap(words, WIDTH - COLUMN)
    if len(name) > COLUMN - 4:
        return [f"  {name}", *(" " * COLUMN + line for line in wrapped)]
    first = f"  {name:<{COLUMN - 2}}{wrapped[0]}"
    return [first, *(" " * COLUMN + line for line in wrapped[1:])]


def _first_sentence(path: Path) -> str:
    """That of a Python file's docstring. The file is not run."""
    try:
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    except (OSError, ValueError, SyntaxError):
        text = ""
    sentence, _, _ = " ".join(text.split()).partition(". ")
    return sentence.rstrip(".") or "without a description"
