"""`model.stablehlo`: the model as three functions that need only JAX.

encode_text(language model, ids [b t], mask [b t]) -> states [b t l e]
encode_image(weights, image [b S S 3], valid [b S S]) -> features
answer(weights, features, states [b k t l e], mask [b k t]) -> answers

The first argument is the content of a safetensors file, as `safetensors.numpy.load_file` returns
it. Batch size, number of queries and number of tokens are free.
"""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from r2sm_jax.inference.load import Run, fill, flat_weights
from r2sm_jax.models.hub import read_tensors
from r2sm_jax.models.matching import Tensor
from r2sm_jax.models.r2sm import R2SM, ImageFeatures, abstract_model, input_spec
from r2sm_jax.models.text_encoder import abstract_text_encoder, load_text_encoder

Tensors = Mapping[str, Tensor]
"""Arrays by dotted name."""
PLATFORMS = ("cpu", "cuda", "tpu")


def export_functions(run: Run) -> dict[str, bytes]:
    """Lowers the three functions for `PLATFORMS` and serialises them.

    They multiply in float32, whatever JAX's default is. The calibration is part of `answer`.
    """
    config = run.config.model
    calibration = run.predictor.calibration
    text_folder = run.predictor.text_encoder.folder
    text_sizes = abstract_text_encoder(text_folder).sizes

    def model_of(tensors: Tensors) -> R2SM:
        graphdef, shapes = nnx.split(abstract_model(config))
        return nnx.merge(graphdef, fill(shapes, tensors, run.folder))

    def encode_text(tensors: Tensors, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return load_text_encoder(text_folder, tensors).float16_states(ids, mask, config.text.layers)

    def encode_image(tensors: Tensors, image: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        return model_of(tensors).encode_image(image, valid)._asdict()

    def answer(
        tensors: Tensors, features: dict[str, jax.Array], text: jax.Array, text_mask: jax.Array
    ) -> dict[str, jax.Array]:
        image_features = ImageFeatures(**features)
        return model_of(tensors).decode(image_features, text, text_mask, calibration)._asdict()

    # Only shapes are needed: the weights are arguments of the functions.
    weights, text_weights = jax.eval_shape(
        lambda *tensors: tensors, flat_weights(run.predictor.weights), read_tensors(text_folder)
    )
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    image, valid, text, text_mask = input_spec(config, 1, 1).values()
    with jax.default_matmul_precision("float32"):
        features = jax.eval_shape(encode_image, weights, image, valid)
        return {
            "encode_text": _lower(
                encode_text,
                (text_weights, ids, mask),
                ("...", "b, t", "b, t"),
                constraints=[f"t <= {text_sizes.max_tokens}"],
            ),
            "encode_image": _lower(
                encode_image,
                (weights, image, valid),
                ("...", "b, ...", "b, ..."),
            ),
            "answer": _lower(
                answer,
                (weights, features, text, text_mask),
                ("...", "b, ...", "b, k, t, ...", "b, k, t"),
            ),
        }


def _lower(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    shapes: tuple[str, ...],
    constraints: Sequence[str] = (),
) -> bytes:
    """Serialises a function for symbolic shapes, such as "b, k, t"."""
    symbolic = export.symbolic_args_specs(inputs, shapes, constraints=constraints)
    lowered = export.export(jax.jit(function), platforms=PLATFORMS)(*symbolic)
    return bytes(lowered.serialize())


def write_functions(path: Path, functions: Mapping[str, bytes]) -> None:
    """Writes a ZIP file. Its dates are fixed, so equal functions give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in functions.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            file.writestr(info, content, zipfile.ZIP_DEFLATED)
