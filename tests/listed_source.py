"""A list of samples as a data source."""

from typing import ClassVar

from r2sm_jax.data.dataset import SourceSubset, truth_of_sample


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

    def fingerprints(self):
        return [""] * len(self)
