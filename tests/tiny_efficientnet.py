"""Weights of a tiny EfficientNet-Lite under the published keys."""

import numpy as np

from r2sm_jax.models.classifier import HIDDEN_DIM, NUM_CLASSES

DIMS = (4, 6, 6, 8, 10, 12, 14, 16)
"""Channels after each block; the second stage has two blocks."""


def tiny_tensors() -> dict[str, np.ndarray]:
    """Random weights under the published keys."""
    rng, tensors = np.random.default_rng(0), {}

    def add(conv: str, norm: str, *shape: int) -> None:
        tensors[f"{conv}.weight"] = (
            rng.normal(size=shape).astype(np.float32) / np.prod(shape[1:]) ** 0.5
        )
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensors[f"{norm}.{name}"] = rng.uniform(0.5, 1.5, shape[0]).astype(np.float32)
        tensors[f"{norm}.num_batches_tracked"] = np.array(7)

    add("_conv_stem", "_bn0", 32, 3, 3, 3)
    dim, sizes = 32, (3, 3, 3, 5, 3, 5, 5, 3)
    for number, (out, size) in enumerate(zip(DIMS, sizes, strict=True)):
        block, inner = f"_blocks.{number}", dim * (6 if number else 1)
        if number:
            add(f"{block}._expand_conv", f"{block}._bn0", inner, dim, 1, 1)
        add(f"{block}._depthwise_conv", f"{block}._bn1", inner, 1, size, size)
        add(f"{block}._project_conv", f"{block}._bn2", out, inner, 1, 1)
        dim = out
    add("_conv_head", "_bn1", HIDDEN_DIM, dim, 1, 1)
    tensors["_fc.weight"] = rng.normal(size=(NUM_CLASSES, HIDDEN_DIM)).astype(np.float32) / 35
    tensors["_fc.bias"] = rng.normal(size=NUM_CLASSES).astype(np.float32)
    return tensors
