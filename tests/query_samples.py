"""Random objects and the queries that the grammar writes about them."""

import re
from functools import cache

import numpy as np

from r2sm_jax.query import Query
from r2sm_jax.synthetic.queries.nouns import lexicon
from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.queries.sentences import (
    text_only_templates,
    write_text_only_queries,
    written_sentences,
)
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.drawings import CATEGORIES

Queries = tuple[Query, ...]
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "white")
PATTERNS = lexicon().patterns
ALL_CLASSES = lexicon().classes
CLASSES = {name: ALL_CLASSES[name] for name in ALL_CLASSES if name in CATEGORIES}
"""Those of drawn scenes; all others are for photographs."""
GROUPS = {name: g for name, g in lexicon().groups.items() if set(g.classes) & CLASSES.keys()}
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


def random_objects(
    rng: np.random.Generator, photo_names: tuple[str, ...] = ()
) -> list[ObjectFacts]:
    """Overlapping boxes; a later one lies in front of an earlier one. Objects of photos have no
    colour."""
    all_names = photo_names or tuple(CLASSES)
    names = [pick(rng, all_names) for _ in range(6)]
    sizes = rng.uniform(25, 60, (int(rng.integers(5, 11)), 2))
    corners = rng.uniform(0, 192 - sizes)
    boxes = np.concatenate([corners, corners + sizes], axis=1)
    objects = []
    for i, box in enumerate(boxes):
        sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
        overlap = np.clip(sides, 0, None).prod(1)
        overlap[: i + 1] = 0
        area = float(sizes[i].prod())
        colour, pattern = pick(rng, COLOURS), pick(rng, tuple(PATTERNS))
        objects.append(
            ObjectFacts(
                id=i + 1,
                category=pick(rng, names),
                box=tuple(map(float, box)),
                area=area,
                occlusion=min(0.9, float(overlap.sum()) / area),
                hidden_by=tuple(int(j) + 1 for j in np.flatnonzero(overlap)),
                colour=None if photo_names else colour,
                pattern=None if photo_names else pattern,
            )
        )
    return objects


@cache
def all_samples(split, photo_names: tuple[str, ...]) -> list[tuple[list[ObjectFacts], Queries]]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(250):
        objects = random_objects(rng, photo_names)
        samples.append((objects, write_queries(objects, rng=rng, count=8, split=split)))
    return samples


def samples_of(split, num_images=250, photo_names=()) -> list[tuple[list[ObjectFacts], Queries]]:
    """Objects of some images with the queries about them; they are written once."""
    return all_samples(split, photo_names)[:num_images]


def texts_of(split, num_images=250, photo_names=()) -> list[str]:
    samples = samples_of(split, num_images, photo_names)
    return [query.text for _, queries in samples for query in queries]


def text_only() -> list[str]:
    """Every text that the sentences without an image are made of."""
    texts = [text for section in text_only_templates().values() for text in section]
    texts += [sentence.text for sentence in written_sentences()]
    return texts + [sentence.text for sentence in write_text_only_queries(1000, seed=0)]


def has_words(text: str, words: str) -> bool:
    text, words = text.lower(), words.lower()
    return words in text and re.search(rf"\b{re.escape(words)}\b", text) is not None


def clause_of(function: str) -> str:
    """A function without its leading sentence and without "that", which "what" replaces."""
    return function.rpartition(" | ")[2].removeprefix("that ")


def words_of(text: str) -> str:
    """A text in lower case, without punctuation and digits."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))
