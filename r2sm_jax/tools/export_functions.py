"""`model.stablehlo`: the segmenter as three functions that need only JAX.

The file is a zip of three serialised `jax.export` functions. Their first argument is the content of a safetensors file,
as `safetensors.numpy.load_file` returns it. Batch size, number of queries and number of tokens are free.

encode_text(language model, ids [b t], mask [b t]) -> states [b t l e]
encode_image(weights, image [b S S 3], valid [b S S]) -> features
answer(weights, features, states [b k t l e], mask [b k t]) -> answers
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from r2sm_jax.config import ModelConfig
from r2sm_jax.cpu import products
from r2sm_jax.errors import InputError
from r2sm_jax.exported import abstract_model, with_values
from r2sm_jax.models.decoder import PixelFeatures
from r2sm_jax.models.r2sm import R2SM, input_spec
from r2sm_jax.models.text import abstract_text_encoder, fill_text_encoder

PLATFORMS = ("cpu", "cuda", "tpu")

Tensors = Mapping[str, Any]
"""Arrays by dotted name."""


def export_functions(
    config: ModelConfig, weights: Tensors, language_model: Path, text_weights: Tensors
) -> dict[str, bytes]:
    """The three functions, lowered for `PLATFORMS` and serialised.

    `language_model` is a folder, `text_weights` the content of its safetensors files.

    Raises:
        InputError: the language model reads its padding, as SigLIP does, so that the number of tokens cannot be free.
    """
    encoder = abstract_text_encoder(language_model)
    if encoder.sizes.reads_padding:
        raise InputError(f"{language_model}: a language model that reads its padding (SigLIP) cannot be exported yet")
    graphdef, state = abstract_model(config)

    def model(tensors: Tensors) -> R2SM:
        return nnx.merge(graphdef, with_values(state, tensors))

    def encode_text(tensors: Tensors, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return fill_text_encoder(language_model, tensors).kept_states(ids, mask, config.text.layers)

    def encode_image(tensors: Tensors, image: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        tokens, pixels = model(tensors).encode_image(image, valid)
        return {"tokens": tokens, **pixels._asdict()}

    def answer(tensors: Tensors, features: Tensors, text: jax.Array, text_mask: jax.Array) -> dict[str, jax.Array]:
        pixels = PixelFeatures(**{name: features[name] for name in PixelFeatures._fields})
        return model(tensors).answer(features["tokens"], pixels, text, text_mask)._asdict()

    spec, ours, theirs = input_spec(config, 1, 1), _shapes(weights), _shapes(text_weights)

    def model_input(name: str, *leading: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading, *spec[name].shape[len(leading) :]), spec[name].dtype)

    # Each function has its own symbolic sizes: a size must be bounded by the function's own inputs.
    b, t = export.symbolic_shape("b, t", constraints=[f"t <= {encoder.sizes.max_tokens}"])
    tokens = [jax.ShapeDtypeStruct((b, t), dtype) for dtype in (jnp.int32, jnp.bool_)]
    (b,) = export.symbolic_shape("b")
    image = [model_input("image", b), model_input("valid", b)]
    b, k, t = export.symbolic_shape("b, k, t")
    with products("float32"):  # the functions keep this precision, whatever program and accelerator runs them
        features = jax.eval_shape(encode_image, ours, model_input("image", b), model_input("valid", b))
        query = [features, model_input("text", b, k, t), model_input("text_mask", b, k, t)]
        exported = {
            function.__name__: export.export(jax.jit(function), platforms=PLATFORMS)(*inputs)
            for function, *inputs in (
                (encode_text, theirs, *tokens),
                (encode_image, ours, *image),
                (answer, ours, *query),
            )
        }
    return {name: bytes(function.serialize()) for name, function in exported.items()}


def _shapes(tensors: Tensors) -> dict[str, jax.ShapeDtypeStruct]:
    dtypes = {name: jax.dtypes.canonicalize_dtype(array.dtype) for name, array in tensors.items()}
    return {name: jax.ShapeDtypeStruct(array.shape, dtypes[name]) for name, array in tensors.items()}


def write_functions(path: Path, functions: Mapping[str, bytes]) -> None:
    """Writes `model.stablehlo`; equal functions give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in functions.items():
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
