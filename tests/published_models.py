"""Small published models with random weights, as `transformers` writes them, and what torch makes
of them. Needs torch."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from r2sm_jax.models.plain_vit import IMAGENET, NORMALISATION
from r2sm_jax.models.pretrained import VIT_FAMILIES

torch.set_grad_enabled(False)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SAM_IMAGE = 80
"""5 x 5 tokens of 16 pixels, in windows of 2, so that windows are padded."""
TEXT_SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
}
ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
GROUPED = {"num_key_value_heads": 2}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 20,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", ROBERTA),
    "xlm-roberta": ("xlm-roberta", ROBERTA),
    "llama": ("llama", GROUPED),
    "llama, biases and a scaling": (
        "llama",
        GROUPED | BIASES | {"head_dim": 16, "rope_parameters": LLAMA3},
    ),
    "llama, linear scaling": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 20}),
    "qwen3, biases": (
        "qwen3",
        {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True},
    ),
}
"""Name -> `model_type`, and what is not as in all."""


def text_config(name: str) -> transformers.PreTrainedConfig:
    model_type, sizes = TEXT_MODELS[name]
    return transformers.AutoConfig.for_model(model_type, **TEXT_SIZES | sizes)


def image_config(model_type: str) -> transformers.PreTrainedConfig:
    """SAM, or a plain ViT for 48 pixels: 4 x 4 tokens of 12."""
    if model_type == "sam":
        return sam_config()
    sizes = SIZES | {"image_size": 48, "patch_size": 12}
    if not model_type.startswith("dinov2"):
        sizes |= {"intermediate_size": 48}
    elif model_type == "dinov2_with_registers":
        sizes |= {"num_register_tokens": 3}
    if model_type in ("clip", "siglip"):
        text_sizes = SIZES | {"intermediate_size": 48}
        sizes = {"vision_config": sizes, "text_config": text_sizes}
    return transformers.AutoConfig.for_model(model_type, **sizes)


def sam_config() -> transformers.SamConfig:
    vision = SIZES | {
        "output_channels": 16,
        "image_size": SAM_IMAGE,
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
    prompts = {"hidden_size": 16, "image_size": SAM_IMAGE}
    return transformers.SamConfig(
        vision_config=vision, mask_decoder_config=decoder, prompt_encoder_config=prompts
    )


def write(
    config: transformers.PreTrainedConfig,
    folder: Path,
    auto_class: str = "AutoModel",
    dtype: str = "float32",
) -> torch.nn.Module:
    """Makes a model whose every weight matters, saves it, and returns it."""
    torch.manual_seed(0)
    model = getattr(transformers, auto_class).from_config(config).to(getattr(torch, dtype)).eval()
    for name, value in model.named_parameters():
        is_gain = value.ndim == 1 and name.endswith(("weight", "lambda1"))
        if "pos" in name or "token" in name:
            scale = 0.3
        else:
            scale = value[0].numel() ** -0.5 if value.ndim > 1 else 0.2
        value.copy_(float(is_gain) + scale * torch.randn(value.shape))
    model.save_pretrained(folder)
    return model


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.asarray(x, np.float32).transpose(0, 3, 1, 2))


def nhwc(x: torch.Tensor) -> np.ndarray:
    return x.numpy().transpose(0, 2, 3, 1)


def image_tokens(model: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    """Image [b H W 3], normalised by ImageNet's mean and deviation (for SAM as it is) -> patch
    tokens [b h w d], with positions that are interpolated to its size."""
    kind, size = model.config.model_type, x.shape[1]
    if kind == "sam":
        # Relative positions are stretched on the fly; absolute ones are not.
        encoder = copy.deepcopy(model.vision_encoder)
        encoder.patch_embed.image_size = (size, size)
        grid = torch.nn.functional.interpolate(
            encoder.pos_embed.permute(0, 3, 1, 2), size=(size // 16, size // 16), mode="bicubic"
        )
        encoder.pos_embed.data = grid.permute(0, 2, 3, 1)
        return nhwc(encoder(nchw(x))[0])

    mean, std = NORMALISATION[VIT_FAMILIES[kind]]
    pixels = nchw((x * IMAGENET[1] + IMAGENET[0] - mean) / std)
    tower = model.vision_model if kind in ("clip", "siglip") else model
    options = {} if kind.startswith("dinov2") else {"interpolate_pos_encoding": True}
    side = size // 12
    tokens = tower(pixels, **options).last_hidden_state[:, -(side**2) :]
    return tokens.reshape(len(x), side, side, -1).numpy()


def text_states(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """All hidden states [b t l e] in float32 of the language model in a folder."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    out = model(
        input_ids=torch.tensor(ids).long(),
        attention_mask=torch.tensor(mask).long(),
        output_hidden_states=True,
    )
    return torch.stack(out.hidden_states, dim=2).numpy()


def assert_close(ours, theirs) -> None:
    """Arrays that are not trivial differ by 1e-4 at most; `pytest -rP` shows by how much."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape and 0.01 < theirs.std() < 20, (ours.shape, theirs.std())
    largest = np.abs(ours - theirs).max()
    print(f"largest difference {largest:.1e}, standard deviation {theirs.std():.2f}")
    assert largest <= 1e-4


def load(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")
