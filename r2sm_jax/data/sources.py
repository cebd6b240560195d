"""Where samples come from: `SPEC` -> an indexable source of `Sample`s; and where sentences without an image come from.

The only file of the core that imports scenes and queries.
"""

from os import PathLike
from pathlib import Path

from r2sm_jax.config import is_procedural
from r2sm_jax.data.dataset import Dataset, Source, read_json
from r2sm_jax.data.splits import resolve_split, split_ids
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.cutouts import CutoutSource
from r2sm_jax.synthetic.queries.sentences import (
    intent_sentences as intent_sentences,
    write_text_only_queries as write_text_only_queries,
)
from r2sm_jax.synthetic.queries.write import ABSENT_SPLIT as ABSENT_SPLIT, SPLITS as SPLITS
from r2sm_jax.synthetic.scenes.source import SceneSource

REPORTED = "reported"
"""In place of the name of a split: those that a run on the data reports."""


def open_source(
    spec: str,
    split: str = "train",
    *,
    count: int = 256,
    seed: int = 0,
    size: int = 96,
    queries: int = 8,
    images_dir: str | PathLike[str] | None = None,
    backgrounds: str | PathLike[str] | None = None,
    cutouts: str | PathLike[str] | None = None,
    need_images: bool = True,
) -> Source:
    """Opens `scenes`, `compose:FILE`, `cutouts:DIR`, `json:PATH` or `tfds:DIR`.

    `count`, `seed`, `size` and `queries` are for the first three; `backgrounds` (a folder of photos) is for cut-outs
    only, `cutouts` (a folder of objects) for composed photographs, `images_dir` for files. Without `need_images`, a
    JSON file may be alone: its samples then have no image.

    Raises InputError for an unknown SPEC or split, or unreadable data.
    """
    if spec == "scenes":
        return SceneSource(split, count, seed=seed, size=size, queries=queries)
    kind, _, path = spec.partition(":")
    if kind == "cutouts" and path:
        return CutoutSource(
            path, split, count, seed=seed, size=size, queries=queries, backgrounds=backgrounds
        )
    if kind == "compose" and path:
        return ComposeSource(
            path,
            split,
            count,
            seed=seed,
            size=size,
            queries=queries,
            images=images_dir,
            cutouts=cutouts,
        )
    if kind == "json" and path:
        return load_json_split(path, split, images_dir, need_images=need_images)
    if kind == "tfds" and path:
        from r2sm_jax.data.tfds import TfdsSource  # imports slowly

        return TfdsSource(Path(path), split)
    raise InputError(
        f"data source {spec!r} is unknown; use scenes, compose:FILE, cutouts:DIR, json:FILE or tfds:DIR"
    )


def load_json_split(
    path: str | PathLike[str],
    split: str,
    images_dir: str | PathLike[str] | None = None,
    *,
    need_images: bool = True,
) -> Dataset:
    """The `split` of a folder (its `<split>.json`; `dev` is held out of `train.json` where there is no `dev.json`) or
    of a single file (see `split_ids`).

    Raises InputError for a split that does not exist, and as `read_json`.
    """
    file, held_out = Path(path), ("val", "dev")
    if file.is_dir():
        there = stored_splits(file)
        stored, held_out = resolve_split(split, there)
        if stored not in there:
            raise InputError(
                f"{path}: there is no {stored}.json; the folder has {', '.join(there)}; choose one"
            )
        file /= f"{stored}.json"
    dataset = read_json(file, images_dir, need_images=need_images)
    if not held_out:
        return dataset
    chosen = split_ids(file, dataset.image_ids, split, *held_out)
    return dataset.subset(i for i, image_id in enumerate(dataset.image_ids) if image_id in chosen)


def stored_splits(folder: Path) -> list[str]:
    """The splits of a folder: the names of its JSON files. Raises InputError where there is none."""
    if names := sorted(file.stem for file in folder.glob("*.json")):
        return names
    raise InputError(
        f"{folder}: there is no .json file in this folder; give one with train.json, val.json, ..."
    )


def split_names(spec: str, split: str) -> list[str]:
    """The names of the splits that are asked for: some with commas between them, `REPORTED` or "all".

    `REPORTED` are those that a run on these data reports: every val split of scenes, composed photos and cut-outs, val
    of a single file, and whatever else than train and dev is stored. "all" is the same, but the whole of a single file.
    Raises InputError where nothing is stored but train and dev.
    """
    kind, _, path = spec.partition(":")
    if split not in (REPORTED, "all"):
        return split.split(",")
    if is_procedural(spec):
        return [
            n for n in SPLITS if n.startswith("val") and (n != ABSENT_SPLIT or kind == "compose")
        ]
    if kind == "json" and Path(path).is_dir():
        stored = stored_splits(Path(path))
    elif kind == "tfds":
        from r2sm_jax.data.tfds import open_builder  # imports slowly

        stored = list(open_builder(Path(path)).info.splits)
    else:
        return ["val" if split == REPORTED else "all"]
    if names := sorted({*stored} - {"train", "dev"}):
        return names
    raise InputError(
        f"{path}: no split other than train and dev; add one such as val, or give --split train"
    )


def same_data(spec: str, other: str) -> bool:
    """Whether two SPECs name the same data, perhaps by different paths."""
    (kind, _, path), (other_kind, _, other_path) = spec.partition(":"), other.partition(":")
    return kind == other_kind and Path(path).resolve() == Path(other_path).resolve()
