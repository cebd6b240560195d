"""`data build`: a dataset file as a TFDS data set, array_record files with encoded images and RLE masks.

Images keep the bytes of their files, so that nothing is lost. Any TFDS reader opens the folder
(`tfds.builder_from_directory(DIR).as_data_source()`); TensorFlow is not needed. data/tfds.py reads it for training.
"""

import json
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Dataset, Sample
from r2sm_jax.data.tfds import MASK_TYPES
from r2sm_jax.errors import InputError

NAME = "r2sm_queries"


class R2smQueries(tfds.core.GeneratorBasedBuilder):
    """Writes splits of dataset files; made by `write_tfds`."""

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


def write_tfds(splits: Mapping[str, Dataset], out: Path) -> dict[str, int]:
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
