"""The vision encoder: SAM's ViT, from a size that trains on a laptop to the published ones.

Layout follows segment-anything (segment_anything/modeling/image_encoder.py): pre-norm blocks, windowed or global
attention, decomposed relative positions, a two-convolution neck. The `conv` stem is ours: overlapping strided
convolutions whose stride-2 and stride-4 features are handed to the pixel decoder. A published plain ViT (plain_vit.py)
may stand beside it, or in its place: their tokens are joined at the neck.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.layers import MLP, Conv, Linear, freeze
from r2sm_jax.models.lora import projection
from r2sm_jax.models.plain_vit import PlainViT, resize

SAM_VIT_B = VisionConfig(
    image_size=1024, patch_size=16, stem="patch", dim=768, depth=12, heads=12, mlp_dim=3072, window_size=14,
    global_blocks=(2, 5, 8, 11), relative_positions=True, out_dim=256, activation="gelu",
    init="facebook/sam-vit-base",
)  # fmt: skip
"""The published ViT-B; its sizes stand here so that memory can be estimated without the file."""


class VisionFeatures(NamedTuple):
    """What one image becomes. `skips` run from fine (stride 2) to coarse (stride 4); empty for the patch stem."""

    tokens: Float[Array, "b h w d"]
    skips: tuple[Float[Array, "b _h _w _c"], ...]


class FrozenFeatures(NamedTuple):
    """What frozen weights make of an image; None where they are trained. It can be kept
    (training/frozen_features.py)."""

    trunk: Float[Array, "b h w d"] | None = None
    """Of SAM's encoder, before the norms of the neck."""
    plain: Float[Array, "b _y _x e"] | None = None
    """Of the plain ViT."""


class ConvStem(nnx.Module):
    """Halves the resolution log2(patch) times by 3x3 convolutions, with residual ones at each stride from 4 on;
    the strides 2 and 4 are kept as skips."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        steps = config.patch_size.bit_length() - 1
        self.dims = [3] + [min(config.dim, 32 * 2**i) for i in range(steps - 1)] + [config.dim]
        pairs = list(zip(self.dims[:-1], self.dims[1:], strict=True))
        self.convs = nnx.List([nnx.Conv(i, o, (3, 3), strides=2, padding=1, dtype=dtype, rngs=rngs) for i, o in pairs])
        self.residuals = nnx.List(
            [nnx.List([ConvBlock(o, dtype=dtype, rngs=rngs) for _ in range(config.stem_depth)]) for _, o in pairs[1:]]
        )

    def __call__(
        self, image: Float[Array, "b H W 3"]
    ) -> tuple[Float[Array, "b h w d"], tuple[Float[Array, "b _h _w _c"], ...]]:
        skips = [nnx.relu(self.convs[0](image))]
        for conv, residuals in zip(self.convs[1:], self.residuals, strict=True):
            x = conv(skips[-1])
            for residual in residuals:
                x = residual(x)
            skips.append(x)
        return skips[-1], tuple(skips[:2])


class ConvBlock(nnx.Module):
    """A pre-norm residual 3x3 convolution."""

    def __init__(self, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.conv = Conv(dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        return x + self.conv(nnx.relu(self.norm(x)))


class Attention(nnx.Module):
    """Multi-head self-attention on a token grid, with SAM's decomposed relative positions if asked for."""

    def __init__(self, config: VisionConfig, grid: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        head_dim = config.dim // config.heads
        self.heads = config.heads
        rank, alpha = (config.lora_rank, config.lora_alpha) if config.init else (0, 0.0)
        self.qkv = projection(config.dim, 3 * config.dim, rank=rank, alpha=alpha, dtype=dtype, rngs=rngs)
        self.out = projection(config.dim, config.dim, rank=rank, alpha=alpha, dtype=dtype, rngs=rngs)
        shape = (2 * grid - 1, head_dim)  # an array each: one that is shared cannot be donated to the training step
        self.rel_pos_h = nnx.Param(jnp.zeros(shape)) if config.relative_positions else None
        self.rel_pos_w = nnx.Param(jnp.zeros(shape)) if config.relative_positions else None

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        height, width = x.shape[1:3]
        q, k, v = rearrange(self.qkv(x), "b h w (three g d) -> three b g (h w) d", three=3, g=self.heads)
        scores = jnp.einsum("bgqd,bgsd->bgqs", q, k) * q.shape[-1] ** -0.5
        if self.rel_pos_h is not None and self.rel_pos_w is not None:
            grid_q = rearrange(q, "b g (h w) d -> b g h w d", h=height)
            rel_h = jnp.einsum("bghwd,hkd->bghwk", grid_q, _relative(self.rel_pos_h[...], height).astype(q.dtype))
            rel_w = jnp.einsum("bghwd,wkd->bghwk", grid_q, _relative(self.rel_pos_w[...], width).astype(q.dtype))
            scores = rearrange(scores, "b g (h w) (y x) -> b g h w y x", h=height, y=height)
            scores = scores + rel_h[..., :, None] + rel_w[..., None, :]
            scores = rearrange(scores, "b g h w y x -> b g (h w) (y x)")
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
        attended = jnp.einsum("bgqs,bgsd->bgqd", weights, v)
        return self.out(rearrange(attended, "b g (h w) d -> b h w (g d)", h=height))


def _relative(table: Float[Array, "_n d"], size: int) -> Float[Array, "_size _size d"]:
    """Rows of a relative-position table for every (query, key) pair along one axis."""
    offset = (table.shape[0] + 1) // 2 - 1
    return table[jnp.arange(size)[:, None] - jnp.arange(size)[None, :] + offset]


class Block(nnx.Module):
    """Pre-norm ViT block; attention inside windows where `window` > 0."""

    def __init__(self, config: VisionConfig, window: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.window = window
        fast = config.init is None  # published ViTs have channels far from zero
        self.norm1 = nnx.LayerNorm(config.dim, epsilon=1e-6, dtype=dtype, use_fast_variance=fast, rngs=rngs)
        self.attention = Attention(config, window or config.grid, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(config.dim, epsilon=1e-6, dtype=dtype, use_fast_variance=fast, rngs=rngs)
        dims = (config.dim, config.mlp_dim, config.dim)
        self.mlp = MLP(dims, dtype=dtype, rngs=rngs, activation=config.activation)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        normed = self.norm1(x)
        if self.window:
            b, h, w, _ = x.shape
            pad_h, pad_w = -h % self.window, -w % self.window
            normed = jnp.pad(normed, ((0, 0), (0, pad_h), (0, pad_w), (0, 0)))
            rows = (h + pad_h) // self.window
            split = "b (r y) (c x) d -> (b r c) y x d"
            windows = self.attention(rearrange(normed, split, y=self.window, x=self.window))
            back = "(b r c) y x d -> b (r y) (c x) d"
            attended = rearrange(windows, back, b=b, r=rows)[:, :h, :w]
        else:
            attended = self.attention(normed)
        x = x + attended
        return x + self.mlp(self.norm2(x))


class VisionEncoder(nnx.Module):
    """Image -> token grid [b h w d] at stride `patch_size`, with finer skips from a `conv` stem."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        if config.stem == "conv":
            self.stem = ConvStem(config, dtype=dtype, rngs=rngs)
        elif config.stem == "patch":
            size = (config.patch_size, config.patch_size)
            self.stem = nnx.Conv(3, config.dim, size, strides=size, padding="VALID", dtype=dtype, rngs=rngs)
        else:
            self.stem = None
        if self.stem is not None:
            init = nnx.initializers.truncated_normal(0.02)
            self.positions = nnx.Param(init(rngs.params(), (config.grid, config.grid, config.dim)))
            windows = [0 if i in config.global_blocks else config.window_size for i in range(config.depth)]
            self.blocks = nnx.List([Block(config, w, dtype=dtype, rngs=rngs) for w in windows])
            self.neck1 = Linear(config.dim, config.out_dim, use_bias=False, dtype=dtype, rngs=rngs)
        self.neck_norm1 = nnx.LayerNorm(config.out_dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.neck2 = Conv(config.out_dim, config.out_dim, use_bias=False, dtype=dtype, rngs=rngs)
        self.neck_norm2 = nnx.LayerNorm(config.out_dim, epsilon=1e-6, dtype=dtype, rngs=rngs)
        lora = config.lora_rank, config.lora_alpha
        if config.init and (config.frozen or config.lora_rank):
            freeze(self, but=("lora_in", "lora_out"))
        if config.plain.family == "none":
            self.plain = None
        else:
            grid = config.name_grid or config.grid
            self.plain = PlainViT(config.plain, grid, lora=lora, remat=config.remat, dtype=dtype, rngs=rngs)
            if config.name_frozen or config.lora_rank:
                freeze(self.plain, but=("lora_in", "lora_out"))
            # Beside published weights the plain ViT starts without a say, so that they start as they were published.
            init = nnx.initializers.zeros_init() if config.init else nnx.initializers.lecun_normal()
            self.join = Linear(
                config.plain.dim, config.out_dim, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs
            )

    @staticmethod
    def from_pretrained(
        name: str, *, image_size: int | None = None, frozen: bool = False, dtype: str = "float32"
    ) -> "VisionEncoder":
        """SAM's image encoder with published weights: `name` is a folder or a Hugging Face name.

        Positions are interpolated to `image_size` pixels; None = the published size. Raises InputError as
        `vision_weights.load_published`.
        """
        from r2sm_jax.models.published import load_encoder

        return load_encoder(name, image_size=image_size, frozen=frozen, dtype=jnp.dtype(dtype))

    def frozen_features(self, image: Float[Array, "b H W 3"]) -> FrozenFeatures:
        """What stays the same throughout training."""
        trunk = self._trunk(image)[0] if self.config.trunk_is_frozen else None
        return FrozenFeatures(trunk, self.plain(image) if self.plain and self.config.plain_is_frozen else None)

    def __call__(self, image: Float[Array, "b H W 3"], frozen: FrozenFeatures | None = None) -> VisionFeatures:
        """`image` is normalised to zero mean and unit scale; padding is zero. What is given as `frozen` is
        not computed."""
        frozen = frozen or FrozenFeatures()
        if frozen.trunk is not None:
            x, skips = frozen.trunk, ()
        else:
            x, skips = self._trunk(image) if self.stem is not None else (None, ())
        if self.plain is not None:
            plain = self.plain(image) if frozen.plain is None else frozen.plain
            joined = self.join(resize(plain, self.config.grid))
            x = joined if x is None else x + joined
        assert x is not None  # for the type checker: check_config asks for one of the two
        return VisionFeatures(self.neck_norm2(self.neck2(self.neck_norm1(x))), skips)

    def _trunk(self, image: Float[Array, "b H W 3"]) -> tuple[Float[Array, "b h w d"], tuple[jax.Array, ...]]:
        assert self.stem is not None
        stem = self.stem(image)
        x, skips = stem if isinstance(stem, tuple) else (stem, ())
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = jax.checkpoint(block)(x) if self.config.remat else block(x)
        return self.neck1(x), skips
