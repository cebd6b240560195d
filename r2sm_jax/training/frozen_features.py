"""Features of the training images by frozen vision weights, computed once and kept on disk (`--data.cache-features`).

This needs frozen weights, and images that are the same at every visit.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, UInt8

from r2sm_jax.config import Config
from r2sm_jax.data.batches import PreparedSource
from r2sm_jax.flags import to_json
from r2sm_jax.models.feature_cache import Arrays, FeatureCache, digest
from r2sm_jax.models.r2sm import R2SM


def obstacle_to_caching(config: Config) -> str | None:
    """Why the features of training images cannot be kept, with the flags that would help; None if they can."""
    vision, data = config.model.vision, config.data
    if not (vision.trunk_is_frozen or vision.plain_is_frozen):
        return "no image encoder is frozen (--model.vision.frozen, --model.vision.name)"
    if data.mirror or data.crop < 1 or data.colour_jitter:
        return "images are augmented (--data.no-mirror --data.crop 1 --data.colour-jitter 0)"
    return None


class FrozenImages:
    """`images(index)`: the frozen features of training image `index`, as entries of a batch. Filled by `compute`."""

    def __init__(self, folder: Path, prepared: PreparedSource):
        self.folder, self.prepared = folder, prepared
        self._cache: FeatureCache | None = None
        self._keys: list[str] = []
        self._names: tuple[str, ...] = ()

    def __call__(self, index: int) -> dict[str, np.ndarray]:
        assert self._cache is not None  # for the type checker: `compute` comes before the first batch
        return {f"frozen_{n}": x for n, x in zip(self._names, self._cache[self._keys[index]], strict=True)}

    def compute(
        self, graphdef: nnx.GraphDef, weights: nnx.State, config: Config, *, sharding: jax.sharding.Sharding
    ) -> int:
        """Computes the features that are not in the cache; returns of how many images.

        Raises:
            InputError: the disk has too little space, or a feature does not fit into float16.
        """
        vision, batch_size = config.model.vision, config.train.batch_size
        frozen = [np.asarray(x) for x in jax.tree.leaves(nnx.filter_state(weights["vision"], nnx.Not(nnx.Param)))]
        sizes = to_json(vision) | {"init": vision.init is not None, "name": vision.name is not None}
        cache = FeatureCache(self.folder, digest("vision", sizes, config.model.dtype, *frozen))
        self._keys = [digest(p.image, p.valid) for p in map(self.prepared.__getitem__, range(len(self.prepared)))]
        new = {key: i for i, key in enumerate(self._keys) if key not in cache}

        @jax.jit
        def features(weights: nnx.State, image: UInt8[Array, "b H W 3"], valid: Bool[Array, "b H W"]):
            model: R2SM = nnx.merge(graphdef, weights)
            return model.frozen_features(image, valid)

        def batches() -> Iterator[tuple[str, Arrays]]:
            rows = list(new.items())
            for start in range(0, len(rows), batch_size):
                group = rows[start : start + batch_size]
                padded = [self.prepared[i] for _, i in group + [group[-1]] * (batch_size - len(group))]
                stacked = np.stack([p.image for p in padded]), np.stack([p.valid for p in padded])
                made = features(weights, *jax.device_put(stacked, sharding))
                arrays = [np.asarray(x, np.float32) for x in made if x is not None]
                for row, (key, _) in enumerate(group):
                    yield key, tuple(x[row] for x in arrays)

        one = self.prepared[0]
        spec = jax.eval_shape(features, weights, one.image[None], one.valid[None])
        self._names = tuple(name for name, x in spec._asdict().items() if x is not None)
        if new:
            size = sum(2 * x.size for x in spec if x is not None)
            cache.make_room("images", len(new), size * len(new))
            cache.add(batches())
        self._cache = cache
        return len(new)
