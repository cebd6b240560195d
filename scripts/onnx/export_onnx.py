"""`python scripts/onnx/export_onnx.py --model MODEL --out DIR`: decide and complete as ONNX files.

    decide.onnx      ids [b t], mask [b t] -> probability [b], logit [b]
    complete.onnx    crops [m s s 6], others_known [m] -> logits [m s s]

They need onnxruntime alone, and a page that runs them in a browser lies beside them. jax2onnx
converts, onnxruntime simplifies and is compared with JAX (README.md).
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import tyro
from flax import nnx
from jax import export
from jax.extend.core import jaxpr_as_fun
from jax2onnx import to_onnx

from r2sm_jax.config import LEARNED_HEADS
from r2sm_jax.data.crops import CROP_EXTENT, MIN_CROP_SIDE
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import VIEWS, MaskCompleter
from r2sm_jax.inference.load import Run, load_part, load_run
from r2sm_jax.language.encoder import load_text_encoder
from r2sm_jax.language.tokenizer import pad_ids, write_tokenizer
from r2sm_jax.models.efficientnet import depthwise_conv
from r2sm_jax.models.hub import TOKENIZER
from r2sm_jax.models.r2sm import abstract_model

SETTINGS = "onnx.json"
PAGE = Path(__file__).with_name("page")
SENTENCES = ("the red mug", "the whole mug, hidden parts included, as if the book were not there")
MAX_DIFFERENCE = 1e-4
"""Of each output, as a share of its largest value, or of 1 where that is smaller."""
ERRORS_ALONE = 3
"""Severity of what onnxruntime prints. It warns of each unused constant that jax2onnx leaves."""

# It warns of shapes of intermediate results, which are not stored.
logging.getLogger("onnx_ir").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Part:
    """A function that becomes an ONNX file.

    Attributes:
        name: That of the file, without `.onnx`.
        function: Takes arrays in the order of `samples`, returns a tuple of them.
        shapes: Of each input with letters for free sizes, such as "b, t" (`jax.export`).
        outputs: Names of what it returns.
        samples: Inputs by name, of several free sizes; what is converted is compared with them.
    """

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    shapes: tuple[str, ...]
    outputs: tuple[str, ...]
    samples: tuple[Mapping[str, np.ndarray], ...]


# The two functions


def decide_part(run: Run) -> Part:
    """Builds the function that decides. Raises InputError if the head reads more than words."""
    config = run.config.model
    if config.head not in LEARNED_HEADS:
        raise InputError(
            f"the mask-type head {config.head} is no network that reads words alone; give a model "
            f"whose head is one of {', '.join(LEARNED_HEADS)}"
        )
    predictor = run.predictor
    graphdef, _ = nnx.split(abstract_model(config))
    model = nnx.merge(graphdef, predictor.weights)
    encoder = load_text_encoder(predictor.text_encoder.folder)

    def decide(ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        states = encoder.chosen_states(ids, mask, config.text.layers)
        logits = model.amodal_logit(states[:, None], mask[:, None])[:, 0]
        logits = logits / predictor.calibration.type_temperature
        return jax.nn.sigmoid(logits), logits

    # One sentence alone, and two of different lengths.
    samples = []
    for batch in (SENTENCES[:1], SENTENCES):
        token_ids = predictor.text_encoder.tokenizer(batch)
        ids, mask = pad_ids(token_ids, len(token_ids), max(map(len, token_ids)))
        samples.append({"ids": ids, "mask": mask})
    return Part("decide", decide, ("b, t", "b, t"), ("probability", "logit"), tuple(samples))


def complete_part(completer: MaskCompleter) -> Part:
    """Builds the function that completes; its samples are noise, which is completed as well."""
    graphdef, _ = nnx.split(completer.abstract(completer.config))
    model = nnx.merge(graphdef, completer.weights)
    # ONNX has a depthwise convolution of its own, in place of our sum of shifted products.
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is depthwise_conv:
            layer.conv_general_dilated = jax.lax.conv_general_dilated

    def complete(crops: jax.Array, others_known: jax.Array) -> tuple[jax.Array, ...]:
        known = jnp.broadcast_to(255 * others_known[:, None, None, None], (*crops.shape[:3], 1))
        output = model(jnp.concatenate([crops.astype(jnp.float32), known], axis=-1))
        return (output.mask_logits,)

    rng = np.random.default_rng(0)
    size = completer.config.size
    samples = []
    for others_known in ([1], [0, 1, 1]):
        crops = rng.integers(0, 256, (len(others_known), size, size, 6), np.uint8)
        samples.append({"crops": crops, "others_known": np.array(others_known, np.float32)})
    return Part("complete", complete, ("m, ...", "m"), ("logits",), tuple(samples))


# Conversion


def write_part(part: Part, folder: Path) -> None:
    """Writes a part. Raises InputError if onnxruntime and JAX differ, and removes the file."""
    path = folder / f"{part.name}.onnx"
    print(f"writing {path}, which can take some minutes", flush=True)
    convert(part, path)
    difference = largest_difference(part, path)
    if not difference <= MAX_DIFFERENCE:
        path.unlink()
        raise InputError(f"{path}: differs from JAX by {difference:.2g}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {difference:.1g} from JAX")


def convert(part: Part, path: Path) -> None:
    """Writes a part as an ONNX file in which what is constant is computed."""
    sample = part.samples[0]
    specs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in sample.values()]
    symbolic = export.symbolic_args_specs(tuple(specs), part.shapes)
    # jax2onnx replaces layers of flax by its own, which do not know ours. What is traced before it
    # is called has operations of XLA alone, and these it converts one by one.
    with jax.default_matmul_precision("float32"):
        traced = jax.make_jaxpr(part.function)(*symbolic)
    model: Any = to_onnx(
        jaxpr_as_fun(traced),
        inputs=list(symbolic),
        model_name=part.name,
        input_names=list(sample),
        output_names=list(part.outputs),
    )
    with tempfile.TemporaryDirectory() as work:
        raw = Path(work) / "raw.onnx"
        onnx.save(model, raw)
        open_session(raw, simplified=path)
    # onnxruntime lists domains that no operation here is of.
    model = onnx.load(path)
    domains = {node.domain for node in model.graph.node} | {""}
    opsets = [opset for opset in model.opset_import if opset.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    onnx.save(model, path)


def open_session(path: Path, *, simplified: Path | None = None) -> Any:
    """Opens a file in onnxruntime, for one core.

    Args:
        simplified: where to write the simplified model.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = ERRORS_ALONE
    if simplified is not None:
        # Higher levels would write operations that onnxruntime alone has.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(simplified)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def largest_difference(part: Part, path: Path) -> float:
    """Returns the largest difference between a file in onnxruntime and its function in JAX, as a
    share of an output's largest value, or of 1 where that is smaller."""
    session = open_session(path)
    function = jax.jit(part.function)
    largest = 0.0
    for sample in part.samples:
        answers = session.run(list(part.outputs), dict(sample))
        with jax.default_matmul_precision("float32"):
            expected = function(*[jnp.asarray(value) for value in sample.values()])
        for answer, value in zip(answers, expected, strict=True):
            difference = np.abs(answer - value).max() / max(1.0, np.abs(value).max())
            # np.maximum and not max(), which would lose NaN.
            largest = np.maximum(largest, difference)
    return float(largest)


def main(model: str, out: Path, completer: Path | None = None) -> None:
    """Writes the ONNX files of a model, their settings, its words and the page.

    Args:
        model: Run folder, export or released model.
        out: Folder for the files.
        completer: Run of a completer, in place of the one that the model has.
    """
    run = load_run(model)
    completes = load_part(completer, "completer") if completer else run.predictor.parts.completer
    out.mkdir(parents=True, exist_ok=True)
    write_part(decide_part(run), out)
    settings: dict[str, Any] = {
        "max_tokens": run.config.model.text.max_tokens,
        "crop_extent": CROP_EXTENT,
        "min_crop_side": MIN_CROP_SIDE,
    }
    if completes is not None:
        write_part(complete_part(completes), out)
        settings["crop_size"] = completes.config.size
        settings["complete_threshold"] = completes.threshold
        settings["complete_views"] = VIEWS
    (out / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    write_tokenizer(run.predictor.text_encoder.folder / TOKENIZER, out / TOKENIZER)
    shutil.copytree(PAGE, out, dirs_exist_ok=True)


if __name__ == "__main__":
    tyro.cli(main)
