"""Which things are likely where others are: names for queries about what could be there and is not.

A model that refuses only what is far-fetched ("the zebra" in a kitchen) has learnt to recognise
scenes. SAM 3 (arXiv 2511.16719, section 4) trains on hard negatives for the same reason.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import permutations

MIN_WEIGHT = 0.05
"""Of a name that never occurs with what is there: it is asked for as well, but rarely."""
KIND_WEIGHT = 0.3
"""Of a name of the same kind, as a cat is where a dog is."""


class RelatedNames:
    """How often classes are in the same photo, and which are of one kind."""

    def __init__(self, photos: Iterable[Collection[str]], kinds: Mapping[str, str]):
        """`photos`: the classes of each photo. `kinds`: class -> its supercategory, if it has
        one."""
        self._kinds = kinds
        self._num_photos: Counter[str] = Counter()
        self._num_together: Counter[tuple[str, str]] = Counter()
        for photo in photos:
            classes = set(photo)
            self._num_photos.update(classes)
            self._num_together.update(permutations(sorted(classes), 2))

    def weight(self, absent: str, present: Collection[str]) -> float:
        """How likely it is that photos with something of `present` have `absent`, 0..1, with a
        bonus for the same kind."""
        shares = [
            self._num_together[absent, name] / self._num_photos[name]
            for name in present
            if self._num_photos[name]
        ]
        weight = max([MIN_WEIGHT, *shares])
        kind = self._kinds.get(absent)
        if kind is not None and any(self._kinds.get(name) == kind for name in present):
            weight += KIND_WEIGHT
        return weight

    def weights(self, absent: Sequence[str], present: Collection[str]) -> list[float]:
        """The weight of each absent name."""
        return [self.weight(name, present) for name in absent]
