"""`model.stablehlo`: the segmenter as three functions that need only JAX, and their comparison with the run.

The file is a zip of three serialised `jax.export` functions. Their first argument is the content of a safetensors file,
as `safetensors.numpy.load_file` returns it. Batch size, number of queries and number of tokens are free.

encode_text(language model, ids [b t], mask [b t]) -> states [b t l e]
encode_image(weights, image [b S S 3], valid [b S S]) -> features
answer(weights, features, states [b k t l e], mask [b k t]) -> answers
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from safetensors.numpy import save_file

from r2sm_jax.config import ModelConfig
from r2sm_jax.cpu import products
from r2sm_jax.data.images import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.exported import WEIGHTS, with_weights
from r2sm_jax.models.decoder import PixelFeatures
from r2sm_jax.models.r2sm import input_spec
from r2sm_jax.models.text import abstract_text_encoder, load_text_encoder
from r2sm_jax.models.weights import Tensor, weight_files
from r2sm_jax.runs import Run, open_run
from r2sm_jax.sources import open_source

PLATFORMS = ("cpu", "cuda", "tpu")
IMAGES, QUERIES = 3, 4

Tensors = Mapping[str, Tensor]
"""Arrays by dotted name."""


def export_functions(
    config: ModelConfig, weights: Tensors, language_model: Path, text_weights: Tensors
) -> dict[str, bytes]:
    """The three functions, lowered for `PLATFORMS` and serialised. They multiply in float32, whatever JAX's default is.

    `language_model` is a folder, `text_weights` the content of its safetensors files.

    Raises:
        InputError: the language model reads its padding, as SigLIP does, so that the number of tokens cannot be free.
    """
    sizes = abstract_text_encoder(language_model).sizes
    if sizes.reads_padding:
        raise InputError(f"{language_model}: a language model that reads its padding (SigLIP) cannot be exported yet")

    def encode_text(tensors: Tensors, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return load_text_encoder(language_model, tensors).kept_states(ids, mask, config.text.layers)

    def encode_image(tensors: Tensors, image: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        tokens, pixels = with_weights(config, tensors, Path(WEIGHTS)).encode_image(image, valid)
        return {"tokens": tokens, **pixels._asdict()}

    def answer(
        tensors: Tensors, features: dict[str, jax.Array], text: jax.Array, text_mask: jax.Array
    ) -> dict[str, jax.Array]:
        pixels = PixelFeatures(**{name: features[name] for name in PixelFeatures._fields})
        model = with_weights(config, tensors, Path(WEIGHTS))
        return model.answer(features["tokens"], pixels, text, text_mask)._asdict()

    ours, theirs = _shapes(weights), _shapes(text_weights)
    ids, mask = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.int32, jnp.bool_))
    image, valid, text, text_mask = input_spec(config, 1, 1).values()
    exported = {}
    with products("float32"):
        features = jax.eval_shape(encode_image, ours, image, valid)
        for function, inputs, shapes, limits in (
            (encode_text, (theirs, ids, mask), ("...", "b, t", "b, t"), [f"t <= {sizes.max_tokens}"]),
            (encode_image, (ours, image, valid), ("...", "b, ...", "b, ..."), []),
            (answer, (ours, features, text, text_mask), ("...", "b, ...", "b, k, t, ...", "b, k, t"), []),
        ):
            symbolic = export.symbolic_args_specs(inputs, shapes, constraints=limits)
            lowered = export.export(jax.jit(function), platforms=PLATFORMS)(*symbolic)
            exported[function.__name__] = bytes(lowered.serialize())
    return exported


def _shapes(tensors: Tensors) -> dict[str, jax.ShapeDtypeStruct]:
    dtypes = {name: jax.dtypes.canonicalize_dtype(array.dtype) for name, array in tensors.items()}
    return {name: jax.ShapeDtypeStruct(array.shape, dtypes[name]) for name, array in tensors.items()}


def write_functions(path: Path, functions: Mapping[str, bytes]) -> None:
    """Writes `model.stablehlo`; equal functions give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in functions.items():
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)


def verify(run: Run, folder: Path) -> str:
    """The largest differences between a run and its export on the same images and queries, in a few lines.

    Three programs answer: the run from its checkpoint, the export loaded by `r2sm_jax.load`, and the export's StableHLO
    in a new process that does not import this package (verify.py).

    Raises:
        InputError: the differences are larger than rounding explains, or the StableHLO does not run.
    """
    loaded = open_run(folder).predictor
    source = open_source("scenes", "val", count=IMAGES, size=(size := loaded.config.vision.image_size))
    samples = [source[i] for i in range(IMAGES)]
    images = [sample.image[: size - 7 * i] for i, sample in enumerate(samples)]  # of several shapes
    boxes = [Letterbox(image.shape[0], image.shape[1], size) for image in images]
    frames = np.stack([box.image(image) for box, image in zip(boxes, images, strict=True)])
    valid = np.stack([box.valid() for box in boxes])
    sentences = [[query.text for query in sample.queries[:QUERIES]] for sample in samples]
    all_sentences = list(chain(*sentences))
    ids, mask = loaded.texts.tokens(all_sentences)
    states = np.ascontiguousarray(loaded.texts(all_sentences)[0][:, : ids.shape[1]])
    given = {"image": frames, "valid": valid, "ids": ids, "mask": mask, "states": states}
    for name, predictor in (("run", run.predictor), ("export", loaded)):
        answers = predictor.answer(frames, valid, sentences)._asdict()
        given |= {f"{name}.{field}": np.ascontiguousarray(value) for field, value in answers.items()}
    with tempfile.TemporaryDirectory() as work:
        save_file(given, f"{work}/given.safetensors")
        command = [sys.executable, "-I", Path(__file__).with_name("verify.py"), folder, f"{work}/given.safetensors"]
        ended = subprocess.run([*command, *weight_files(loaded.texts.folder)], capture_output=True, text=True)
    if ended.returncode:
        raise InputError(f"{folder}: {(ended.stderr.strip().splitlines() or ['the verification ended early'])[-1]}")
    return (
        f"verified on {IMAGES} images x {QUERIES} queries; largest differences from the run:\n{ended.stdout.rstrip()}"
    )
