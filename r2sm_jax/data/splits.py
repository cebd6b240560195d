"""Which images, or files, belong to which split: decided by a hash of their id or name alone.

`dev` selects checkpoints and is held out of `train`, so that no reported split does. Adding images
moves hardly any from one split to another.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from r2sm_jax.errors import InputError

Key = TypeVar("Key", int, str)
WHOLE_TRAIN = "train_with_dev"
"""The split of a file that is `train` and `dev` together, for a run that selects on another one."""
MIN_FOR_SHARES = 10
"""With fewer images than this, one image is held out for each split, and not a tenth."""
COPY = re.compile(r"_([^\W_]+)\.rf\.[^./]+\.\w+$")
"""The end of the name of an augmented copy, as Roboflow writes it: of x.jpg `x_jpg.rf.HASH.jpg`."""


def original_name(file_name: str) -> str:
    """The name of the photo that a file is an augmented copy of; that of the file itself where it
    is none. Copies of one photo belong on one side of every split."""
    return COPY.sub(r".\1", file_name)


def split_by_hash(
    names: Iterable[Key], share: float, key: Callable[[Key], str] = str, least: int = 1
) -> set[Key]:
    """Takes about this share of some names or numbers, never all of two or more.

    At least `least` are taken, and at least as many are left, where there are so many.

    A hash of `key` alone decides, so that adding others moves hardly any to the other side.
    """
    hashes = {name: hashlib.sha256(key(name).encode()).digest() for name in names}
    # Numbers that are evenly spread over [0, 1).
    numbers = {name: int.from_bytes(digest[:6]) / 2**48 for name, digest in hashes.items()}
    count = sum(number < share for number in numbers.values())
    count = max(1, min(max(count, least), len(numbers) - least))
    in_order = sorted(numbers, key=numbers.__getitem__)
    return set(in_order[:count])


def divide(
    names: Iterable[Key], held_out: Mapping[str, float], key: Callable[[Key], str] = str
) -> dict[str, set[Key]]:
    """Divides names or numbers into those that are `held_out`, and "train", the rest.

    `held_out` has an upper bound for each such split, in rising order. With {"val": 0.1, "dev":
    0.2}, "val" gets the names whose hash of `key`, as a number from 0 to 1, is below 0.1, and "dev"
    those from 0.1 to below 0.2. Every split gets at least one name. No name is in two splits unless
    there are fewer names than splits; then the last splits have the same ones.
    """
    rest = set(names)
    parts: dict[str, set[Key]] = {}
    for split, bound in held_out.items():
        # Bounds count from 0, and the names below the bound before have been taken already.
        parts[split] = split_by_hash(rest, bound, key)
        # If a single name is left, this split and all later ones get it.
        rest = (rest - parts[split]) or rest
    return parts | {"train": rest}


def split_ids(path: Path, file_names: Mapping[int, str], split: str, *held_out: str) -> set[int]:
    """The ids of the images of one split of a file, of which `file_names` has the names.

    Augmented copies of a photo go where the first of them goes. `split` is "train", one that is
    `held_out` of it, `WHOLE_TRAIN` or "all". About a tenth of the photos is held out for each of
    `held_out`, by default "val" and "dev", which are those of a single file; one photo each if
    there are fewer than ten. Raises InputError for any other split; `path` names the images.
    """
    first_ids: dict[str, int] = {}
    for image_id in sorted(file_names):
        first_ids.setdefault(original_name(file_names[image_id]), image_id)

    # No hash is below 0, and then a split takes the one image with the lowest.
    tenth = 0.0 if len(first_ids) < MIN_FOR_SHARES else 0.1
    bounds = {}
    for number, name in enumerate(held_out or ("val", "dev"), start=1):
        bounds[name] = tenth * number
    parts = divide(first_ids.values(), bounds)
    parts |= {WHOLE_TRAIN: parts["train"] | parts["dev"], "all": set(first_ids.values())}
    if split not in parts:
        raise InputError(
            f"{path}: a single file has the splits train, dev, val and all, not {split!r}; choose "
            "one of these, "
            f"or give a folder with a {split}.json"
        )
    names = file_names.items()
    return {image_id for image_id, name in names if first_ids[original_name(name)] in parts[split]}


def resolve_split(split: str, stored: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """The stored split that has the images of `split`, and the splits that are held out of it.

    `stored` are the splits with a file of their own. "dev" is held out of "train" unless it is
    stored; nothing else is held out.
    """
    if split in ("train", "dev") and "train" in stored and "dev" not in stored:
        return "train", ("dev",)
    return "train" if split == WHOLE_TRAIN else split, ()
