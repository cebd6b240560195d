"""`model.stablehlo`: the model as three functions that need only JAX, and their verification.

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
from jax import export
from safetensors.numpy import load_file, save_file
from scipy.special import expit

from r2sm_jax.data.images import Letterbox
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import WEIGHTS, flat_weights, model_with_weights
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import Run, load_export
from r2sm_jax.models.hub import read_tensors, weight_files
from r2sm_jax.models.matching import Tensor
from r2sm_jax.models.r2sm import R2SM, ImageFeatures, input_spec
from r2sm_jax.models.text_encoder import abstract_text_encoder, load_text_encoder

Tensors = Mapping[str, Tensor]
"""Arrays by dotted name."""
PLATFORMS = ("cpu", "cuda", "tpu")

NUM_IMAGES, NUM_QUERIES = 3, 4
"""Of the verification."""
MAX_DIFFERENCE = 1e-4
"""Of mask logits and probabilities from the same token states: what float32 rounding explains."""
MAX_STATE_DIFFERENCE = 2**-10
"""Relative, of token states: one step of float16, to which they are rounded."""
MASK_LOGITS = ("modal", "amodal")


def export_functions(run: Run) -> dict[str, bytes]:
    """Lowers the three functions for `PLATFORMS` and serialises them.

    They multiply in float32, whatever JAX's default is. The calibration is part of `answer`.
    """
    config = run.config.model
    calibration = run.predictor.calibration
    text_folder = run.predictor.text_encoder.folder
    text_sizes = abstract_text_encoder(text_folder).sizes

    def model_of(tensors: Tensors) -> R2SM:
        return model_with_weights(config, run.sizes, tensors, Path(WEIGHTS))

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
                [f"t <= {text_sizes.max_tokens}"],
            ),
            "encode_image": _lower(
                encode_image, (weights, image, valid), ("...", "b, ...", "b, ...")
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


def verify(run: Run, folder: Path) -> str:
    """Returns the largest differences between a run and its export, in a few lines.

    Three programs predict: the run, the export as `load_export` opens it, and the export's
    StableHLO in a new process that does not import this package.

    Raises InputError if the differences are larger than rounding explains, or the StableHLO does
    not run.
    """
    exported = load_export(folder).predictor
    images, queries = _samples(exported.config.vision.image_size)
    expected = _predict(run.predictor, images, queries)
    lines = [
        f"verified on {NUM_IMAGES} images x {NUM_QUERIES} queries; largest differences from the "
        "run:"
    ]
    from_safetensors = _predict(exported, images, queries)
    lines.append(_compare(folder, "safetensors", expected, from_safetensors, MAX_DIFFERENCE))

    letterboxes = [
        Letterbox(image.shape[0], image.shape[1], exported.config.vision.image_size)
        for image in images
    ]
    frames = [box.image(image) for box, image in zip(letterboxes, images, strict=True)]
    text_encoder = exported.text_encoder
    sentences = [query for of_image in queries for query in of_image]
    ids, mask = text_encoder.tokens(sentences)
    states = np.ascontiguousarray(text_encoder(sentences)[0][:, : ids.shape[1]])
    inputs = {
        "image": np.stack(frames),
        "valid": np.stack([box.valid() for box in letterboxes]),
        "ids": ids,
        "mask": mask,
        "states": states,
    }
    outputs = _run_stablehlo(folder, weight_files(text_encoder.folder), inputs)

    # From its own token states, which may round to the next float16, any difference is allowed.
    for prefix, title, limit in (
        ("given", "the run's", MAX_DIFFERENCE),
        ("own", "its own", np.inf),
    ):
        answers = {
            name: outputs[f"{prefix}.{name}"].reshape(value.shape)
            for name, value in expected.items()
        }
        title = f"StableHLO without r2sm_jax, {title} token states"
        lines.append(_compare(folder, title, expected, answers, limit))

    size = np.maximum(np.abs(states.astype(np.float32)), 2**-4)
    largest = (np.abs(outputs["states"] - states.astype(np.float32)) / size)[mask].max()
    if not largest <= MAX_STATE_DIFFERENCE:
        raise InputError(
            f"{folder}: the token states of StableHLO differ by {largest:.2g}, more than float16 "
            "rounds"
        )
    lines.append(
        f"  token states: {largest:.2g} of their size; one step of float16 is "
        f"{MAX_STATE_DIFFERENCE:.2g}"
    )
    return "\n".join(lines)


def _samples(image_size: int) -> tuple[list[np.ndarray], list[list[str]]]:
    """Scenes of several shapes, each with the same number of queries."""
    source = open_source("scenes", "val", count=NUM_IMAGES, size=image_size)
    images = []
    queries = []
    for i in range(NUM_IMAGES):
        sample = source[i]
        images.append(sample.image[: image_size - 7 * i])
        queries.append([query.text for query in sample.queries[:NUM_QUERIES]])
    return images, queries


def _predict(
    predictor: Predictor, images: list[np.ndarray], queries: list[list[str]]
) -> dict[str, np.ndarray]:
    """Mask logits and type logits of all queries."""
    outputs = []
    for of_image in predictor.predict_logits(images, queries):
        outputs += of_image
    return {
        name: np.stack([getattr(output, name) for output in outputs])
        for name in (*MASK_LOGITS, "amodal_logit")
    }


def _compare(
    folder: Path,
    title: str,
    expected: Mapping[str, np.ndarray],
    answers: Mapping[str, np.ndarray],
    limit: float,
) -> str:
    """Returns a line on the largest differences. Raises InputError if they exceed the limit."""
    in_logits = max(np.abs(expected[name] - answers[name]).max() for name in MASK_LOGITS)
    probabilities = expit(expected["amodal_logit"]), expit(answers["amodal_logit"])
    in_probability = np.abs(probabilities[0] - probabilities[1]).max()
    num_pixels = sum(
        ((expected[name] > 0) != (answers[name] > 0)).sum() for name in ("modal", "amodal")
    )
    measured = (
        f"{in_logits:.2g} in mask logits, {in_probability:.2g} in the probability of amodal, "
        f"{num_pixels} mask pixels"
    )
    # Not `>`, so that NaN is refused, too.
    if not max(in_logits, in_probability) <= limit:
        raise InputError(
            f"{folder}: {title}, differs from the run: {measured}; {limit:g} is allowed"
        )
    return f"  {title}: {measured}"


def _run_stablehlo(
    folder: Path, language_model: Sequence[Path], inputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Runs the export in a new process (run_stablehlo.py), which does not import this package."""
    program = Path(__file__).with_name("run_stablehlo.py")
    with tempfile.TemporaryDirectory() as work:
        inputs_path = Path(work) / "inputs.safetensors"
        outputs_path = Path(work) / "outputs.safetensors"
        save_file(inputs, inputs_path)
        command = [sys.executable, "-I", program, folder, inputs_path, outputs_path]
        ended = subprocess.run([*command, *language_model], capture_output=True, text=True)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["the verification ended early"]
            raise InputError(
                f"{folder}: the StableHLO does not run ({lines[-1]}); export the run again"
            )
        return load_file(outputs_path)
