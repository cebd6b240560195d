"""Small published models with random weights, as `transformers` writes them. Needs torch."""

from pathlib import Path

import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax.config import ModelConfig, VisionConfig
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published
from r2sm_jax.models.matching import LoadReport
from r2sm_jax.models.pretrained import fill_sizes, load_pretrained

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SAM_IMAGE = 80
"""5 x 5 tokens of 16 pixels, in windows of 2, so that windows are padded."""


def sam_config(image: int = SAM_IMAGE) -> transformers.SamConfig:
    vision = SIZES | {
        "output_channels": 16,
        "image_size": image,
        "mlp_dim": 48,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
    }
    decoder = {
        "hidden_size": 16,
        "mlp_dim": 24,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }
    prompts = {"hidden_size": 16, "image_size": image}
    return transformers.SamConfig(
        vision_config=vision,
        mask_decoder_config=decoder,
        prompt_encoder_config=prompts,
        attn_implementation="eager",
    )


def plain_config(family: str, image: int = 48) -> transformers.PreTrainedConfig:
    """48 pixels: 4 x 4 tokens of 12."""
    sizes = SIZES | {"image_size": image, "patch_size": 12}
    both = {
        "vision_config": sizes | {"intermediate_size": 48},
        "text_config": SIZES | {"intermediate_size": 48},
    }
    return {
        "dinov2": lambda: transformers.Dinov2Config(**sizes),
        "dinov2_with_registers": lambda: transformers.Dinov2WithRegistersConfig(
            **sizes, num_register_tokens=3
        ),
        "clip_vision_model": lambda: transformers.CLIPVisionConfig(**sizes, intermediate_size=48),
        "siglip_vision_model": lambda: transformers.SiglipVisionConfig(
            **sizes, intermediate_size=48
        ),
        "clip": lambda: transformers.CLIPConfig(**both),
        "siglip": lambda: transformers.SiglipConfig(**both),
    }[family]()


MODELS = {
    "sam": transformers.SamModel,
    "dinov2": transformers.Dinov2Model,
    "dinov2_with_registers": transformers.Dinov2WithRegistersModel,
    "clip_vision_model": transformers.CLIPVisionModel,
    "siglip_vision_model": transformers.SiglipVisionModel,
    "clip": transformers.CLIPModel,
    "siglip": transformers.SiglipModel,
}


def write(config: transformers.PreTrainedConfig, folder: Path, seed: int = 0) -> torch.nn.Module:
    """Makes a model whose every weight matters, saves it, and returns it."""
    torch.manual_seed(seed)
    model = MODELS[config.model_type](config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            spread = 0.5 / max(1, value[0].numel()) ** 0.5 if value.ndim > 1 else 0.1
            centre = 1.0 if value.ndim == 1 and name.endswith(("weight", "lambda1")) else 0.0
            value.copy_(
                centre
                + (0.3 if "pos" in name or "token" in name else 2 * spread)
                * torch.randn(value.shape)
            )
    model.save_pretrained(folder)
    return model


def build_encoder(config: VisionConfig) -> VisionEncoder:
    """Ours, with fresh weights; published parts are frozen or adapted."""
    encoder = VisionEncoder(config, dtype=np.dtype("float32"), rngs=nnx.Rngs(0))
    freeze_published(encoder)
    return encoder


def load_encoder(config: VisionConfig) -> tuple[VisionEncoder, LoadReport]:
    """Ours, with published sizes and weights, and what became of them."""
    model = fill_sizes(ModelConfig(vision=config))
    encoder = build_encoder(model.vision)
    graphdef, *parts = nnx.split(encoder, nnx.Param, ...)
    params, constants, matches = load_pretrained(
        model, *(nnx.State({"vision": part}) for part in parts)
    )
    (report,) = matches.values()
    return nnx.merge(graphdef, params["vision"], constants.get("vision", nnx.State({}))), report


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.asarray(x).transpose(0, 3, 1, 2))


def nhwc(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy().transpose(0, 2, 3, 1)


def difference(ours, theirs) -> float:
    """Largest absolute difference of two arrays that are not trivial; `pytest -rP` shows it."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape and 0.01 < theirs.std() < 20, (
        ours.shape,
        theirs.shape,
        theirs.std(),
    )
    largest = float(np.abs(ours - theirs).max())
    print(f"largest difference {largest:.1e}, standard deviation {theirs.std():.2f}")
    return largest


def mask_iou(ours, theirs) -> float:
    """IoU of all pixels above 0."""
    both, either = (
        op(np.asarray(ours) > 0, np.asarray(theirs) > 0).sum()
        for op in (np.logical_and, np.logical_or)
    )
    assert 0 < either < np.asarray(ours).size
    return float(both / either)


def load(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def save(tensors: dict[str, np.ndarray], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")
