"""SAM's image encoder: the same numbers as torch `transformers`, small and with random weights."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax.config import VisionConfig
from r2sm_jax.models.keys import to_transformers_names

torch = pytest.importorskip("torch")
import published_models as published  # noqa: E402

EXACT = 1e-4


def load_encoder(source: Path, image_size: int = published.SAM_IMAGE):
    return published.load_encoder(
        VisionConfig(encoder="sam", sam=str(source), image_size=image_size, patch_size=16)
    )[0]


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sam")
    return published.write(published.sam_config(), folder), folder


def images(size: int, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(batch, size, size, 3)).astype(np.float32)


@nnx.jit
def run(module, x):
    return module(x)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_whole_encoder_of_sam(sam, implementation):
    model, folder = sam
    model.set_attn_implementation(implementation)
    x = images(published.SAM_IMAGE)
    theirs = published.nhwc(model.vision_encoder(published.nchw(x))[0])
    assert published.difference(run(load_encoder(folder), x).tokens, theirs) < EXACT


@pytest.mark.parametrize("size", [48, 112, 192])
def test_sam_at_another_size_interpolates_both_kinds_of_positions(sam, size):
    """`transformers` stretches relative positions on the fly; absolute ones it does not, so torch
    stretches them."""
    model, folder = sam
    config = published.sam_config(size)
    other = published.MODELS["sam"](config).eval().vision_encoder
    weights = dict(model.vision_encoder.state_dict())
    grid = torch.nn.functional.interpolate(
        weights.pop("pos_embed").permute(0, 3, 1, 2), size=(size // 16, size // 16), mode="bicubic"
    )
    table = {k: v for k, v in weights.items() if "rel_pos" in k}
    other.load_state_dict({k: v for k, v in weights.items() if k not in table}, strict=False)
    other.pos_embed.data = grid.permute(0, 2, 3, 1)
    for i, layer in enumerate(other.layers):
        for name in ("rel_pos_h", "rel_pos_w"):
            getattr(layer.attn, name).data = table[f"layers.{i}.attn.{name}"]
    x = images(size)
    ours = run(load_encoder(folder, size), x).tokens
    assert published.difference(ours, published.nhwc(other(published.nchw(x))[0])) < EXACT


def original_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under the names of segment-anything, written down from its modules."""
    rules = (
        (r"vision_encoder\.patch_embed\.projection", "image_encoder.patch_embed.proj"),
        (r"vision_encoder\.layers\.(\d+)\.layer_norm(\d)", r"image_encoder.blocks.\1.norm\2"),
        (r"vision_encoder\.layers", "image_encoder.blocks"),
        (r"vision_encoder\.neck\.conv1", "image_encoder.neck.0"),
        (r"vision_encoder\.neck\.layer_norm1", "image_encoder.neck.1"),
        (r"vision_encoder\.neck\.conv2", "image_encoder.neck.2"),
        (r"vision_encoder\.neck\.layer_norm2", "image_encoder.neck.3"),
        (r"vision_encoder\.", "image_encoder."),
        (
            r"shared_image_embedding\.positional_embedding",
            "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        ),
        (r"prompt_encoder\.point_embed\.", "prompt_encoder.point_embeddings."),
        (r"prompt_encoder\.mask_embed\.", "prompt_encoder.mask_downscaling."),
        (r"(mask_decoder\.transformer.*)\.layer_norm_final_attn", r"\1.norm_final_attn"),
        (r"(mask_decoder\.transformer.*)\.layer_norm(\d)", r"\1.norm\2"),
        (r"mask_decoder\.upscale_conv1", "mask_decoder.output_upscaling.0"),
        (r"mask_decoder\.upscale_layer_norm", "mask_decoder.output_upscaling.1"),
        (r"mask_decoder\.upscale_conv2", "mask_decoder.output_upscaling.3"),
    )
    heads = {"proj_in": "layers.0", "layers.0": "layers.1", "proj_out": "layers.2"}
    renamed = {}
    for key, value in tensors.items():
        for pattern, replacement in rules:
            key, hits = re.subn("^" + pattern, replacement, key)
            if hits:
                break
        if "hypernetworks" in key or "iou_prediction" in key:
            key = re.sub(r"(proj_in|layers\.0|proj_out)", lambda m: heads[m[1]], key)
        renamed[key] = value
    return renamed


def test_the_original_names_give_the_same_weights(sam, tmp_path):
    _, folder = sam
    tensors = load_file(folder / "model.safetensors")
    original = original_names(tensors)
    assert not set(original) & {key for key in tensors if key.startswith("vision")}
    back = to_transformers_names(original)
    used = {k for k in tensors if not k.startswith(("prompt_encoder.point", "prompt_encoder.mask"))}
    assert used <= set(back) and all(np.array_equal(back[k], tensors[k]) for k in used)
    shutil.copy(folder / "config.json", tmp_path)
    save_file(original, tmp_path / "sam_vit_tiny.safetensors")
    ours = nnx.to_flat_state(nnx.state(load_encoder(tmp_path / "sam_vit_tiny.safetensors")))
    expected = dict(nnx.to_flat_state(nnx.state(load_encoder(folder))))
    assert all(np.array_equal(leaf[...], expected[path][...]) for path, leaf in ours)
