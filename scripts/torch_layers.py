"""Layers and the image part of scripts/torch_peer.py, in PyTorch.

Images are [b h w c]; a convolution sees them as [b c h w] in channels-last memory, which is the faster layout on CPUs.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from r2sm_jax.config import ModelConfig, VisionConfig
else:
    ModelConfig = VisionConfig = SimpleNamespace

PLACE = 4
"""Channels of a pixel's place."""


def pool(x: Tensor, cell: int) -> Tensor:
    """Means of squares of [b h w c]."""
    return F.avg_pool2d(x.permute(0, 3, 1, 2), cell).permute(0, 2, 3, 1)


class Conv(nn.Conv2d):
    """A 3x3 convolution of [b h w c], padded by 1."""

    def __init__(self, in_dim: int, out_dim: int, *, stride: int = 1, bias: bool = True):
        super().__init__(in_dim, out_dim, 3, stride=stride, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ConvBlock(nn.Module):
    """A pre-norm residual 3x3 convolution."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.conv = Conv(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


class MLP(nn.Module):
    """Dense layers with GELU (tanh) between them."""

    def __init__(self, *dims: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(dims))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x), approximate="tanh")
        return self.layers[-1](x)


def attend(query: Tensor, key: Tensor, value: Tensor, *, heads: int, mask: Tensor | None = None) -> Tensor:
    """Multi-head attention of [n s d]. `mask` is bool [n s], False on hidden keys, or a bias [n q s] of the scores."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    mask = mask if mask is None else mask[:, None, None] if mask.ndim == 2 else mask[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention with separate projections."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out(attend(self.query(x), self.key(key), self.value(value), heads=self.heads, mask=mask))


# The image


class ConvStem(nn.Module):
    """Strided convolutions, each but the first followed by residual ones; returns all features, from fine to coarse."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        halvings = config.patch_size.bit_length() - 1
        self.dims = [3, *(min(config.dim, 32 * 2**i) for i in range(halvings - 1)), config.dim]
        self.convs = nn.ModuleList(Conv(i, o, stride=2) for i, o in pairwise(self.dims))
        self.residuals = nn.ModuleList(
            nn.ModuleList(ConvBlock(dim) for _ in range(config.stem_depth)) for dim in self.dims[2:]
        )

    def forward(self, image: Tensor) -> list[Tensor]:
        features = [F.relu(self.convs[0](image))]
        for conv, residuals in zip(self.convs[1:], self.residuals, strict=True):
            x = conv(features[-1])
            for residual in residuals:  # type: ignore[attr-defined]  (a ModuleList holds Modules to pyright)
                x = residual(x)
            features.append(x)
        return features


class GridAttention(nn.Module):
    """Self-attention of all tokens of a grid [b h w d]."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x.flatten(1, 2)).chunk(3, dim=-1)
        return self.out(attend(query, key, value, heads=self.heads)).view(x.shape)


class Block(nn.Module):
    """A pre-norm ViT block."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attention = GridAttention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config.dim, config.mlp_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionEncoder(nn.Module):
    """Image -> tokens [b h w d] and the finer features of the stem."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        grid = config.image_size // config.patch_size
        self.stem = ConvStem(config)
        self.positions = nn.Parameter(torch.zeros(grid, grid, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.neck1 = nn.Linear(config.dim, config.out_dim, bias=False)
        self.neck_norm1 = nn.LayerNorm(config.out_dim, eps=1e-6)
        self.neck2 = Conv(config.out_dim, config.out_dim, bias=False)
        self.neck_norm2 = nn.LayerNorm(config.out_dim, eps=1e-6)

    def forward(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        *skips, x = self.stem(image)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.neck_norm2(self.neck2(self.neck_norm1(self.neck1(x)))), skips


def add_places(pixels: Tensor) -> Tensor:
    """Pixel features [b h w c] with x, y, x², y² of each pixel as 4 more channels."""
    b, size, _, _ = pixels.shape
    at = (torch.arange(size) + 0.5) / size * 2 - 1
    x, y = torch.meshgrid(at, at, indexing="xy")
    places = 2 * torch.stack([x, y, x**2, y**2], dim=-1)
    return torch.cat([pixels, places.to(pixels.dtype).expand(b, size, size, PLACE)], dim=-1)


class PixelFeatures(NamedTuple):
    """At half and at full mask resolution; `canvas` is `fine` with places, which masks are drawn on."""

    coarse: Tensor
    fine: Tensor
    canvas: Tensor


class Upscale(nn.Module):
    """Doubles the resolution: a dense layer and a pixel shuffle, plus a projected skip."""

    def __init__(self, in_dim: int, out_dim: int, skip_dim: int):
        super().__init__()
        self.up = nn.Linear(in_dim, 4 * out_dim)
        self.skip = nn.Linear(skip_dim, out_dim)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        shuffled = self.up(x).view(b, h, w, 2, 2, -1).transpose(2, 3).reshape(b, 2 * h, 2 * w, -1)
        return shuffled + self.skip(skip)


class PixelDecoder(nn.Module):
    """Tokens and the two skips next to them -> pixel features at 4 times the resolution of the tokens."""

    def __init__(self, config: ModelConfig, skip_dims: list[int]):
        super().__init__()
        decoder = config.decoder
        self.coarse = Upscale(config.vision.out_dim, decoder.fine_dim, skip_dims[-1])
        self.refine = ConvBlock(decoder.fine_dim)
        self.fine = Upscale(decoder.fine_dim, decoder.mask_dim, skip_dims[-2])
        self.norm = nn.LayerNorm(decoder.mask_dim, eps=1e-6)
        self.out = nn.Linear(decoder.mask_dim, decoder.mask_dim)

    def forward(self, tokens: Tensor, skips: list[Tensor]) -> PixelFeatures:
        coarse = self.refine(self.coarse(tokens, skips[-1]))
        fine = self.fine(coarse, skips[-2])
        fine = fine + self.out(F.relu(self.norm(fine)))
        return PixelFeatures(coarse, fine, add_places(fine))
