"""Where samples come from: `SPEC` -> an indexable source of `Sample`s; and where sentences without an image come from.

The only file of the core that imports scenes and queries.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from r2sm_jax.data.samples import Dataset, Source, hold_out, read_json
from r2sm_jax.errors import InputError
from r2sm_jax.queries.sentences import intent_sentences, write_free_sentences
from r2sm_jax.queries.write import ABSENT_SPLIT as ABSENT_SPLIT, SPLITS as SPLITS
from r2sm_jax.query import Sentence
from r2sm_jax.scenes.compose import ComposeSource
from r2sm_jax.scenes.cutouts import CutoutSource
from r2sm_jax.scenes.scenes import SceneSource


def open_source(
    spec: str, split: str = "train", *, count: int = 256, seed: int = 0, size: int = 96, queries: int = 8,
    images_dir: str | None = None, backgrounds: str | None = None, cutouts: str | None = None,
) -> Source:  # fmt: skip
    """Opens `scenes`, `compose:FILE`, `cutouts:DIR`, `json:PATH` or `tfds:DIR`.

    `count`, `seed`, `size` and `queries` are for the first three; `backgrounds` (a folder of photos) is for cut-outs
    only, `cutouts` (a folder of objects) for composed photographs, `images_dir` for files.

    Raises InputError for an unknown SPEC or split, or unreadable data.
    """
    if spec == "scenes":
        return SceneSource(split, count, seed=seed, size=size, queries=queries)
    kind, _, path = spec.partition(":")
    if kind == "cutouts" and path:
        return CutoutSource(path, split, count, seed=seed, size=size, queries=queries, backgrounds=backgrounds)
    if kind == "compose" and path:
        return ComposeSource(
            path, split, count, seed=seed, size=size, queries=queries, images=images_dir, cutouts=cutouts
        )
    if kind == "json" and path:
        return load_json_split(path, split, images_dir=images_dir)
    if kind == "tfds" and path:
        from r2sm_jax.data.tfds import TfdsSource  # imports slowly

        return TfdsSource(Path(path), split)
    raise InputError(f"data source {spec!r} is unknown; use scenes, compose:FILE, cutouts:DIR, json:FILE or tfds:DIR")


def load_json_split(path: str | PathLike[str], split: str, images_dir: str | PathLike[str] | None = None) -> Dataset:
    """The `split` of a folder (its `<split>.json`) or of a single file (see `images_of_split`).

    Raises InputError for a split that does not exist.
    """
    path = Path(path)
    if path.is_dir():
        if (path / f"{split}.json").is_file():
            return read_json(path / f"{split}.json", images_dir)
        there = ", ".join(sorted(file.stem for file in path.glob("*.json"))) or "no JSON file at all"
        raise InputError(f"{path}: there is no {split}.json; the folder has {there}; choose one of these splits")
    dataset = read_json(path, images_dir)
    chosen = images_of_split(path, dataset.image_ids, split)
    return dataset.subset([i for i, image_id in enumerate(dataset.image_ids) if image_id in chosen])


def images_of_split(path: Path, image_ids: Sequence[int], split: str) -> set[int]:
    """The ids of the images of a single file's split: "train", "val" or "all".

    "val" holds out about a tenth of the images, chosen by a hash of the image id alone, so that adding images moves
    none from one side to the other; with fewer than ten images it is exactly one. No image is in both "train" and
    "val", except that a file with a single image gives that image for both. Raises InputError for any other split.
    """
    if split not in ("train", "val", "all"):
        raise InputError(
            f"{path}: a single file has the splits train, val and all, not {split!r}; choose one of these, "
            f"or give a folder with a {split}.json"
        )
    if split == "all" or len(image_ids) < 2:
        return set(image_ids)
    held_out = hold_out(image_ids, 0.1 if len(image_ids) >= 10 else 0.0)
    return held_out if split == "val" else set(image_ids) - held_out


def free_sentences(count: int, *, seed: int) -> list[Sentence]:
    """Sentences about anything, from which the mask-type head alone learns."""
    return write_free_sentences(count, seed=seed)


def calibration_sentences() -> list[Sentence]:
    """Sentences that are never trained on and widened no grammar, on which the temperature of the head is fitted."""
    return list(intent_sentences("calibration"))


def sentence_splits(spec: str) -> dict[str, tuple[Sentence, ...]]:
    """The lists of sentences without an image that a report on `spec` has beside its splits."""
    return {"val_r2sm": intent_sentences("val_r2sm")} if spec == "scenes" else {}
