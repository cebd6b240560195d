"""TFDS data sets: array_record files with encoded images and RLE masks, which `data build` writes.

Images keep the bytes of their files, so that nothing is lost. Any TFDS reader opens the folder
(`tfds.builder_from_directory(DIR).as_data_source()`); TensorFlow is not needed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, Sample, Source
from r2sm_jax.data.images import fingerprint, open_image
from r2sm_jax.data.splits import resolve_split, split_ids
from r2sm_jax.errors import InputError
from r2sm_jax.query import MASK_TYPES, Query

NAME = "r2sm_queries"
_INSTANCE = {
    "id": tfds.features.Scalar(np.int64),
    "category": tfds.features.Text(),
    "modal": tfds.features.Text(doc="COCO's compressed RLE counts, at the image's size"),
    "amodal": tfds.features.Text(doc="the same; empty = not known"),
    "attributes": tfds.features.Text(doc="JSON object"),
    "ignore": tfds.features.Scalar(np.bool_),
}
_QUERY = {
    "id": tfds.features.Scalar(np.int64),
    "text": tfds.features.Text(),
    "mask_type": tfds.features.ClassLabel(names=MASK_TYPES),
    "instance_ids": tfds.features.Text(doc="JSON list"),
    "kind": tfds.features.Text(doc="JSON object"),
}
FEATURES = {
    "image": tfds.features.Image(shape=(None, None, 3)),
    "image_id": tfds.features.Scalar(np.int64),
    "file_name": tfds.features.Text(),
    "instances": tfds.features.Sequence(_INSTANCE),
    "queries": tfds.features.Sequence(_QUERY),
}


class R2smQueries(tfds.core.GeneratorBasedBuilder):
    """TFDS's builder for the splits of dataset files. `write_tfds` makes it."""

    VERSION = tfds.core.Version("1.0.0")
    name = NAME

    def __init__(self, *, splits: Mapping[str, Dataset], **options: Any):
        self._splits = splits
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        """The features, and the words of each attribute in all splits, for `TfdsSource`."""
        vocabulary: dict[str, set[str]] = {}
        for dataset in self._splits.values():
            for group, words in dataset.vocabulary.items():
                vocabulary.setdefault(group, set()).update(words)
        in_order = {group: sorted(words) for group, words in vocabulary.items()}
        metadata = tfds.core.MetadataDict({"vocabulary": in_order})
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(FEATURES), metadata=metadata
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: self._generate_examples(dataset) for split, dataset in self._splits.items()}

    def _generate_examples(self, dataset: Dataset) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in range(len(dataset)):
            sample = dataset[index]
            yield sample.image_id, _encode(sample, dataset.image_path(index))


def write_tfds(splits: Mapping[str, Dataset], out: Path) -> dict[str, int]:
    """Writes the splits as a TFDS data set below `out`. Returns the number of images of each.

    Raises InputError for a split without images, an image or a mask that cannot be read, and a
    folder that cannot be written to.
    """
    for split, dataset in splits.items():
        if not len(dataset):
            raise InputError(
                f"build: there is no image in the split {split}; name the other splits with "
                "--splits"
            )
    if "all" in splits:
        raise InputError(
            "build: TFDS has reserved the split name 'all'; name others, such as train and val"
        )
    tfds.disable_progress_bar()
    try:
        builder = R2smQueries(splits=splits, data_dir=str(out), file_format="array_record")
        builder.download_and_prepare()
    except OSError as error:
        raise InputError(
            f"{out}: cannot write there ({error.strerror}); give another folder"
        ) from error
    return {name: split.num_examples for name, split in builder.info.splits.items()}


@contextmanager
def _input_errors(folder: Path) -> Iterator[None]:
    """Turns errors of TFDS and array_record about damaged files into InputError."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # damaged files raise errors of protobuf, array_record or TFDS
        problem = f"cannot read the TFDS data set ({error}); if it is damaged, build it again"
        raise InputError(f"{folder}: {problem}") from error


def open_builder(folder: Path) -> Any:
    """Opens the newest version of a data set that `data build` wrote, as a TFDS builder.

    Raises InputError for a folder that holds no such data.
    """
    versions = sorted(folder.glob("**/dataset_info.json"))
    builder: Any = None
    if versions:
        with _input_errors(folder):
            builder = tfds.builder_from_directory(str(versions[-1].parent))
    # The data sets of others have no vocabulary.
    if builder is None or "vocabulary" not in (builder.info.metadata or {}):
        raise InputError(
            f"{folder}: there is no TFDS data set here that `python -m r2sm_jax.data build` wrote"
        )
    return builder


class TfdsSource(Source):
    """One split of a folder that `data build` wrote. A sample is decoded when it is asked for.

    `dev` is held out of `train` by image id, unless the folder has a `dev` of its own.
    """

    def __init__(self, folder: Path, split: str):
        """Opens a split. Raises InputError if the folder has no data set, or not this split."""
        builder = open_builder(folder)
        stored, held_out = resolve_split(split, builder.info.splits)
        if stored not in builder.info.splits:
            names = ", ".join(builder.info.splits)
            raise InputError(
                f"{folder}: there is no split {split!r}; the data set has {names}; choose one of "
                "these"
            )
        self._folder = folder
        self._words: dict[str, list[str]] = builder.info.metadata["vocabulary"]
        # Images stay encoded: the same decoder serves all sources.
        self._source: Any = builder.as_data_source(
            stored, decoders={"image": tfds.decode.SkipDecoding()}
        )
        # A shard that is cut or missing is told now, not when training reaches it.
        for end in np.cumsum(builder.info.splits[stored].shard_lengths):
            self._record(int(end) - 1)
        # The records of this split, by their number in the stored one.
        self._indices: Sequence[int] = range(len(self._source))
        if held_out:
            records = [self._record(index) for index in range(len(self._source))]
            names = {int(r["image_id"]): r["file_name"].decode() for r in records}
            ids = split_ids(folder, names, split, *held_out)
            self._indices = [i for i, r in enumerate(records) if int(r["image_id"]) in ids]

    @cached_property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        return {group: tuple(words) for group, words in self._words.items()}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        """Decodes sample `index`. Raises InputError for a damaged image or file."""
        record = self._record(self._indices[index])
        name = record["file_name"].decode()
        image = open_image(record["image"], name)
        instances = tuple(_instance(row, image.shape[:2]) for row in _rows(record["instances"]))
        return Sample(int(record["image_id"]), name, image, instances, _queries(record))

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of sample `index`; its image stays encoded."""
        return _queries(self._record(self._indices[index]))

    def fingerprints(self) -> list[str]:
        """Returns those of the image files that the data set was built from."""
        return [fingerprint(self._record(index)["image"]) for index in self._indices]

    def _record(self, index: int) -> dict[str, Any]:
        with _input_errors(self._folder):
            return self._source[index]


def _encode(sample: Sample, path: Path) -> dict[str, Any]:
    """A sample as a record of `FEATURES`; `path` is its image."""
    instances = []
    for instance in sample.instances:
        counts = instance.map_masks(lambda mask: masks.encode(mask)["counts"])
        fields = vars(counts) | {
            "amodal": counts.amodal or "",
            "attributes": json.dumps(dict(counts.attributes)),
        }
        del fields["fields"]
        instances.append(fields)
    queries = []
    for query in sample.queries:
        fields = vars(query) | {
            "instance_ids": json.dumps(query.instance_ids),
            "kind": json.dumps(dict(query.kind)),
        }
        queries.append(fields)
    return {
        "image": BytesIO(path.read_bytes()),
        "image_id": sample.image_id,
        "file_name": sample.file_name,
        "instances": instances,
        "queries": queries,
    }


def _rows(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of a sequence, which TFDS gives as one array for each field."""
    for values in zip(*columns.values(), strict=True):
        row = {}
        for key, value in zip(columns, values, strict=True):
            row[key] = value.decode() if isinstance(value, bytes) else value.item()
        yield row


def _instance(row: Mapping[str, Any], size: tuple[int, ...]) -> Instance:
    """The instance of a row, with masks `[H W]` of this size."""
    amodal = row["amodal"] or None
    if amodal == row["modal"]:
        amodal = row["modal"]  # the same object, so that `map_masks` decodes it once
    fields = {
        **row,
        "amodal": amodal,
        "attributes": json.loads(row["attributes"]),
    }
    instance = Instance(**fields)
    return instance.map_masks(lambda counts: masks.decode({"size": list(size), "counts": counts}))


def _queries(record: Mapping[str, Any]) -> tuple[Query, ...]:
    """The queries of a record."""
    queries = []
    for row in _rows(record["queries"]):
        fields: dict[str, Any] = {
            **row,
            "mask_type": MASK_TYPES[row["mask_type"]],
            "instance_ids": tuple(json.loads(row["instance_ids"])),
            "kind": json.loads(row["kind"]),
        }
        queries.append(Query(**fields))
    return tuple(queries)
