"""Drafts that people correct: which masks are the machine's, and which people drew or changed.

`data complete` writes a field `completed_by` with a hash of the complete mask. A complete mask with
another hash is no longer the machine's.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import COMPLETED_BY, ImageTruth, Instance
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import atomic_write, load_json

OF_MACHINE = ("score", "hidden_probability")
"""Fields of what the machine drew, which say nothing of a mask that people drew."""


def is_of_people(instance: Instance[RLE]) -> bool:
    """Whether people drew or changed the complete mask of an object: its hash is not the stated
    one; or none is stated, something shows, and it is larger than that."""
    if instance.amodal is None or instance.ignore:
        return False
    stated = instance.fields.get(COMPLETED_BY)
    if isinstance(stated, dict):
        return stated.get("segmentation") != masks.digest(instance.amodal)
    visible, whole = masks.areas([instance.modal, instance.amodal])
    return 0 < visible < whole


def hidden_part(instance: Instance[RLE]) -> RLE:
    """What of an object is complete and does not show."""
    return masks.encode(masks.expand(instance.complete) & ~masks.expand(instance.modal))


def without_figures(instance: Instance[RLE]) -> Instance[RLE]:
    """An object that people changed, without what the machine said of its own mask."""
    fields = dict(instance.fields)
    if COMPLETED_BY in fields:
        fields = {name: value for name, value in fields.items() if name not in OF_MACHINE}
    return replace(instance, fields=fields)


def without_lost_targets(truth: ImageTruth) -> ImageTruth:
    """An image without the queries that mean objects which are not there any more."""
    ids = {instance.id for instance in truth.instances}
    queries = tuple(query for query in truth.queries if ids.issuperset(query.instance_ids))
    return replace(truth, queries=queries)


class Finished(NamedTuple):
    """The finished images of a draft, each in a file of its own until all are joined."""

    folder: Path
    model: str
    """Hash of the model that completes them."""

    def path(self, truth: ImageTruth, pixels: UInt8[np.ndarray, "H W 3"]) -> Path:
        """Where the objects of an image lie. Another photo, model or annotation has another
        file."""
        stated = json.dumps([self.model, pixels.shape, asdict(truth)])
        key = hashlib.sha256(stated.encode() + pixels.tobytes()).hexdigest()[:16]
        return self.folder / f"{truth.image_id}-{key}.json"

    def read(self, path: Path, truth: ImageTruth) -> ImageTruth:
        """An image with its finished objects."""
        stored = load_json(path, "the finished objects of an image")
        return replace(truth, instances=tuple(Instance(**one) for one in stored))

    def write(self, path: Path, truth: ImageTruth) -> None:
        """Writes the finished objects of an image. Raises InputError as `atomic_write`."""
        with atomic_write(path) as part:
            part.write_text(json.dumps([asdict(one) for one in truth.instances]), "utf-8")

    def remove(self, paths: Iterable[Path]) -> None:
        """Removes files that were joined. Those of another model or photo stay."""
        for path in paths:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()
