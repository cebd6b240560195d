"""Where samples come from: `SPEC` -> an indexable source of `Sample`s."""

from pathlib import Path

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Instance, Sample, Source, load_json_split
from r2sm_jax.errors import InputError
from r2sm_jax.queries.targets import Thing
from r2sm_jax.queries.write import QUERY_STRIDE, SPLIT_STRIDE, SPLITS, write_queries
from r2sm_jax.query import Query
from r2sm_jax.scenes.cutouts import CutoutSource
from r2sm_jax.scenes.scenes import CATEGORIES, COLOURS, PATTERNS, Scene, draw_scene

PROCEDURAL = ("scenes", "cutouts")
"""Kinds of sources that make as many samples as are asked for, in the splits of `SPLITS`."""


class SceneSource:
    """Procedural scenes: any sample is rebuilt from (seed, split, index)."""

    def __init__(self, split: str, count: int, *, seed: int = 0, size: int = 96, queries: int = 8):
        self.vocabulary = {"category": CATEGORIES, "colour": tuple(COLOURS), "pattern": PATTERNS}
        self.split, self.count, self.seed, self.size, self.queries = split, count, seed, size, queries

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        number = list(SPLITS).index(self.split) * SPLIT_STRIDE + index
        scene = draw_scene(self.seed, number, self.size)
        rng = np.random.default_rng((self.seed, number, 1))
        queries = write_queries(
            things(scene), rng=rng, count=self.queries, split=SPLITS[self.split], first_id=QUERY_STRIDE * number
        )
        instances = tuple(
            Instance(o.id, o.category, o.modal, o.amodal, {"colour": o.colour, "pattern": o.pattern})
            for o in scene.objects
        )
        return Sample(number, f"{self.split}_{index:06d}.png", scene.image, instances, queries)

    def queries_at(self, index: int) -> tuple[Query, ...]:
        return self[index].queries


def things(scene: Scene) -> list[Thing]:
    """What the query grammar is told about a scene. Coordinates are pixels."""
    return [
        Thing(o.id, o.category, masks.box(o.amodal), float(o.amodal.sum()), o.occlusion, o.hidden_by,
              o.colour, o.pattern, masks.box(o.modal))
        for o in scene.objects
    ]  # fmt: skip


def open_source(
    spec: str,
    split: str = "train",
    *,
    count: int = 256,
    seed: int = 0,
    size: int = 96,
    queries: int = 8,
    images_dir: str | None = None,
    backgrounds: str | None = None,
) -> Source:
    """Opens `scenes`, `cutouts:DIR`, `json:PATH` or `tfds:DIR`.

    `count`, `seed`, `size` and `queries` shape procedural scenes and those composed of cut-outs, `backgrounds`
    (a folder of photos) the latter only.

    Raises:
        InputError: unknown SPEC or split, or unreadable data.
    """
    if spec == "scenes":
        if split not in SPLITS:
            raise InputError(f"--split {split!r}: scenes have the splits {', '.join(SPLITS)}")
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


def is_procedural(spec: str) -> bool:
    """Whether a SPEC makes as many samples as are asked for."""
    return spec.partition(":")[0] in PROCEDURAL
