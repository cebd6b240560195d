"""Names that one example each teaches, without training: an image and the mask of one object.

    teach      example     mean token of the mask               `make_prototype`
    predict    sentence    the taught name that it holds        `TaughtNames.find`
               image       the parts that look like the example `find_similar`

Tokens are those of the image encoder, whose weights no longer change. So a prototype fits one model
only, and a file of names says which.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError, atomic_write, load_json
from r2sm_jax.inference.given_masks import label_parts

SIMILAR_SHARE = 0.5
"""Cells are found from this share of the highest similarity of the image on (docs/log.md)."""
MIN_PART_SHARE = 0.2
"""Parts below this share of the largest one are dropped: they are noise of the similarity."""
NUM_DECIMALS = 4
"""Of the numbers in a file: a name takes about 2 kB."""


class Prototype(NamedTuple):
    """What one example teaches."""

    target: Float[np.ndarray, " d"]
    """Mean token of the cells that the mask covers."""
    image: Float[np.ndarray, " d"]
    """Mean token of the whole image. Tokens have much in common, whatever they show, so cosines are
    taken between differences from this one."""


def make_prototype(
    tokens: Float[np.ndarray, "h w d"], mask: Mask, letterbox: Letterbox
) -> Prototype | None:
    """The prototype of an object; None for one that is too small for the model's frame.

    Args:
        tokens: those of the example's image.
        mask: what shows of the object, at the image's size.
        letterbox: that of the image.
    """
    cells = len(tokens)
    covered = letterbox.coverage(mask, cells).astype(np.float32)
    if not covered.any():
        return None
    inside = _inside(letterbox, cells)
    return Prototype(_weighted_mean(tokens, covered), _weighted_mean(tokens, inside))


def find_similar(
    prototype: Prototype, tokens: Float[np.ndarray, "h w d"], letterbox: Letterbox
) -> tuple[list[Mask], float]:
    """The parts of an image that look like an example, and the highest similarity, a cosine.

    The parts are connected masks `[H W]` of the image's size, the largest first; there are none
    where nothing is more like the example than like the rest of its image.
    """
    direction = _unit(prototype.target - prototype.image)
    similarity = _unit(tokens - prototype.image) @ direction
    similarity = np.where(_inside(letterbox, len(tokens)) > 0, similarity, -1)
    highest = float(similarity.max())
    if highest <= 0:
        return [], highest

    found = letterbox.undo_mask(similarity - SIMILAR_SHARE * highest)
    parts, sizes = label_parts(found)
    sizes[0] = 0  # number 0 is outside of all parts
    numbers = np.flatnonzero(sizes >= max(1, MIN_PART_SHARE * sizes.max()))
    largest_first = sorted(numbers, key=lambda number: -sizes[number])
    return [parts == number for number in largest_first], highest


def _inside(letterbox: Letterbox, cells: int) -> Float[np.ndarray, "h w"]:
    """How much of each cell the image fills; 0 on padding."""
    whole = np.ones((letterbox.height, letterbox.width), bool)
    return letterbox.coverage(whole, cells).astype(np.float32)


def _weighted_mean(
    tokens: Float[np.ndarray, "h w d"], weights: Float[np.ndarray, "h w"]
) -> Float[np.ndarray, " d"]:
    return np.tensordot(weights / weights.sum(), tokens, axes=2)


def _unit(vectors: Float[np.ndarray, "*n d"]) -> Float[np.ndarray, "*n d"]:
    """The vectors with a length of 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-6)


class TaughtNames:
    """Prototypes by name. Capitals and the number of spaces between words do not matter."""

    def __init__(self) -> None:
        self._prototypes: dict[str, Prototype] = {}

    def __len__(self) -> int:
        return len(self._prototypes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._prototypes)

    def __getitem__(self, name: str) -> Prototype:
        return self._prototypes[normalise_name(name)]

    def check(self, name: str, *, replace: bool) -> None:
        """Raises InputError for a name without words, and for one that is taught already unless it
        may be replaced."""
        key = normalise_name(name)
        if not re.search(r"\w", key):
            raise InputError(f"the name {name!r} has no words; give one such as 'part 7'")
        if key in self._prototypes and not replace:
            raise InputError(
                f"the name {name!r} is taught already; give another one, or say that it is to be "
                "replaced (replace=True, or --overwrite)"
            )

    def add(self, name: str, prototype: Prototype, *, replace: bool = False) -> None:
        """Adds a name. Raises InputError as `check`."""
        self.check(name, replace=replace)
        self._prototypes[normalise_name(name)] = prototype

    def find(self, sentence: str) -> str | None:
        """The taught name that a sentence holds as whole words, also in the plural; the longest of
        several. None where there is none."""
        text = normalise_name(sentence)
        # "part 71" does not name "part 7".
        held = [
            name
            for name in self._prototypes
            if re.search(rf"(?<!\w){re.escape(name)}(?:e?s)?(?!\w)", text)
        ]
        return max(held, key=len, default=None)

    def to_json(self) -> dict[str, dict[str, list[float]]]:
        """The prototypes by name, as JSON values."""
        names = {}
        for name, prototype in self._prototypes.items():
            vectors = {}
            for field, vector in prototype._asdict().items():
                vectors[field] = np.round(vector.astype(float), NUM_DECIMALS).tolist()
            names[name] = vectors
        return names

    def save(self, path: Path, model_sha256: str) -> None:
        """Writes all names into a JSON file, in place of one that is there.

        `model_sha256`: hash of the weights of the model that they were taught to. Raises InputError
        if there is no name, or the file cannot be written.
        """
        if not self._prototypes:
            raise InputError(f"{path}: no name is taught yet; teach one first")
        stored = {"model": model_sha256, "names": self.to_json()}
        with atomic_write(path) as part:
            part.write_text(json.dumps(stored, ensure_ascii=False) + "\n", "utf-8")

    def load(self, path: Path, model_sha256: str, *, dim: int, replace: bool = False) -> None:
        """Adds the names of a file that `save` wrote.

        Args:
            model_sha256: hash of the weights of the model that is to use them.
            dim: channels of its descriptors.
            replace: whether they may replace names that are taught already.

        Raises InputError if the file cannot be read, is no file of names, or is that of another
        model, and as `check`. Then none of its names is added.
        """
        prototypes = _read_file(path, model_sha256, dim)
        for name in prototypes:
            self.check(name, replace=replace)
        for name, prototype in prototypes.items():
            self.add(name, prototype, replace=True)


def normalise_name(text: str) -> str:
    """A text in small letters, with single spaces between its words."""
    return " ".join(text.lower().split())


def _read_file(path: Path, model_sha256: str, dim: int) -> dict[str, Prototype]:
    """The prototypes of a file by name. Raises InputError as `TaughtNames.load`."""
    stored = load_json(path, "names that were taught to a model")
    is_object = isinstance(stored, dict) and isinstance(stored.get("names"), dict)
    if not is_object or not isinstance(stored.get("model"), str):
        raise InputError(
            f"{path}: this is no file of taught names; give one that predict --teach or "
            "save_names wrote"
        )
    if stored["model"] != model_sha256:
        raise InputError(
            f"{path}: these names were taught to another model (sha256 of its weights "
            f"{stored['model'][:12]}, of this one {model_sha256[:12]}); teach them to this one"
        )
    prototypes = {}
    for name, vectors in stored["names"].items():
        prototypes[name] = _read_prototype(vectors, dim, f"{path}: the name {name!r}")
    return prototypes


def _read_prototype(vectors: Any, dim: int, where: str) -> Prototype:
    """A prototype from JSON. Raises InputError if it is not two vectors of `dim` numbers."""
    arrays = []
    for field in Prototype._fields:
        try:
            array = np.asarray(vectors[field], np.float32)
        except (TypeError, ValueError, KeyError):
            array = np.zeros(0, np.float32)
        if array.shape != (dim,) or not np.isfinite(array).all():
            raise InputError(
                f"{where} is damaged: its {field!r} has not {dim} numbers; teach it again"
            )
        arrays.append(array)
    return Prototype(*arrays)
