"""Functions of JAX as ONNX models: conversion, simplification, and fewer bytes for the weights.

jax2onnx converts, onnxruntime simplifies. Both are optional packages (docs/onnx.md).
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import jaxpr_as_fun

from r2sm_jax.errors import InputError

INSTALL = "pip install 'r2sm_jax[onnx]' && pip install --no-deps 'jax2onnx>=0.17.1'"
"""jax2onnx asks for an orbax-checkpoint below 0.11.37, which it does not need for this. So pip can
install it beside ours without its dependencies only."""
PACKAGES = ("onnx", "onnxruntime", "onnx_ir", "jax2onnx")
ERRORS_ALONE = 3
"""Severity of what onnxruntime prints. It warns of each unused constant that jax2onnx leaves."""
MIN_HALF_SIZE = 1024
"""Weights of fewer numbers stay float32: nothing is gained."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """A function that becomes an ONNX file.

    Attributes:
        name: That of the file, without `.onnx`.
        function: Takes arrays in the order of `samples`, returns a tuple of them.
        shapes: Of each input with letters for free sizes, such as "b, t" (`jax.export`).
        outputs: Names of what it returns.
        samples: Inputs by name, of several free sizes; what is converted is verified with them.
    """

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    shapes: tuple[str, ...]
    outputs: tuple[str, ...]
    samples: tuple[Arrays, ...]

    @property
    def file(self) -> str:
        return f"{self.name}.onnx"


def check_installed() -> None:
    """Raises InputError if one of the optional packages is missing."""
    for name in PACKAGES:
        try:
            import_module(name)
        except ImportError:
            raise InputError(f"--onnx needs the package {name}; {INSTALL}") from None


def convert(part: Part, path: Path) -> None:
    """Writes a part as an ONNX file, with weights in float32 or, where that changes no number, in
    float16.

    Raises InputError if jax2onnx cannot convert it.
    """
    import onnx
    from jax2onnx import to_onnx

    (sample, *_) = part.samples
    specs = []
    for value in sample.values():
        specs.append(jax.ShapeDtypeStruct(value.shape, value.dtype))
    symbolic = export.symbolic_args_specs(tuple(specs), part.shapes)

    # jax2onnx replaces layers of flax by its own, which do not know ours. What is traced before it
    # is called has operations of XLA alone, and these it converts one by one.
    with jax.default_matmul_precision("float32"):
        traced = jax.make_jaxpr(part.function)(*symbolic)
    try:
        with _quiet():
            model: Any = to_onnx(
                jaxpr_as_fun(traced),
                inputs=list(symbolic),
                model_name=part.name,
                input_names=list(sample),
                output_names=list(part.outputs),
            )
    # It raises errors of many kinds where it does not know an operation.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"--onnx: jax2onnx cannot convert {part.name} of this model ({reason}); leave --onnx "
            "out, or take model.stablehlo (docs/export.md)"
        ) from None
    onnx.save(model, path)
    _simplify(path)
    store_in_float16(path, path, exact=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings about shapes of intermediate results that are not stored."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def open_session(path: Path, *, optimized: Path | None = None) -> Any:
    """Opens a file in onnxruntime, for one core.

    Args:
        optimized: where to write the simplified model.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = ERRORS_ALONE
    if optimized is not None:
        # Higher levels would write operations that onnxruntime alone has.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _simplify(path: Path) -> None:
    """Computes what is constant, and makes plain products of those that add a zero."""
    import onnx

    with tempfile.TemporaryDirectory() as work:
        optimized = Path(work) / path.name
        open_session(path, optimized=optimized)
        model = onnx.load(optimized)

    for node in model.graph.node:
        if node.op_type != "Gemm":
            continue
        options = {}
        for attribute in node.attribute:
            options[attribute.name] = onnx.helper.get_attribute_value(attribute)
        is_plain = not options.get("transA", 0) and not options.get("transB", 0)
        if is_plain and options.get("alpha", 1) == 1 and options.get("beta", 1) == 0:
            # onnxruntime quantises plain products only.
            node.op_type = "MatMul"
            del node.attribute[:]
            del node.input[2:]

    # onnxruntime lists domains that no operation here is of.
    domains = {node.domain for node in model.graph.node} | {""}
    opsets = [opset for opset in model.opset_import if opset.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    onnx.save(model, path)


def store_in_float16(source: Path, target: Path, *, exact: bool) -> None:
    """Writes a model whose weights are stored in float16; runtimes widen them when they load it.

    Args:
        exact: only weights that are the same numbers in float16.
    """
    import onnx

    model = onnx.load(source)
    casts = []
    for weights in model.graph.initializer:
        if weights.data_type != onnx.TensorProto.FLOAT:
            continue
        values = onnx.numpy_helper.to_array(weights)
        if values.size < MIN_HALF_SIZE or np.abs(values).max() > np.finfo(np.float16).max:
            continue
        half = values.astype(np.float16)
        if exact and not np.array_equal(half.astype(np.float32), values):
            continue
        name = weights.name
        weights.CopyFrom(onnx.numpy_helper.from_array(half, f"{name}_float16"))
        cast = onnx.helper.make_node("Cast", [weights.name], [name], to=onnx.TensorProto.FLOAT)
        casts.append(cast)
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, target)


def quantize(source: Path, target: Path, operations: tuple[str, ...]) -> None:
    """Writes a model whose weights are stored in int8, with a scale for each column.

    Args:
        operations: whose weights are: MatMul for products, which are computed in int8 then; Gather
            for tables of embeddings.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises to simplify the model, which was done
    try:
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=list(operations),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        root.setLevel(level)
