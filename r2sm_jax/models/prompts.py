"""Boxes and clicks -> tokens that stand beside the words of a query, or in their place.

The tokens are those of SAM (segment_anything/modeling/prompt_encoder.py): Fourier features of a
point, and a learned embedding of what the point is. With SAM's decoder the embeddings are SAM's own
weights.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from r2sm_jax.models.layers import Linear
from r2sm_jax.query import PointKind


class Prompts(NamedTuple):
    """The points of a prompt for every query."""

    points: Float[Array, "b k p 2"]
    """x y in units of the side of the letterbox frame, 0..1."""
    kinds: Int[Array, "b k p"]
    """`PointKind` of each point."""

    @property
    def mask(self) -> Bool[Array, "b k p"]:
        """False on padding."""
        return self.kinds != PointKind.PADDING


class PromptEncoder(nnx.Module):
    """Points -> tokens."""

    def __init__(self, dim: int, *, pixel_dim: int = 0, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`pixel_dim`: channels of pixel features; tokens of clicks then also tell what the picture
        has there. SAM's do not."""
        init = nnx.initializers.normal(1.0)
        kinds = [nnx.Param(init(rngs.params(), (1, dim))) for _ in range(PointKind.PADDING)]
        self.kinds = nnx.List(kinds)
        self.pixels = Linear(pixel_dim, dim, dtype=dtype, rngs=rngs) if pixel_dim else None

    def __call__(
        self,
        prompts: Prompts,
        frequencies: Float[Array, "2 _f"],
        pixel_features: Float[Array, "b h w c"] | None = None,
    ) -> Float[Array, "b k p d"]:
        """`frequencies` are those of the image tokens' positions."""
        points, kinds = prompts
        angles = 2 * jnp.pi * (2 * points - 1) @ frequencies
        positions = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        positions = jnp.where((kinds == PointKind.NO_BOX)[..., None], 0, positions)

        embeddings = jnp.concatenate([kind[...] for kind in self.kinds])
        # Padding gets the embedding of the last kind, and is never attended to.
        tokens = positions + embeddings[jnp.minimum(kinds, PointKind.NO_BOX)]
        if self.pixels is not None and pixel_features is not None:
            is_click = kinds <= PointKind.POSITIVE
            at_points = self.pixels(sample_pixels(pixel_features, points))
            tokens = tokens + jnp.where(is_click[..., None], at_points, 0)
        return tokens


def sample_pixels(
    features: Float[Array, "b h w c"], points: Float[Array, "b k p 2"]
) -> Float[Array, "b k p c"]:
    """The features of the cells that points lie in."""
    size = features.shape[1]
    cells = jnp.clip((points * size).astype(int), 0, size - 1)
    batch = jnp.arange(len(features))[:, None, None]
    return features[batch, cells[..., 1], cells[..., 0]]


def box_focus(prompts: Prompts, size: int) -> Float[Array, "b k h w"]:
    """1 in the cells of a grid whose centres lie in the box of a query, -1 outside of it; 0
    everywhere where there is no box."""
    points, kinds = prompts
    is_corner = kinds[..., None] == jnp.array([PointKind.TOP_LEFT, PointKind.BOTTOM_RIGHT])
    # [b k 2 2]: corner, then x y. A prompt has at most one box.
    corners = jnp.einsum("bkpe,bkpx->bkex", is_corner.astype(points.dtype), points)
    has_box = is_corner.any((-2, -1))

    centres = (jnp.arange(size) + 0.5) / size
    first, last = corners[:, :, 0, :, None], corners[:, :, 1, :, None]
    inside = (centres >= first) & (centres <= last)  # [b k 2 size]: of x, of y
    in_box = inside[:, :, 1, :, None] & inside[:, :, 0, None, :]
    return jnp.where(has_box[..., None, None], jnp.where(in_box, 1.0, -1.0), 0.0)
