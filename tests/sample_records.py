"""Samples as the records of a dataset file."""

from collections.abc import Iterable, Mapping
from typing import Any

from r2sm_jax.data import dataset
from r2sm_jax.data.dataset import Sample, truth_of_sample


def to_records(samples: Iterable[Sample], info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Samples as the records of a dataset file."""
    return dataset.to_records(map(truth_of_sample, samples), info)
