"""How an object of each class is drawn: one function a class, with random proportions.

In these functions `w` and `h` are half a width and half a height, and `x`, `y` the position of a
part. Every call of `paint` covers what was painted before it. The order of random numbers is part
of the data: a change gives other scenes.
"""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from r2sm_jax.synthetic.scenes.drawings import animals_vehicles_toys, household, tools_and_food
from r2sm_jax.synthetic.scenes.drawings.shapes import Paint, mirror

# The order of the classes is that of the vocabulary.
DRAWINGS: dict[str, Callable[[Generator, Paint], None]] = {
    "mug": household.draw_mug,
    "bottle": household.draw_bottle,
    "wine glass": household.draw_wine_glass,
    "book": household.draw_book,
    "envelope": household.draw_envelope,
    "pencil": household.draw_pencil,
    "hat": household.draw_hat,
    "shirt": household.draw_shirt,
    "boot": household.draw_boot,
    "apple": tools_and_food.draw_apple,
    "banana": tools_and_food.draw_banana,
    "ice cream": tools_and_food.draw_ice_cream,
    "hammer": tools_and_food.draw_hammer,
    "key": tools_and_food.draw_key,
    "scissors": tools_and_food.draw_scissors,
    "fish": animals_vehicles_toys.draw_fish,
    "cat": animals_vehicles_toys.draw_cat,
    "butterfly": animals_vehicles_toys.draw_butterfly,
    "car": animals_vehicles_toys.draw_car,
    "sailboat": animals_vehicles_toys.draw_sailboat,
    "rocket": animals_vehicles_toys.draw_rocket,
    "ball": animals_vehicles_toys.draw_ball,
    "teddy bear": animals_vehicles_toys.draw_teddy_bear,
    "kite": animals_vehicles_toys.draw_kite,
}
CATEGORIES = tuple(DRAWINGS)

Part = tuple[str, np.ndarray]
"""A role (`paint.ROLES`) and a polygon `[n 2]`."""


def draw_category(category: str, rng: Generator) -> list[Part]:
    """A random object of a class: its parts, the rearmost first."""
    parts: list[Part] = []

    def paint(role: str, shape: np.ndarray, *, both_sides: bool = False) -> None:
        parts.append((role, shape))
        if both_sides:
            parts.append((role, mirror(shape)))

    DRAWINGS[category](rng, paint)
    return parts
