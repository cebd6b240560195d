"""How each class is drawn: the shapes of drawings.txt, and a reader of its notation, which its first lines explain.

Shapes are polygons `[N 2]` in unit coordinates. x runs to the right, y down, and an object lies within about [-1, 1].
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from types import CodeType
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.scenes.paint import ROLES, Part

Point = tuple[float, float]
Drawing = Callable[[np.random.Generator], list[Part]]
"""Draws an object of a class: its parts, which differ from object to object, the rearmost first."""


@cache
def _circle(count: int) -> np.ndarray:
    angle = np.arange(count) * (2 * np.pi / count)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


@cache
def _spline(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The Catmull-Rom basis `[steps 4]`, and the four control points of each of `count` spans `[count 4]`."""
    t = np.arange(steps)[:, None] / steps
    weights = [
        -t + 2 * t**2 - t**3,
        2 - 5 * t**2 + 3 * t**3,
        t + 4 * t**2 - 3 * t**3,
        -(t**2) + t**3,
    ]
    return 0.5 * np.concatenate(weights, 1), (np.arange(count)[:, None] + np.arange(-1, 3)) % count


def polygon(*points: Point) -> np.ndarray:
    """The polygon through the points."""
    return np.array(points)


def ellipse(centre: Point, radii: Point | float, count: int = 28) -> np.ndarray:
    """An ellipse, or a circle of one radius, with `count` corners."""
    return _circle(count) * radii + centre


def box(low: Point, high: Point, radius: float = 0.0) -> np.ndarray:
    """A rectangle, its corners rounded with `radius`."""
    (x0, y0), (x1, y1) = low, high
    if not radius:
        return np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
    corner = _circle(20) * radius
    points = np.concatenate([corner[:6], corner[5:11], corner[10:16], corner[15:], corner[:1]])
    left, top, right, bottom = x0 + radius, y0 + radius, x1 - radius, y1 - radius
    return points + np.repeat([(right, bottom), (left, bottom), (left, top), (right, top)], 6, 0)


def curve(*points: Point, steps: int = 5) -> np.ndarray:
    """A smooth closed curve through the points; a point given twice is a corner."""
    basis, spans = _spline(len(points), steps)
    kept = [k for k, point in enumerate(points) if point != points[k + 1 - len(points)]]
    return (basis @ np.array(points)[spans[kept]]).reshape(-1, 2)


def twofold(*right: Point, smooth: bool = True) -> np.ndarray:
    """A shape that is symmetric about x = 0, from its right half listed from top to bottom."""
    points = [*right, *((-x, y) for x, y in reversed(right))]
    return curve(*points) if smooth else np.array(points)


def flipped(points: np.ndarray) -> np.ndarray:
    """The mirror image about x = 0."""
    return points * (-1.0, 1.0)


def turned(points: np.ndarray, degrees: float, x: float = 0.0, y: float = 0.0) -> np.ndarray:
    """The shape turned clockwise about (x, y)."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return (points - (x, y)) @ np.array([(c, s), (-s, c)]) + (x, y)


def moved(points: np.ndarray, x: float, y: float) -> np.ndarray:
    """The shape moved by (x, y)."""
    return np.add(points, (x, y))


def scaled(points: np.ndarray, factor: float, x: float, y: float) -> np.ndarray:
    """The shape scaled about (x, y)."""
    return factor * (points - (x, y)) + (x, y)


def stroke(*points: Point, width: float, taper: float = 1.0) -> np.ndarray:
    """A thick line through the points; its width goes from `width` to `width * taper`."""
    line = np.array(points, float)
    along = np.gradient(line, axis=0)
    half = np.linspace(width / 2, width * taper / 2, len(line)) / np.hypot(along[:, 0], along[:, 1])
    side = along[:, ::-1] * (-1, 1) * half[:, None]
    return np.concatenate([line + side, (line - side)[::-1]])


SHAPES = {shape.__name__: shape for shape in (box, curve, ellipse, polygon, stroke, twofold)}
CHANGES = {change.__name__: change for change in (flipped, moved, scaled, turned)}
NAMES = {
    "__builtins__": {},
    "cos": np.cos,
    "pi": np.pi,
    **SHAPES,
    **CHANGES,
    **{role: role for role in ROLES},
}
"""What a drawing can use besides the names that it defines."""


def read_drawings(text: str) -> dict[str, Drawing]:
    """The drawing of every class. Tries each line once, so that a mistake shows here and not in a later scene.

    Raises InputError, with the line and the class, for a line that breaks the notation or uses an unknown name.
    """
    drawings: dict[str, Drawing] = {}
    category, steps, names = "no class", [], {}
    for number, line in _numbered_lines(text):
        if not line.startswith(" "):
            category, steps, names = line, [], _names(np.random.default_rng(0), [])
            drawings[category] = partial(_draw, steps)
            continue
        try:
            for statement in _statements(line.strip()):
                steps.append(compile(statement, "drawings.txt", "exec"))
                exec(steps[-1], names)
        except Exception as error:  # a formula can raise whatever Python raises on wrong values
            problem = error.msg if isinstance(error, SyntaxError) else error
            raise InputError(
                f"drawings.txt, line {number} ({category}): {problem}; see its first lines"
            ) from error
    return drawings


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Each line that is no comment, joined with those that continue it, after its number."""
    for match in re.finditer(r"^(?!#) *\S.*(?:\n {8}.*)*", text, re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, re.sub(r"\s*\n\s*", " ", match[0])


def _draw(steps: Sequence[CodeType], rng: np.random.Generator) -> list[Part]:
    parts: list[Part] = []
    names = _names(rng, parts)
    for step in steps:
        exec(step, names)
    return parts


def _names(rng: np.random.Generator, parts: list[Part]) -> dict[str, Any]:
    """What the statements of a drawing can use before they define more; `paint` adds to `parts`."""

    def paint(role: str, shape: np.ndarray, condition: Any, both: bool) -> None:
        if role not in ROLES or np.ndim(shape) != 2:
            raise ValueError("this is not a role and a shape")
        if condition:
            parts.extend([(role, shape), (role, flipped(shape))] if both else [(role, shape)])

    return NAMES | {"rng": rng, "paint": paint}


def _statements(line: str) -> Iterator[str]:
    """A line in Python."""
    if " = " in line:
        for definition in line.split(", "):
            name, text = definition.split(" = ")
            yield f"{name} = {_value(text)}"
        return
    condition = "1"
    if line.startswith(("if ", "unless ")):
        word, condition, line = line.split(maxsplit=2)
        condition = condition if word == "if" else f"not {condition}"
    role, shape = line.removeprefix("both ").split(maxsplit=1)
    yield f"paint({role}, {_shape(shape)}, {condition}, {int(line.startswith('both '))})"


def _value(text: str) -> str:
    """The formula for what stands behind a name."""
    first, *rest = text.split()
    if first in SHAPES:
        return _shape(text)
    if first == "integer":
        return f"rng.integers({rest[0]})"
    if first == "chance":
        return f"rng.random() < {rest[0]}"
    if first in ROLES:
        return f"{first} if rng.random() < {rest[0]} else {rest[1]}"
    if ".." in text:
        return f"rng.uniform({text.replace('..', ',')})"
    return f"({_arguments([first, *rest])})" if "," in text else text


def _shape(text: str) -> str:
    """The formula for a shape with its values and settings, or for the name of one, and for what changes it."""
    name, *words = text.split()
    changes = [word.partition("=") for word in words if word.partition("=")[0] in CHANGES]
    values = [word for word in words if word.partition("=")[0] not in CHANGES]
    formula = f"{name}({_arguments(values)})" if values else name
    for change, _, numbers in changes:
        formula = f"{change}({formula}, {numbers})" if numbers else f"{change}({formula})"
    return formula


def _arguments(words: Sequence[str]) -> str:
    """Numbers, points and settings with commas between them: `0,y r` → `(0,y),r,`."""
    return "".join(f"({word})," if "," in word else f"{word}," for word in words)


DRAWINGS = read_drawings(
    files("r2sm_jax.synthetic.scenes").joinpath("drawings.txt").read_text(encoding="utf-8")
)
CATEGORIES: tuple[str, ...] = tuple(DRAWINGS)
