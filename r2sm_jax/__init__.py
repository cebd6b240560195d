"""Text-guided segmentation that knows which mask you mean: modal (visible) or amodal (complete)."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from r2sm_jax.errors import InputError as InputError
    from r2sm_jax.inference.decision import Decision as Decision
    from r2sm_jax.inference.prediction import (
        Prediction as Prediction,
        to_supervision as to_supervision,
    )
    from r2sm_jax.inference.predictor import Predictor as Predictor

__version__ = "0.1.0"

MODULES = {
    "InputError": "errors",
    "Decision": "inference.decision",
    "Prediction": "inference.prediction",
    "Predictor": "inference.predictor",
    "to_supervision": "inference.prediction",
}
"""Where the names are that callers use, below this package."""


def __getattr__(name: str) -> Any:
    """Imports a name when it is asked for, so that `import r2sm_jax` loads no JAX."""
    if name == "finders":
        return import_module(f"{__name__}.finders")
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


# transformers says when it is imported that models need PyTorch. This package uses its tokenizers
# and configurations alone.
logging.getLogger("transformers").addFilter(
    lambda record: "PyTorch was not found" not in record.getMessage()
)


def load(path, matmul_precision: Literal["float32", "bfloat16"] = "float32"):
    """Returns a `Predictor`.

    Args:
        path: a run folder, an export, a released model of this package such as "photos-small", or
            `hf:owner/name` of an export on the Hugging Face hub.
        matmul_precision: "bfloat16" is faster on CPUs that have AMX or AVX512-BF16; masks differ a
            little.

    Raises InputError if there is none, one of its files is missing or was changed, or the precision
    is unknown.
    """
    # Imported here, so that `import r2sm_jax` loads no JAX.
    from r2sm_jax.errors import InputError
    from r2sm_jax.inference.load import load_run

    if matmul_precision not in ("float32", "bfloat16"):
        raise InputError(
            f'load: matmul_precision is {matmul_precision!r}; give "float32" or "bfloat16"'
        )
    return load_run(path, matmul_precision=matmul_precision).predictor


def decide(sentences, model="photos-small", *, abstain: float = 0.0):
    """Decides which mask sentences ask for, without an image; returns one `Decision` for each.

    A `Decision` has `mask_type` ("modal" or "amodal"), `amodal_probability`, `undecided`, and
    `target`, the words that name what is meant, or None. The model is loaded at its first call,
    which takes two to three seconds. Only its heads of sentences, the language model and the
    calibration are loaded.

    NumPy multiplies with all threads of its BLAS, which is up to 60 times slower where other
    programs use the processors; the command `decide` uses one. Here that is left as it is: set
    OPENBLAS_NUM_THREADS=1 before NumPy is imported, or call it within
    `threadpoolctl.threadpool_limits(1)`.

    Args:
        sentences: a list; a single one may be given as a string.
        model: as `path` of `load`.
        abstain: a probability that is nearer than this to 0.5 makes a decision undecided.

    Raises InputError if there is no such model, its head needs the image or decides nothing, or a
    sentence has no words.
    """
    from r2sm_jax.inference.decider import cached_decider

    return cached_decider(str(model))(sentences, abstain=abstain)
