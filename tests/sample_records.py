"""Samples as the records of a dataset file."""

from collections.abc import Iterable, Mapping
from typing import Any

from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.dataset import Sample


def to_records(samples: Iterable[Sample], info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Samples as the records of a dataset file. Annotation and query ids are numbered anew, from 1,
    across images."""
    images, annotations, queries = [], [], []
    names: dict[str, int] = {}
    for sample in samples:
        height, width = sample.image.shape[:2]
        images.append(
            {"id": sample.image_id, "file_name": sample.file_name, "height": height, "width": width}
        )
        new_ids: dict[int, int] = {}
        for instance in sample.instances:
            new_ids[instance.id] = len(annotations) + 1
            category_id = names.setdefault(instance.category, len(names) + 1)
            record = {
                "id": new_ids[instance.id],
                "image_id": sample.image_id,
                "category_id": category_id,
            }
            record |= mask_fields(instance.modal, instance.amodal)
            record |= {"attributes": dict(instance.attributes)} if instance.attributes else {}
            annotations.append(record | ({"ignore": True} if instance.ignore else {}))
        for query in sample.queries:
            record = {"id": len(queries) + 1, "image_id": sample.image_id, "text": query.text}
            record |= {
                "mask_type": query.mask_type,
                "instance_ids": [new_ids[i] for i in query.instance_ids],
            }
            kind = dict(query.kind)
            answer = kind.pop("answer", None)
            record |= ({"kind": kind} if kind else {}) | (
                {} if answer is None else {"answer": answer}
            )
            queries.append(record)
    categories = [{"id": number, "name": name} for name, number in names.items()]
    lists = {
        "images": images,
        "annotations": annotations,
        "categories": categories,
        "queries": queries,
    }
    return lists | {"info": dict(info or {})}
