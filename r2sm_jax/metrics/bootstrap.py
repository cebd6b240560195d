"""Intervals of figures by a bootstrap over images, since the queries of one image are not independent."""

import numpy as np
from jaxtyping import Float, Int

RESAMPLES = 1000
SEED = 0
CHUNK = 100

Ratio = tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]
"""A figure as the ratio of two sums over queries: numerators and denominators, which both are 0 where a query does not
count."""


def interval(
    images: Int[np.ndarray, " n"], ratio: Ratio, *, minus: Ratio | None = None, level: float = 0.95
) -> list[float] | None:
    """The percentile interval of a ratio of sums, or of its difference from `minus` on the same images.

    `images` is the image of each query. None with fewer than two images, or where a resample has no denominator.
    """
    numbers, place = np.unique(images, return_inverse=True)
    count = len(numbers)
    if count < 2:
        return None

    def by_image(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " i"]:
        return np.bincount(place, weights=values, minlength=count)

    sums = [by_image(values) for values in (*ratio, *(minus or ()))]
    rng = np.random.default_rng(SEED)
    drawn: list[np.ndarray] = []
    for start in range(0, RESAMPLES, CHUNK):
        rows = min(CHUNK, RESAMPLES - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size=rows).astype(float)
        totals = [weights @ s for s in sums]
        if any((denominator <= 0).any() for denominator in totals[1::2]):
            return None
        ratios = [a / b for a, b in zip(totals[::2], totals[1::2], strict=True)]
        drawn.append(ratios[0] - ratios[1] if minus else ratios[0])
    low, high = np.quantile(np.concatenate(drawn), [(1 - level) / 2, (1 + level) / 2])
    return [float(low), float(high)]
