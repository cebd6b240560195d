"""Boxes and clicks that training draws for some queries, from the true visible masks."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from r2sm_jax.query import MAX_CLICKS, NUM_PROMPT_TOKENS, PointKind

PROMPT_SHARE = 0.5
"""Of the queries about one visible object: they get a box, clicks, or both, equally often."""
WORDLESS_SHARE = 0.5
"""Of these: their words are hidden, so that the prompt alone says what is meant."""
BOX_NOISE = 0.1
"""Standard deviation of each edge of a box, as a share of the side of the box, as in SAM (paper,
appendix A, "training algorithm")."""
MOST_TRAINED_CLICKS = 3
"""Clicks that a prompt has in training. The first is on the object."""
MARGIN = 0.3
"""Negative clicks lie within the box of the object, enlarged by this share of its sides."""


def draw_prompts(
    example: dict[str, Any], rng: np.random.Generator, *, may_hide_words: bool
) -> dict[str, Any]:
    """`prompt_points`, `prompt_kinds` and the new `text_mask` of an example (data/batches.py).

    Args:
        example: its `modal`, `query_instances`, `query_mask` and `text_mask` are read.
        may_hide_words: whether queries may lose their words. A mask-type head that reads the words
            of the queries themselves would have nothing to decide from.
    """
    num_queries = len(example["query_mask"])
    points = np.zeros((num_queries, NUM_PROMPT_TOKENS, 2), np.float32)
    kinds = np.full((num_queries, NUM_PROMPT_TOKENS), PointKind.PADDING, np.int32)
    text_mask = example["text_mask"].copy()

    for k in range(num_queries):
        # Always drawn, so that the draws of a query do not depend on what the ones before it mean.
        has_prompt, is_wordless = rng.random(2) < (PROMPT_SHARE, WORDLESS_SHARE)
        has_box, has_clicks = [(True, False), (False, True), (True, True)][rng.integers(3)]
        instances = np.flatnonzero(example["query_instances"][k])
        if not (has_prompt and example["query_mask"][k] and len(instances) == 1):
            continue
        mask = example["modal"][instances[0]] > 127
        if not mask.any():
            continue

        drawn: list[tuple[float, float, int]] = []
        if has_box:
            drawn += draw_box(mask, rng)
        if has_clicks:
            drawn += draw_clicks(mask, rng)
            if not has_box:
                drawn.append((0.0, 0.0, PointKind.NO_BOX))
        for place, (x, y, kind) in enumerate(drawn):
            points[k, place] = x, y
            kinds[k, place] = kind
        if is_wordless and may_hide_words:
            text_mask[k] = False

    return {"prompt_points": points, "prompt_kinds": kinds, "text_mask": text_mask}


def draw_box(
    mask: Bool[np.ndarray, "s s"], rng: np.random.Generator
) -> list[tuple[float, float, int]]:
    """The corners of a mask's box, moved a little."""
    x0, y0, x1, y1 = box_of(mask)
    noise = rng.normal(0, BOX_NOISE, 4) * [x1 - x0, y1 - y0, x1 - x0, y1 - y0]
    # Half of the boxes are as exact as the grid of the mask: a detector's are.
    if rng.random() < 0.5:
        noise *= 0
    x0, y0, x1, y1 = np.clip(np.array([x0, y0, x1, y1]) + noise, 0, 1)
    return [
        (min(x0, x1), min(y0, y1), PointKind.TOP_LEFT),
        (max(x0, x1), max(y0, y1), PointKind.BOTTOM_RIGHT),
    ]


def draw_clicks(
    mask: Bool[np.ndarray, "s s"], rng: np.random.Generator
) -> list[tuple[float, float, int]]:
    """One to three clicks, the first of them on the mask, the others on it or beside it."""
    size = len(mask)
    x0, y0, x1, y1 = box_of(mask)
    margin_x, margin_y = MARGIN * (x1 - x0), MARGIN * (y1 - y0)
    around = np.zeros_like(mask)
    rows = slice(int(max(0, y0 - margin_y) * size), int(np.ceil((y1 + margin_y) * size)))
    columns = slice(int(max(0, x0 - margin_x) * size), int(np.ceil((x1 + margin_x) * size)))
    around[rows, columns] = True
    beside = around & ~mask

    clicks = []
    for number in range(rng.integers(1, min(MOST_TRAINED_CLICKS, MAX_CLICKS) + 1)):
        is_positive = number == 0 or rng.random() < 0.5 or not beside.any()
        cells = np.argwhere(mask if is_positive else beside)
        row, column = cells[rng.integers(len(cells))]
        x, y = (np.array([column, row]) + rng.random(2)) / size
        clicks.append((x, y, PointKind.POSITIVE if is_positive else PointKind.NEGATIVE))
    return clicks


def box_of(mask: Bool[np.ndarray, "s s"]) -> Float[np.ndarray, " 4"]:
    """x0 y0 x1 y1 of a mask that is not empty, in units of its side."""
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    return np.array(edges, np.float64) / len(mask)
