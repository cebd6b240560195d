"""What the data say of every query, in run-length encoding: no image is opened where the source needs none."""

from collections.abc import Iterator
from typing import NamedTuple

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.samples import Dataset, InstanceRLE, Source
from r2sm_jax.query import Query


class QueryTruth(NamedTuple):
    """A query and the masks of what it means."""

    query: Query
    index: int
    """Of the sample in its source."""
    image_id: int
    height: int
    width: int
    instances: tuple[InstanceRLE, ...]
    ignored: RLE | None

    @property
    def known(self) -> bool:
        """Whether the complete shape of everything meant is annotated."""
        return all(instance.amodal is not None for instance in self.instances)

    @property
    def modal(self) -> RLE:
        """The visible part of everything meant."""
        return masks.merge([i.modal for i in self.instances], self.height, self.width)

    @property
    def amodal(self) -> RLE:
        """The complete shape of everything meant, as far as it is known."""
        return masks.merge([i.modal if i.amodal is None else i.amodal for i in self.instances], self.height, self.width)


def truths(source: Source) -> Iterator[QueryTruth]:
    """Every query of a source once, without those that ask for a complete shape that is not annotated."""
    for index in range(len(source)):
        yield from truths_at(source, index)


def truths_at(source: Source, index: int) -> Iterator[QueryTruth]:
    """The same for one sample."""
    if isinstance(source, Dataset):
        image_id, (height, width), instances = source.rles_at(index)
        queries = source.queries_at(index)
    else:
        sample = source[index]
        image_id, (height, width), queries = sample.image_id, sample.image.shape[:2], sample.queries
        instances = tuple(
            InstanceRLE(i.id, masks.encode(i.modal), None if i.amodal is None else masks.encode(i.amodal), i.ignore)
            for i in sample.instances
        )
    by_id = {instance.id: instance for instance in instances}
    regions = [i.modal if i.amodal is None else i.amodal for i in instances if i.ignore]
    ignored = masks.merge(regions, height, width) if regions else None
    for query in queries:
        meant = tuple(by_id[number] for number in dict.fromkeys(query.instance_ids))
        truth = QueryTruth(query, index, image_id, height, width, meant, ignored)
        if query.mask_type == "modal" or truth.known:
            yield truth
