"""The frozen language model of a folder, by the layout that its `config.json` names: three, and no more."""

from collections.abc import Mapping
from pathlib import Path

from flax import nnx
from transformers import AutoConfig

from r2sm_jax.errors import InputError
from r2sm_jax.models.text_bert import BertEncoder
from r2sm_jax.models.text_clip import ClipTextEncoder
from r2sm_jax.models.text_decoder import DecoderEncoder
from r2sm_jax.models.text_encoder import TextEncoder
from r2sm_jax.models.weights import Tensor, fill, read_config, read_tensors

Layout = type[BertEncoder] | type[ClipTextEncoder] | type[DecoderEncoder]

LAYOUTS: dict[str, tuple[Layout, tuple[str, ...]]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), (BertEncoder, ("gelu",))),
    **dict.fromkeys(
        ("clip", "clip_text_model", "siglip", "siglip_text_model"),
        (ClipTextEncoder, ("gelu", "quick_gelu", "gelu_pytorch_tanh")),
    ),
    **dict.fromkeys(("llama", "qwen2", "qwen3"), (DecoderEncoder, ("silu",))),
}
"""`model_type` -> the layout and the activations that it may have."""


def abstract_text_encoder(folder: Path) -> TextEncoder:
    """The structure and shapes of a Hugging Face folder's language model, by its `config.json`.

    Raises:
        InputError: the file is missing or unreadable, or the architecture is another one.
    """
    path, raw = folder / "config.json", read_config(folder)
    name = raw.get("model_type")
    if name not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise InputError(f"{path}: model_type {name!r} is not a language model that can be loaded; these are: {known}")
    layout, activations = LAYOUTS[name]
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config = getattr(config, "text_config", config)
        activation = config.hidden_act
        encoder = nnx.eval_shape(lambda: layout(config, rngs=nnx.Rngs(0))) if activation in activations else None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # whatever `transformers` or strange values raise
        line = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"{path}: not a readable configuration of {name} ({type(error).__name__}: {line})") from None
    if encoder is None:
        raise InputError(
            f"{path}: activation {activation!r} is not one that {name} can be loaded with: {', '.join(activations)}"
        )
    return encoder


def load_text_encoder(folder: Path) -> TextEncoder:
    """The language model of a Hugging Face folder, with weights in the type that the file has.

    Raises:
        InputError: as `abstract_text_encoder`; or the weights are missing or damaged, or any key or shape does not fit
            (all of them are listed).
    """
    return fill_text_encoder(folder, read_tensors(folder))


def fill_text_encoder(folder: Path, tensors: Mapping[str, Tensor]) -> TextEncoder:
    """The same with weights that were read, or are traced."""
    encoder = abstract_text_encoder(folder)
    graphdef, state = nnx.split(encoder)
    filled = fill(
        state, tensors, encoder.KEYS, where=folder, prefix=encoder.PREFIX, unused=encoder.UNUSED, keep_types=True
    )
    return nnx.merge(graphdef, filled)
