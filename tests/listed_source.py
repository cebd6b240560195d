"""A list of samples as a data source."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Source, SourceSubset, truth_of_sample


class ListedSource(list):
    """Samples that a test made."""

    vocabulary: ClassVar[dict] = {}
    sha256 = ""
    has_images = True
    is_procedural = False

    def queries_at(self, index):
        return self[index].queries

    def truth_at(self, index):
        return truth_of_sample(self[index])

    def subset(self, indices):
        return SourceSubset(self, tuple(indices))

    def fingerprint(self):
        return None


def write_empty_prediction(path: Path, source: Source) -> Path:
    """A file of predictions with one entry: an empty mask for the first query."""
    truth = source.truth_at(0)
    mask = masks.encode(np.zeros(truth.size, bool))
    entry = {"query_id": truth.queries[0].id, "segmentation": mask, "score": 0.5}
    path.write_text(json.dumps([entry]))
    return path
