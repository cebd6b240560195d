"""Photographs with TIPS S/14: its patches beside the backbone of `configs/photos.py`, its words for
the mask decoder. MiniLM still decides which mask a sentence asks for.

It was only run for ten steps, with random weights in the published layout: the published file was
out of reach. So nothing is known of how good it is. Where the weights come from: docs/weights.md.

    python -m r2sm_jax.train configs/photos_tips.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from dataclasses import replace
from pathlib import Path

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import MINILM, Config, TextConfig


def get_config() -> Config:
    config = load_config_file(Path(__file__).with_name("photos.py"))
    # 32 x 32 patches of 14 pixels: the 448 pixels that S/14 was trained with last.
    vision = replace(config.model.vision, vit="tips-s14", vit_grid=32)
    # Each of the two language models reads up to 64 tokens.
    text = TextConfig(name="tips-s14", layers=(12,), max_tokens=128, decision_name=MINILM)
    return replace(config, model=replace(config.model, vision=vision, text=text))
