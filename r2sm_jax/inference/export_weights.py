"""The weights of an export by dotted path: how they are read into a model, and listed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from r2sm_jax.config import ModelConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import CONFIG, REMEDY
from r2sm_jax.models.matching import Tensor
from r2sm_jax.models.pretrained import match_pretrained
from r2sm_jax.models.r2sm import R2SM, abstract_model


def published_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Returns the published weights that a model starts from, by dotted path.

    Raises InputError if they cannot be had.
    """
    state = nnx.state(abstract_model(config))
    weights = {}
    for report in match_pretrained(config, state).values():
        weights |= report.values
    return weights


def model_with_weights(config: ModelConfig, weights: Mapping[str, Tensor], path: Path) -> R2SM:
    """Returns a segmenter with weights by dotted path.

    Args:
        path: the file of the weights, for messages.

    Raises InputError if a weight is missing, unknown or of another shape.
    """
    graphdef, state = nnx.split(abstract_model(config))
    leaves = nnx.to_flat_state(state)
    shapes = {_dotted(name): leaf.shape for name, leaf in leaves}
    problems = [f"missing {name}" for name in sorted(shapes.keys() - weights.keys())]
    problems += [f"unknown {name}" for name in sorted(weights.keys() - shapes.keys())]
    for name in shapes.keys() & weights.keys():
        if weights[name].shape != shapes[name]:
            problems.append(f"{name} is {weights[name].shape}, not {shapes[name]}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError(
            f"{path} does not fit its {CONFIG}: {'; '.join(problems[:3])}{more}; {REMEDY}"
        )

    filled = []
    for name, leaf in leaves:
        value = jnp.asarray(weights[_dotted(name)], leaf.dtype)
        filled.append((name, leaf.replace(value)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def flat_weights(state: nnx.State) -> dict[str, Any]:
    """Returns the values of a state by dotted path, such as "decoder.image.kernel"."""
    return {_dotted(path): variable[...] for path, variable in nnx.to_flat_state(state)}


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
