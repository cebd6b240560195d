"""A dataset file as a TFDS data set: array_record files with encoded images and RLE masks, written without TensorFlow.

Images keep the bytes of their files, so that nothing is lost; they are decoded, and masks expanded, when a sample is
read. Any TFDS reader opens the folder (`tfds.builder_from_directory(DIR).as_data_source()`).
"""

import json
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.samples import Dataset, Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query

MASK_TYPES = ("modal", "amodal")
NAME = "r2sm_queries"


class R2smQueries(tfds.core.GeneratorBasedBuilder):
    """Writes splits of dataset files; made by `build`."""

    VERSION = tfds.core.Version("1.0.0")
    name = NAME

    def __init__(self, *, splits: Mapping[str, Dataset], **options: Any):
        self._splits = splits
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        vocabulary: dict[str, set[str]] = {}
        for dataset in self._splits.values():
            for group, words in dataset.vocabulary.items():
                vocabulary.setdefault(group, set()).update(words)
        features = tfds.features
        return self.dataset_info_from_configs(
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(None, None, 3)),
                    "image_id": features.Scalar(np.int64),
                    "file_name": features.Text(),
                    "instances": features.Sequence(
                        {
                            "id": features.Scalar(np.int64),
                            "category": features.Text(),
                            "modal": features.Text(doc="COCO's compressed RLE counts, at the image's size"),
                            "amodal": features.Text(doc="the same; empty = not known"),
                            "attributes": features.Text(doc="JSON object"),
                            "ignore": features.Scalar(np.bool_),
                        }
                    ),
                    "queries": features.Sequence(
                        {
                            "id": features.Scalar(np.int64),
                            "text": features.Text(),
                            "mask_type": features.ClassLabel(names=MASK_TYPES),
                            "instance_ids": features.Text(doc="JSON list"),
                            "kind": features.Text(doc="JSON object"),
                        }
                    ),
                }
            ),
            metadata=tfds.core.MetadataDict({"vocabulary": {g: sorted(w) for g, w in vocabulary.items()}}),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: self._generate_examples(dataset) for split, dataset in self._splits.items()}

    def _generate_examples(self, dataset: Dataset) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, sample in enumerate(dataset):
            yield sample.image_id, _example(sample, dataset.image_path(index))


def _example(sample: Sample, path: Path) -> dict[str, Any]:
    return {
        "image": BytesIO(path.read_bytes()),
        "image_id": sample.image_id,
        "file_name": sample.file_name,
        "instances": [
            {
                "id": instance.id,
                "category": instance.category,
                "modal": masks.encode(instance.modal)["counts"],
                "amodal": "" if instance.amodal is None else masks.encode(instance.amodal)["counts"],
                "attributes": json.dumps(dict(instance.attributes)),
                "ignore": instance.ignore,
            }
            for instance in sample.instances
        ],
        "queries": [
            {
                "id": query.id,
                "text": query.text,
                "mask_type": query.mask_type,
                "instance_ids": json.dumps(list(query.instance_ids)),
                "kind": json.dumps(dict(query.kind)),
            }
            for query in sample.queries
        ],
    }


def build(splits: Mapping[str, Dataset], out: Path) -> dict[str, int]:
    """Writes the splits as a TFDS data set below `out`; gives the number of images of each.

    Raises InputError for an image or a mask that cannot be read and a folder that cannot be written to.
    """
    if "all" in splits:
        raise InputError("build: TFDS has reserved the split name 'all'; name others, such as train and val")
    tfds.disable_progress_bar()
    try:
        builder = R2smQueries(splits=splits, data_dir=str(out), file_format="array_record")
        builder.download_and_prepare()
    except OSError as error:
        raise InputError(f"{out}: cannot write there ({error.strerror}); give another folder") from error
    return {name: split.num_examples for name, split in builder.info.splits.items()}


class TfdsSource:
    """One split of a folder that `build` wrote; samples are read at random."""

    def __init__(self, folder: Path, split: str):
        """Raises InputError for a folder that holds no such data set, and a split that it does not have."""
        versions = sorted(folder.glob("**/dataset_info.json"))
        if not versions:
            raise InputError(f"{folder}: there is no TFDS data set here; `python -m r2sm_jax.data build` writes one")
        builder: Any = tfds.builder_from_directory(str(versions[-1].parent))
        if split not in builder.info.splits:
            there = ", ".join(builder.info.splits)
            raise InputError(f"{folder}: there is no split {split!r}; the data set has {there}; choose one of these")
        if builder.info.metadata is None or "vocabulary" not in builder.info.metadata:
            raise InputError(
                f"{folder}: this TFDS data set was not written by `python -m r2sm_jax.data build`; build it"
            )
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
        image = open_image(name, record["image"])
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
