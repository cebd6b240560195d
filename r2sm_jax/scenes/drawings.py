"""How each class is drawn: translates drawings.txt, whose first lines explain its notation, to Python functions."""

from collections.abc import Callable
from importlib.resources import files

import numpy as np

from r2sm_jax.scenes import shapes
from r2sm_jax.scenes.paint import ROLES
from r2sm_jax.scenes.shapes import Part

Drawing = Callable[[np.random.Generator], list[Part]]
"""Draws an object of a class: its parts, which differ from object to object."""
SHAPES = ("belt", "box", "curve", "ellipse", "polygon", "seam", "star", "stroke", "twofold")
CHANGES = ("flipped", "moved", "scaled", "turned")


def read_drawings(text: str) -> dict[str, Drawing]:
    """The drawing of every class."""
    sources: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.replace("\n        ", " ").splitlines():
        if line.startswith("    "):
            lines += _statements(line.strip())
        elif line and not line.startswith("#"):
            lines = sources[line] = ["def draw(rng):", " parts = []"]
    return {category: _compile("\n".join([*lines, " return parts"])) for category, lines in sources.items()}


def _compile(source: str) -> Drawing:
    names = vars(shapes) | {"cos": np.cos, "pi": np.pi}
    exec(compile(source, "drawings.txt", "exec"), names)
    return names["draw"]


def _statements(line: str) -> list[str]:
    """The Python statements for a line of a drawing."""
    if " = " in line:
        return [f" {name} = {_value(value)}" for name, value in (pair.split(" = ") for pair in line.split(", "))]
    condition, words = "", line.split()
    if words[0] in ("if", "unless"):
        condition, words = f"if {'not ' * (words[0] == 'unless')}{words[1]}: ", words[2:]
    if words[0] == "both":
        return [f" {condition}parts += both({_role(words[1])}, {_shape(words[2:])})"]
    return [f" {condition}parts.append(({_role(words[0])}, {_shape(words[1:])}))"]


def _value(text: str) -> str:
    """The Python expression for a value: `0.6..0.9` → `rng.uniform(0.6, 0.9)`."""
    words = text.split()
    if words[0] in SHAPES:
        return _shape(words)
    if words[0] == "chance":
        return f"rng.random() < {words[1]}"
    if words[0] == "integer":
        return f"rng.integers({words[1]})"
    if words[0] in ROLES:
        return f"{_role(words[0])} if rng.random() < {words[1]} else {_role(words[2])}"
    if ".." in text:
        return f"rng.uniform({text.replace('..', ', ')})"
    return f"[{', '.join(f'({word})' for word in words)}]" if "," in text else text


def _role(word: str) -> str:
    return repr(word) if word in ROLES else word


def _shape(words: list[str]) -> str:
    """The Python expression for a shape: `ellipse 0,y r turned=4` → `turned(ellipse((0,y), r), 4)`."""
    name, *values = words
    changes = [word.partition("=") for word in values if word.partition("=")[0] in CHANGES]
    values = [f"({word})" if "," in word else word for word in values if word.partition("=")[0] not in CHANGES]
    expression = f"{name}({', '.join(values)})" if name in SHAPES else name
    for change, _, value in changes:
        expression = f"{change}({expression}, {value})"
    return expression


DRAWINGS = read_drawings(files("r2sm_jax.scenes").joinpath("drawings.txt").read_text(encoding="utf-8"))
CATEGORIES: tuple[str, ...] = tuple(DRAWINGS)
