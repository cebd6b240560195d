"""Reads the TFDS data sets that tools/build.py writes. A sample is decoded when it is asked for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.samples import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query

MASK_TYPES = ("modal", "amodal")


class TfdsSource:
    """One split of a folder that `data build` wrote; samples are read at random."""

    def __init__(self, folder: Path, split: str):
        """Raises InputError for a folder that holds no such data set, and a split that it does not have."""
        versions = sorted(folder.glob("**/dataset_info.json"))
        builder: Any = tfds.builder_from_directory(str(versions[-1].parent)) if versions else None
        if builder is None or "vocabulary" not in (builder.info.metadata or {}):
            raise InputError(f"{folder}: there is no TFDS data set here that `python -m r2sm_jax.data build` wrote")
        if split not in builder.info.splits:
            there = ", ".join(builder.info.splits)
            raise InputError(f"{folder}: there is no split {split!r}; the data set has {there}; choose one of these")
        self.vocabulary = {group: tuple(words) for group, words in builder.info.metadata["vocabulary"].items()}
        # Images stay encoded: the same decoder serves all sources.
        decoders = {"image": tfds.decode.SkipDecoding()}
        self._source: Any = builder.as_data_source(split, decoders=decoders)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`. Raises InputError for a damaged image."""
        record = self._source[index]
        name = record["file_name"].decode()
        image = open_image(record["image"], name)
        size = image.shape[:2]
        instances = record["instances"]
        return Sample(
            image_id=int(record["image_id"]),
            file_name=name,
            image=image,
            instances=tuple(
                Instance(
                    id=int(instances["id"][i]),
                    category=instances["category"][i].decode(),
                    modal=_mask(instances["modal"][i], size),
                    amodal=_mask(instances["amodal"][i], size) if instances["amodal"][i] else None,
                    attributes=json.loads(instances["attributes"][i]),
                    ignore=bool(instances["ignore"][i]),
                )
                for i in range(len(instances["id"]))
            ),
            queries=_queries(record["queries"]),
        )

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of sample `index`; its image stays encoded."""
        return _queries(self._source[index]["queries"])


def _queries(records: Mapping[str, Any]) -> tuple[Query, ...]:
    return tuple(
        Query(
            id=int(records["id"][i]),
            text=records["text"][i].decode(),
            mask_type=MASK_TYPES[int(records["mask_type"][i])],
            instance_ids=tuple(json.loads(records["instance_ids"][i])),
            kind=json.loads(records["kind"][i]),
        )
        for i in range(len(records["id"]))
    )


def _mask(counts: bytes, size: tuple[int, ...]) -> masks.Mask:
    return masks.decode({"size": list(size), "counts": counts.decode()})
