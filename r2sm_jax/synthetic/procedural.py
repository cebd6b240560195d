"""The base of all sources that make their pictures, rebuilt from (seed, split, index)."""

from abc import abstractmethod
from dataclasses import replace

import numpy as np

from r2sm_jax.data.dataset import Sample, Source
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query
from r2sm_jax.synthetic.queries.write import ABSENT_SPLIT, SPLITS, TEST_SPLIT, write_queries
from r2sm_jax.synthetic.scenes.scene import Scene, forbidden_targets

MIN_SIZE = 16  # pixels; at 8 a drawing can vanish
SPLIT_STRIDE = 10_000_000  # numbers of scenes of different splits never meet
QUERY_STRIDE = 1000  # ids of queries of different scenes never meet


class ProceduralSource(Source):
    """A source of made scenes.

    Subclasses make the scene of a number and may change how queries are written.

    Attributes:
        splits: The splits that the source has.
    """

    is_procedural = True
    splits: tuple[str, ...] = tuple(
        split for split in SPLITS if split not in (ABSENT_SPLIT, TEST_SPLIT)
    )

    def __init__(self, split: str, count: int, *, seed: int = 0, size: int = 96, queries: int = 8):
        """`count` scenes of `size` by `size` pixels, each with up to `queries` queries.

        Raises InputError for an unknown split, a negative count, and a size below `MIN_SIZE`.
        """
        if count < 0:
            raise InputError(f"{count} pictures cannot be made; give 0 or more")
        if size < MIN_SIZE:
            raise InputError(
                f"pictures of {size} pixels are too small to hold objects; give {MIN_SIZE} or more"
            )
        if split not in self.splits:
            raise InputError(
                f"--split {split!r}: these data have the splits {', '.join(self.splits)}"
            )
        self.split = split
        self.count = count
        self.seed = seed
        self.size = size
        self.queries = queries

    @abstractmethod
    def make_scene(self, number: int) -> Scene:
        """The scene of a number that no other scene of any split has."""

    def write_queries(self, scene: Scene, rng: np.random.Generator) -> tuple[Query, ...]:
        """The queries about a scene, without ids."""
        return write_queries(
            scene.facts,
            rng=rng,
            count=self.queries,
            split=SPLITS[self.split],
            forbidden=forbidden_targets(scene.instances),
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """Scene `index` with its queries. Raises IndexError from `count` on."""
        return self.at_visit(index, 0)

    def at_visit(self, index: int, visit: int) -> Sample:
        """Another scene in place of scene `index` at each visit; at visit 0 that scene itself.

        It is the one that a source of more scenes has as number `visit * count + index`. Raises
        IndexError from `count` on.
        """
        if not 0 <= index < self.count:
            raise IndexError(index)

        # Ten million scenes are different, then they come again.
        num_visits = max(1, SPLIT_STRIDE // self.count)
        first = visit % num_visits * self.count
        number = list(SPLITS).index(self.split) * SPLIT_STRIDE + first + index
        scene = self.make_scene(number)
        # Queries have a generator of their own, so that a change in the picture leaves them alone.
        rng = np.random.default_rng((self.seed, number, 1))
        queries = self.write_queries(scene, rng)
        numbered = enumerate(queries, start=QUERY_STRIDE * number + 1)
        queries = tuple(replace(query, id=query_id) for query_id, query in numbered)
        file_name = f"{self.split}_{first + index:06d}.png"
        return Sample(number, file_name, scene.image, scene.instances, queries)
