"""Sizes of published image encoders: they come with the weights, and not from the user's
configuration.

A run stores them in its `inputs.json` and an export in its `config.json`, so that neither needs the
published files to know the shapes of its model.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from r2sm_jax.config import ModelConfig


@dataclass(frozen=True)
class SamSizes:
    """SAM's image encoder. The fields are those of `VisionConfig`."""

    patch_size: int = 16
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    window_size: int = 14
    global_blocks: tuple[int, ...] = (2, 5, 8, 11)
    relative_positions: bool = True
    out_dim: int = 256


@dataclass(frozen=True)
class SamDecoderSizes:
    """SAM's mask decoder. The fields are those of `DecoderConfig`."""

    dim: int = 256
    depth: int = 2
    heads: int = 8
    mlp_dim: int = 2048


@dataclass(frozen=True)
class PlainViTSizes:
    """A plain ViT: DINOv2, CLIP or SigLIP."""

    family: Literal["dinov2", "clip", "siglip"]
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    registers: int = 0
    """Extra tokens inside the blocks, without positions (DINOv2 with registers)."""


@dataclass(frozen=True)
class EfficientNetSizes:
    """An EfficientNet-Lite."""

    block_dims: tuple[int, ...]
    """Channels after each block. Equal ones in a row are a stage."""


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of all published parts of a model; None where it has no such part."""

    sam: SamSizes | None = None
    sam_decoder: SamDecoderSizes | None = None
    vit: PlainViTSizes | None = None
    efficientnet: EfficientNetSizes | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EncoderSizes":
        """The inverse of `cli.to_json`. Raises TypeError for unknown fields."""
        kinds = {
            "sam": SamSizes,
            "sam_decoder": SamDecoderSizes,
            "vit": PlainViTSizes,
            "efficientnet": EfficientNetSizes,
        }
        parts = {}
        for name, fields in values.items():
            if fields is not None:
                # JSON has no tuples.
                fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
                parts[name] = kinds[name](**fields)
        return cls(**parts)


NO_SIZES = EncoderSizes()


def with_sizes(config: ModelConfig, sizes: EncoderSizes) -> ModelConfig:
    """The configuration that a model's modules are built from: SAM's own sizes in place of the
    user's."""
    vision, decoder = config.vision, config.decoder
    if sizes.sam is not None:
        vision = replace(vision, activation="gelu", **asdict(sizes.sam))
    if sizes.sam_decoder is not None and decoder.type == "sam":
        decoder = replace(decoder, **asdict(sizes.sam_decoder))
    return replace(config, vision=vision, decoder=decoder)


# Well-known models, so that scripts/estimate.py needs no download.

# Blocks and channels of the seven stages (tensorflow/tpu, models/official/efficientnet/lite).
LITE_DIMS = (16, 24, 40, 80, 112, 192, 320)
LITE2_DIMS = (16, 24, 48, 88, 120, 208, 352)
LITE0_REPEATS = (1, 2, 2, 3, 3, 4, 1)
LITE1_REPEATS = (1, 3, 3, 4, 4, 5, 1)


def _efficientnet(dims: tuple[int, ...], repeats: tuple[int, ...]) -> EfficientNetSizes:
    blocks: list[int] = []
    for dim, count in zip(dims, repeats, strict=True):
        blocks += [dim] * count
    return EfficientNetSizes(tuple(blocks))


SAM_B = SamSizes()
SAM_L = SamSizes(dim=1024, depth=24, heads=16, mlp_dim=4096, global_blocks=(5, 11, 17, 23))
SAM_H = SamSizes(dim=1280, depth=32, heads=16, mlp_dim=5120, global_blocks=(7, 15, 23, 31))
DINOV2_S = PlainViTSizes("dinov2", dim=384, depth=12, heads=6, mlp_dim=1536, patch_size=14)
DINOV2_B = PlainViTSizes("dinov2", dim=768, depth=12, heads=12, mlp_dim=3072, patch_size=14)
DINOV2_L = PlainViTSizes("dinov2", dim=1024, depth=24, heads=16, mlp_dim=4096, patch_size=14)

KNOWN_SIZES = {
    "hf:facebook/sam-vit-base": EncoderSizes(sam=SAM_B, sam_decoder=SamDecoderSizes()),
    "hf:facebook/sam-vit-large": EncoderSizes(sam=SAM_L, sam_decoder=SamDecoderSizes()),
    "hf:facebook/sam-vit-huge": EncoderSizes(sam=SAM_H, sam_decoder=SamDecoderSizes()),
    "hf:facebook/dinov2-small": EncoderSizes(vit=DINOV2_S),
    "hf:facebook/dinov2-base": EncoderSizes(vit=DINOV2_B),
    "hf:facebook/dinov2-large": EncoderSizes(vit=DINOV2_L),
    "efficientnet-lite0": EncoderSizes(efficientnet=_efficientnet(LITE_DIMS, LITE0_REPEATS)),
    "efficientnet-lite1": EncoderSizes(efficientnet=_efficientnet(LITE_DIMS, LITE1_REPEATS)),
    "efficientnet-lite2": EncoderSizes(efficientnet=_efficientnet(LITE2_DIMS, LITE1_REPEATS)),
}
"""By the name that a flag gives."""
