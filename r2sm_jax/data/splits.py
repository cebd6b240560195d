"""Which images, or files, belong to which split: decided by a hash of their id or name alone.

`dev` selects checkpoints and is held out of `train`, so that no reported split does. Adding images moves hardly any
from one split to another.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from r2sm_jax.errors import InputError

Key = TypeVar("Key", int, str)
WHOLE_TRAIN = "train_with_dev"
"""Split of files: `train` with the images that are held out of it as `dev`; for a run that selects on another split."""
FEW = 10
"""With fewer images than this, one is held out for each split."""


def hold_out(names: Iterable[Key], share: float, key: Callable[[Key], str] = str) -> set[Key]:
    """About this share of some names or numbers, at least one, never all of two or more.

    A hash of `key` alone decides, so that adding others moves hardly any to the other side.
    """
    places = {name: _hash_share(key(name)) for name in names}
    count = sum(place < share for place in places.values())
    return set(sorted(places, key=places.__getitem__)[: max(1, min(count, len(places) - 1))])


def _hash_share(text: str) -> float:
    """A fixed number in [0, 1) for a text; those of many texts are evenly spread."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def divide(names: Iterable[Key], held_out: Mapping[str, float], key: Callable[[Key], str] = str) -> dict[str, set[Key]]:
    """Names or numbers by split: those that are `held_out`, and "train", the rest.

    `held_out` are splits with the share up to which the hash of `key` puts names there, in rising order. No name is in
    two splits, except that too few (fewer than there are splits) are shown again by the splits that come last.
    """
    left, parts = set(names), dict[str, set[Key]]()
    for split, share in held_out.items():
        parts[split] = hold_out(left, share, key)
        left = (left - parts[split]) or left
    return parts | {"train": left}


def divide_images(image_ids: Collection[int], *held_out: str) -> dict[str, set[int]]:
    """Images by split: about a tenth for each of the splits that are `held_out`, and "train", the rest."""
    tenth = 0.0 if len(image_ids) < FEW else 0.1
    return divide(image_ids, {split: tenth * place for place, split in enumerate(held_out, start=1)})


def images_of_split(path: Path, image_ids: Collection[int], split: str) -> set[int]:
    """The ids of the images of a single file's split: "train", "dev", "val", `WHOLE_TRAIN` or "all".

    About a tenth of the images is "val" and another tenth "dev"; with fewer than ten images it is one each. A file of
    two images gives the one that is not "val" for "train" and "dev"; one image is in all splits. Raises InputError for
    any other split.
    """
    parts = divide_images(image_ids, "val", "dev")
    parts |= {WHOLE_TRAIN: parts["train"] | parts["dev"], "all": set(image_ids)}
    if split not in parts:
        raise InputError(
            f"{path}: a single file has the splits train, dev, val and all, not {split!r}; choose one of these, "
            f"or give a folder with a {split}.json"
        )
    return parts[split]


def stored_split(split: str, stored: Collection[str]) -> tuple[str, bool]:
    """The split, of those that are `stored` each by itself, in which the images of `split` are, and whether they are
    a part of it (`divide_images(.., "dev")`): "dev" is held out of "train" unless it is stored itself."""
    if split in ("train", "dev") and "train" in stored and "dev" not in stored:
        return "train", True
    return "train" if split == WHOLE_TRAIN else split, False
