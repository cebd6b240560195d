"""Text-guided segmentation that knows which mask you mean: modal (visible) or amodal (complete)."""

from typing import Literal

__version__ = "0.1.0"


def load(path, matmul_precision: Literal["float32", "bfloat16"] = "float32"):
    """A `Predictor` from a run folder, an export, a released model of this package such as "photos-small", or
    `hf:owner/name` of an export on the Hugging Face hub. With `matmul_precision` "bfloat16" it is faster on CPUs
    that have AMX or AVX512-BF16, and masks differ a little.

    Raises InputError where there is none, one of its files is missing or was changed, or `matmul_precision` is neither.
    """
    from pathlib import Path

    from r2sm_jax.errors import InputError
    from r2sm_jax.inference.run import open_run

    if matmul_precision not in ("float32", "bfloat16"):
        raise InputError(
            f'load: matmul_precision is {matmul_precision!r}; give "float32" or "bfloat16"'
        )
    return open_run(Path(path), matmul_precision=matmul_precision).predictor
