"""A list of samples as a data source."""

from collections.abc import Sequence

from r2sm_jax.data.dataset import Sample, Source


class ListedSource(Source):
    """Samples that a test made."""

    def __init__(self, samples: Sequence[Sample]):
        self.samples = samples

    @property
    def vocabulary(self):
        return {}

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]
