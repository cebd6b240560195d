"""Functions of JAX as ONNX models: jax2onnx converts, onnxruntime simplifies (docs/onnx.md)."""

import logging
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
from jax import export
from jax.extend.core import jaxpr_as_fun
from jax2onnx import to_onnx

ERRORS_ALONE = 3
"""Severity of what onnxruntime prints. It warns of each unused constant that jax2onnx leaves."""
MIN_HALF_SIZE = 1024
"""Weights of fewer numbers stay float32: nothing is gained."""

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

    @property
    def file(self) -> str:
        return f"{self.name}.onnx"


def convert(part: Part, path: Path) -> None:
    """Writes a part as an ONNX file, with weights in float32 or, where that changes no number, in
    float16."""
    sample = part.samples[0]
    specs = []
    for value in sample.values():
        specs.append(jax.ShapeDtypeStruct(value.shape, value.dtype))
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
    onnx.save(model, path)
    _simplify(path)
    _store_in_float16(path)


def open_session(path: Path, *, optimized: Path | None = None) -> Any:
    """Opens a file in onnxruntime, for one core.

    Args:
        optimized: where to write the simplified model.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = ERRORS_ALONE
    if optimized is not None:
        # Higher levels would write operations that onnxruntime alone has.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(optimized)
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


def _simplify(path: Path) -> None:
    """Computes what is constant."""
    with tempfile.TemporaryDirectory() as work:
        optimized = Path(work) / path.name
        open_session(path, optimized=optimized)
        model = onnx.load(optimized)
    # onnxruntime lists domains that no operation here is of.
    domains = {node.domain for node in model.graph.node} | {""}
    opsets = [opset for opset in model.opset_import if opset.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    onnx.save(model, path)


def _store_in_float16(path: Path) -> None:
    """Stores weights that are the same numbers in float16 so; runtimes widen them when they load
    the file."""
    model = onnx.load(path)
    casts = []
    for weights in model.graph.initializer:
        if weights.data_type != onnx.TensorProto.FLOAT:
            continue
        values = onnx.numpy_helper.to_array(weights)
        if values.size < MIN_HALF_SIZE or np.abs(values).max() > np.finfo(np.float16).max:
            continue
        half = values.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), values):
            continue
        name = weights.name
        weights.CopyFrom(onnx.numpy_helper.from_array(half, f"{name}_float16"))
        cast = onnx.helper.make_node("Cast", [weights.name], [name], to=onnx.TensorProto.FLOAT)
        casts.append(cast)
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
