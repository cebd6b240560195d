"""Random things and the queries that the grammar writes about them."""

import re

import numpy as np

from r2sm_jax.synthetic.queries.nouns import lexicon
from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.scenes.drawings import CATEGORIES

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "white")
ALL_CLASSES, PATTERNS = lexicon().classes, lexicon().patterns
CLASSES = {name: meaning for name, meaning in ALL_CLASSES.items() if name in CATEGORIES}
"""Those of drawn scenes; all others are for photographs."""
GROUPS = {
    name: group for name, group in lexicon().groups.items() if set(group.classes) & CLASSES.keys()
}
SPLITS = ("train", "val", "val_phrasing", "val_hard", "test")
PHOTO_NAMES = (
    "cat litter box",
    "dougnut ",
    "Platypus",
    "A wooden chair",
    "scissors",
    "otter",
    "people",
    "man's hat",
)


def layout(rng: np.random.Generator, photo: tuple[str, ...] = ()) -> list[ObjectFacts]:
    """Random overlapping things; a later one lies in front of an earlier one."""
    names = photo or tuple(CLASSES)
    pool = [names[int(i)] for i in rng.choice(len(names), 6)]
    size = rng.uniform(25, 60, (int(rng.integers(5, 11)), 2))
    start = rng.uniform(0, 192 - size)
    boxes = np.concatenate([start, start + size], axis=1)
    things = []
    for i, box in enumerate(boxes):
        overlap = np.clip(
            np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2]), 0, None
        ).prod(1)
        overlap[: i + 1] = 0
        area = float(size[i].prod())
        colour, pattern = COLOURS[int(rng.integers(9))], tuple(PATTERNS)[int(rng.integers(4))]
        things.append(
            ObjectFacts(
                i + 1,
                pool[int(rng.integers(6))],
                tuple(map(float, box)),
                area,
                min(0.9, float(overlap.sum()) / area),
                tuple(int(j) + 1 for j in np.flatnonzero(overlap)),
                None if photo else colour,
                None if photo else pattern,
            )
        )
    return things


def written(split, scenes=60, photo=(), seed=0, count=8):
    rng = np.random.default_rng(seed)
    for _ in range(scenes):
        things = layout(rng, photo)
        yield things, write_queries(things, rng=rng, count=count, split=split)


def queries_of(split, scenes=100, **kwargs):
    return [query for _, queries in written(split, scenes, **kwargs) for query in queries]


def has_words(text: str, words: str) -> bool:
    text, words = text.lower(), words.lower()
    return words in text and re.search(rf"\b{re.escape(words)}\b", text) is not None
