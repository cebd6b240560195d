"""Random inputs of a segmenter."""

from typing import Any

import numpy as np

from r2sm_jax.config import ModelConfig
from r2sm_jax.models.r2sm import input_spec


def fake_inputs(config: ModelConfig, batch: int, queries: int, seed: int = 0) -> dict[str, Any]:
    """Random inputs of `input_spec`'s shapes; every query has at least one real token."""
    rng = np.random.default_rng(seed)
    spec = input_spec(config, batch, queries)
    lengths = rng.integers(1, config.text.max_tokens + 1, (batch, queries, 1))
    return {
        "image": rng.integers(0, 256, spec["image"].shape, dtype=np.uint8),
        "image_mask": np.ones(spec["image_mask"].shape, bool),
        "text": rng.normal(size=spec["text"].shape).astype(np.float16),
        "text_mask": np.arange(config.text.max_tokens) < lengths,
    }
