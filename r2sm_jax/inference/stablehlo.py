"""`model.stablehlo`: the model as three functions that need only JAX, and their comparison with the
run.

encode_text(language model, ids [b t], mask [b t]) -> states [b t l e]
encode_image(weights, image [b S S 3], valid [b S S]) -> features
answer(weights, features, states [b k t l e], mask [b k t]) -> answers

The first argument is the content of a safetensors file, as `safetensors.numpy.load_file` returns
it. Batch size, number of queries and number of tokens are free.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from safetensors.numpy import load_file, save_file
from scipy.special import expit

from r2sm_jax.data.dataset import Sample
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import Run, fill_shapes, load_run
from r2sm_jax.inference.predictor import Photo, Predictor
from r2sm_jax.language.encoder import abstract_text_encoder, load_text_encoder
from r2sm_jax.models.hub import read_tensors
from r2sm_jax.models.matching import Tensor, flat_weights
from r2sm_jax.models.r2sm import R2SM, ImageFeatures, R2SMOutput, abstract_model, input_spec
from r2sm_jax.query import AMODAL, MODAL

Tensors = Mapping[str, Tensor]
"""Arrays by dotted name."""
PLATFORMS = ("cpu", "cuda", "tpu")
NUM_QUERIES = 4
"""Of each image on which run and export are compared."""
MAX_DIFFERENCE = 1e-4
"""Of mask logits and probabilities from the same token states: what float32 rounding explains."""


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
        return nnx.merge(graphdef, fill_shapes(shapes, tensors, run.folder))

    def encode_text(tensors: Tensors, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return load_text_encoder(text_folder, tensors).float16_states(ids, mask, config.text.layers)

    def encode_image(tensors: Tensors, image: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        features = model_of(tensors).encode_image(image, valid)._asdict()
        return {name: value for name, value in features.items() if value is not None}

    def answer(
        tensors: Tensors, features: dict[str, jax.Array], text: jax.Array, text_mask: jax.Array
    ) -> dict[str, jax.Array]:
        image_features = ImageFeatures(**features)
        output = model_of(tensors).decode(image_features, text, text_mask, calibration)
        return answers_by_name(output)

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


def answers_by_name(output: R2SMOutput) -> dict[str, Any]:
    """Names what `answer` returns: its masks are `modal` and `amodal`, `[b k q h w]`."""
    answers = output._asdict()
    masks = answers.pop("masks")
    answers["modal"] = masks[..., MODAL, :, :]
    answers["amodal"] = masks[..., AMODAL, :, :]
    return answers


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
    """Writes a ZIP file. Its dates are those of `ZipInfo`, so equal functions give equal bytes."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in functions.items():
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


# Comparison with the run


def verify(run: Run, folder: Path, samples: Sequence[Sample]) -> str:
    """Returns the largest differences between a run and its export, in a few lines.

    Three programs predict: the run, the export as `load_run` opens it, and the export's
    StableHLO in a new process that does not import this package.

    Args:
        samples: images of the size of the model, with `NUM_QUERIES` queries each and more.

    Raises InputError if the differences are larger than rounding explains, or the StableHLO does
    not run.
    """
    exported = load_run(folder).predictor
    size = exported.config.vision.image_size
    photos, queries = [], []
    for number, sample in enumerate(samples):
        photos.append(exported.frame(sample.image[: size - 7 * number]))  # of several shapes
        queries.append([query.text for query in sample.queries[:NUM_QUERIES]])

    expected = _predict(run.predictor, photos, queries)
    answers = {
        "safetensors": _predict(exported, photos, queries),
        "StableHLO without r2sm_jax": _run_stablehlo(folder, exported, photos, queries),
    }
    lines = [
        f"verified on {len(photos)} images x {NUM_QUERIES} queries; largest differences from the "
        "run:"
    ]
    for title, answer in answers.items():
        lines.append(f"  {title}: {_check_differences(f'{folder}: {title}', expected, answer)}")
    return "\n".join(lines)


def _predict(
    predictor: Predictor, photos: Sequence[Photo], queries: Sequence[Sequence[str]]
) -> dict[str, np.ndarray]:
    """Returns the answers `[b k ...]` by name."""
    outputs = predictor.predict_logits(photos, queries)
    rows = [jax.tree.map(lambda *queries: np.stack(queries), *row) for row in outputs]
    return answers_by_name(jax.tree.map(lambda *images: np.stack(images), *rows))


def _run_stablehlo(
    folder: Path,
    predictor: Predictor,
    photos: Sequence[Photo],
    queries: Sequence[Sequence[str]],
) -> dict[str, np.ndarray]:
    """Runs the export in a new process (run_stablehlo.py), with the predictor's token states."""
    states, mask = predictor.text_encoder([text for of_image in queries for text in of_image])
    shape = (len(photos), NUM_QUERIES)
    inputs = {
        "image": np.stack([photo.frame for photo in photos]),
        "valid": np.stack([photo.letterbox.valid() for photo in photos]),
        "states": states.reshape(*shape, *states.shape[1:]),
        "mask": mask.reshape(*shape, -1),
    }
    program = Path(__file__).with_name("run_stablehlo.py")
    with tempfile.TemporaryDirectory() as work:
        inputs_path = Path(work) / "inputs.safetensors"
        outputs_path = Path(work) / "outputs.safetensors"
        save_file(inputs, inputs_path)
        command = [sys.executable, "-I", program, folder, inputs_path, outputs_path]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise InputError(f"{folder}: the StableHLO does not run: {ended.stderr[-300:]}")
        return load_file(outputs_path)


def _check_differences(
    what: str, expected: Mapping[str, np.ndarray], answers: Mapping[str, np.ndarray]
) -> str:
    """Returns the largest differences. Raises InputError if they exceed the limit."""
    in_masks = [np.abs(expected[name] - answers[name]).max() for name in ("modal", "amodal")]
    in_logits = np.max(in_masks)  # not max(), which would lose NaN
    probabilities = expit(expected["amodal_logit"]), expit(answers["amodal_logit"])
    in_probability = np.abs(probabilities[0] - probabilities[1]).max()
    measured = f"{in_logits:.2g} in mask logits, {in_probability:.2g} in the probability of amodal"
    # Not `>`, so that NaN is refused, too.
    if not (in_logits <= MAX_DIFFERENCE and in_probability <= MAX_DIFFERENCE):
        raise InputError(f"{what}, differs from the run: {measured}; {MAX_DIFFERENCE:g} is allowed")
    return measured
