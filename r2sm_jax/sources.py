"""Where samples come from: `SPEC` -> an indexable source of `Sample`s; and where sentences without an image come from.

The only file of the core that imports scenes and queries.
"""

from pathlib import Path

from r2sm_jax.data.samples import Source, load_json_split
from r2sm_jax.errors import InputError
from r2sm_jax.queries.sentences import intent_sentences, write_free_sentences
from r2sm_jax.queries.write import SPLITS as SPLITS
from r2sm_jax.query import Sentence
from r2sm_jax.scenes.cutouts import CutoutSource
from r2sm_jax.scenes.scenes import SceneSource


def open_source(
    spec: str, split: str = "train", *, count: int = 256, seed: int = 0, size: int = 96, queries: int = 8,
    images_dir: str | None = None, backgrounds: str | None = None,
) -> Source:  # fmt: skip
    """Opens `scenes`, `cutouts:DIR`, `json:PATH` or `tfds:DIR`.

    `count`, `seed`, `size` and `queries` are for procedural scenes and for those composed of cut-outs; `backgrounds` (a
    folder of photos) is for the latter only. Raises InputError for an unknown SPEC or split, or unreadable data.
    """
    if spec == "scenes":
        return SceneSource(split, count, seed=seed, size=size, queries=queries)
    kind, _, path = spec.partition(":")
    if kind == "cutouts" and path:
        return CutoutSource(path, split, count, seed=seed, size=size, queries=queries, backgrounds=backgrounds)
    if kind == "json" and path:
        return load_json_split(path, split, images_dir=images_dir)
    if kind == "tfds" and path:
        from r2sm_jax.data.tfds import TfdsSource  # imports slowly

        return TfdsSource(Path(path), split)
    raise InputError(f"data source {spec!r} is unknown; use scenes, cutouts:DIR, json:FILE or tfds:DIR")


def free_sentences(count: int, *, seed: int) -> list[Sentence]:
    """Sentences about anything, from which the mask-type head alone learns."""
    return write_free_sentences(count, seed=seed)


def calibration_sentences() -> list[Sentence]:
    """Sentences written by hand and never trained on, on which the temperature of the mask type is fitted."""
    return list(intent_sentences())
