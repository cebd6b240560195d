"""R2SM's COCOA-cls split with a decoder-only language model: r2sm_cocoa_cls.py with SmolLM2-135M in
place of MiniLM. **Not trained here**: no score is known.

Paper: R2SM, arXiv 2506.01795; SmolLM2, arXiv 2502.02737. Data, protocol, batch and rates:
r2sm_cocoa_cls.py.

    python -m r2sm_jax.train configs/r2sm_cocoa_cls_lm.py --data.images IMAGES

The language model is frozen and encodes each sentence once, before training; its 135 M weights stay
in bfloat16. Other models with a layout of docs/weights.md work too: `--model.text.name
hf:Qwen/Qwen3-0.6B --model.text.dim 1024 --model.text.layers 9 18 28`. Memory and cost are those of
r2sm_cocoa_cls.py, plus 0.27 GB for the language model.
"""

from dataclasses import replace
from pathlib import Path

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import Config, TextConfig


def get_config() -> Config:
    config = load_config_file(Path(__file__).with_name("r2sm_cocoa_cls.py"))
    text = TextConfig(name="hf:HuggingFaceTB/SmolLM2-135M", layers=(10, 20, 30), dim=576)
    return replace(config, model=replace(config.model, text=text))
