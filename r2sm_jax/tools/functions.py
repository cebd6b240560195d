"""`model.stablehlo`: the segmenter as three compiled-anywhere functions that need no code of ours.

A zip of `jax.export` artefacts, one a function. The first argument of each is the content of a safetensors file, as
`safetensors.numpy.load_file` gives it; batch, queries and tokens may have any number.

encode_text(language model, ids [b t], mask [b t]) -> states [b t l e]
encode_image(weights, image [b S S 3], valid [b S S]) -> features
answer(weights, features, states [b k t l e], mask [b k t]) -> answers
"""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from r2sm_jax.config import ModelConfig
from r2sm_jax.errors import InputError
from r2sm_jax.models.decoder import PixelFeatures
from r2sm_jax.models.r2sm import R2SM, build_model, input_spec
from r2sm_jax.models.text import abstract_text_encoder, fill_text_encoder

PLATFORMS = ("cpu", "cuda", "tpu")
FUNCTIONS = ("encode_text", "encode_image", "answer")

Tensors = Mapping[str, Any]
"""Arrays by dotted name."""


def named(state: nnx.State) -> dict[str, jax.Array]:
    """The leaves of a state by dotted path."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and shapes of a segmenter, without computing anything."""
    return nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))


def filled(state: nnx.State, tensors: Tensors) -> nnx.State:
    """A state with the values of `tensors`, which holds exactly its dotted paths."""
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, leaf.replace(tensors[".".join(map(str, path))])) for path, leaf in flat])


def make_functions(config: ModelConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`encode_image` and `answer` on dictionaries of arrays."""
    graphdef, state = abstract_model(config)

    def merged(weights: Tensors) -> R2SM:
        return nnx.merge(graphdef, filled(state, weights))

    def encode_image(weights: Tensors, image: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        tokens, pixels = merged(weights).encode_image(image, valid)
        return {"tokens": tokens, **pixels._asdict()}

    def answer(weights: Tensors, features: Tensors, text: jax.Array, text_mask: jax.Array) -> dict[str, jax.Array]:
        pixels = PixelFeatures(**{name: features[name] for name in PixelFeatures._fields})
        return merged(weights).answer(features["tokens"], pixels, text, text_mask)._asdict()

    return encode_image, answer


def export_functions(
    config: ModelConfig, weights: Tensors, language_model: Path, text_weights: Tensors
) -> dict[str, bytes]:
    """The three functions, lowered for `PLATFORMS` and serialised.

    `language_model` is its folder, `text_weights` what its safetensors files hold.

    Raises:
        InputError: it reads its padding, as SigLIP does; then there is no function of any number of tokens.
    """
    encoder = abstract_text_encoder(language_model)
    if encoder.sizes.reads_padding:
        raise InputError(f"{language_model}: a language model that reads its padding (SigLIP) cannot be exported yet")
    encode_image, answer = make_functions(config)
    layers = config.text.layers

    def encode_text(tensors: Tensors, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return fill_text_encoder(language_model, tensors).kept_states(ids, mask, layers)

    spec = input_spec(config, 1, 1)

    def of(name: str, *lead: Any) -> jax.ShapeDtypeStruct:
        """The model's input of this name, with other leading sizes."""
        return jax.ShapeDtypeStruct((*lead, *spec[name].shape[len(lead) :]), spec[name].dtype)

    ours, theirs = shapes(weights), shapes(text_weights)
    # Sizes belong to one function each: what bounds a size must be among its own inputs.
    b, t = export.symbolic_shape("b, t", constraints=[f"t <= {encoder.sizes.max_tokens}"])
    text = [jax.ShapeDtypeStruct((b, t), kind) for kind in (jnp.int32, jnp.bool_)]
    (b,) = export.symbolic_shape("b")
    image = [of("image", b), of("valid", b)]
    b, k, t = export.symbolic_shape("b, k, t")
    features = jax.eval_shape(encode_image, ours, of("image", b), of("valid", b))
    query = [features, of("text", b, k, t), of("text_mask", b, k, t)]
    calls = {
        "encode_text": (encode_text, theirs, *text),
        "encode_image": (encode_image, ours, *image),
        "answer": (answer, ours, *query),
    }
    return {
        name: bytes(export.export(jax.jit(function), platforms=PLATFORMS)(*inputs).serialize())
        for name, (function, *inputs) in calls.items()
    }


def shapes(tensors: Tensors) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types as JAX will take them."""
    kinds = {name: jax.dtypes.canonicalize_dtype(value.dtype) for name, value in tensors.items()}
    return {name: jax.ShapeDtypeStruct(value.shape, kinds[name]) for name, value in tensors.items()}


def write_functions(path: Path, functions: Mapping[str, bytes]) -> None:
    """Writes `model.stablehlo`; the same functions make the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in functions.items():
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
