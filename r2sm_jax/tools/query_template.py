"""Queries from the embedded grammar for any dataset file, made from its class names and masks alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import Instance, category_names, group_by_image, read_instances, write_json
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.queries.objects import ObjectFacts
from r2sm_jax.queries.write import write_queries
from r2sm_jax.query import Query
from r2sm_jax.tools.class_names import display_name

# What covers this share of the complete mask, or more, counts as hiding it.
HIDING_SHARE = 0.01

# Where queries fall away, up to this many times as many are written to choose from.
MOST_TIMES = 8


def template(
    dataset: Positional[Path],
    /,
    out: Path,
    queries: int = 8,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Adds queries from the embedded grammar to a copy of a dataset file, half modal and half amodal.

    An `ignore` annotation never gets a query, one whose complete mask is not known only modal ones, and COCOA's
    stuff (`isStuff`) only where there is nothing else.

    Args:
        dataset: The dataset file. Its class names become the nouns, its masks tell what hides what.
        out: The dataset file to write.
        queries: How many queries to write for an image.
        seed: Another seed gives other queries.
        overwrite: Replace the dataset file if it exists.
    """
    if queries < 1 or seed < 0:
        raise InputError("queries template: give --queries 1 or more and --seed 0 or more")
    refuse_overwrite(out, overwrite)
    records = read_records(dataset)
    before = len(records["queries"])
    add_template_queries(records, queries, seed, dataset)
    write_json(out, records, overwrite)
    added = records["queries"][before:]
    types = Counter(query["mask_type"] for query in added)
    print(f"wrote {out}: {len(added)} queries more ({types['modal']} modal, {types['amodal']} amodal)")
    images = len(records["images"])
    bare = images - len({query["image_id"] for query in added})
    if bare:
        print(f"{bare} of {images} images got none: nothing in them can be asked for by its class")


def add_template_queries(records: Mapping[str, Any], count: int, seed: int, path: Path | None = None) -> None:
    """Appends up to `count` queries about every image to the records of a dataset file that are known to be right.

    `path` is the file that they are from, for messages. Masks of one image are in memory at a time. Raises
    InputError for a mask that cannot be read.
    """
    names, by_image = category_names(records), group_by_image(records, "annotations")
    number = max((query["id"] for query in records["queries"]), default=0)
    for image in records["images"]:
        annotations = by_image[image["id"]]
        instances = read_instances(path or Path(image["file_name"]), image, annotations, names)
        for query in _write(instances, _background(annotations), count, (seed, image["id"] % 2**63)):
            number += 1
            records["queries"].append(
                {"id": number, "image_id": image["id"], "text": query.text, "mask_type": query.mask_type}
                | {"instance_ids": list(query.instance_ids), "kind": dict(query.kind)}
            )


def things_of(records: Mapping[str, Any], image_id: int) -> list[ObjectFacts]:
    """What queries about one image can ask for.

    `records` are those of a dataset file that was checked. Where an amodal mask is not known,
    occlusion is not a number, so that no query relies on it. Raises InputError for a mask that cannot be read.
    """
    image = next(image for image in records["images"] if image["id"] == image_id)
    annotations = [annotation for annotation in records["annotations"] if annotation["image_id"] == image_id]
    instances = read_instances(Path(image["file_name"]), image, annotations, category_names(records))
    background = _background(annotations)
    return [thing for thing in _things(instances) if thing.id not in background]


def _background(annotations: Sequence[Mapping[str, Any]]) -> set[int]:
    """The annotations of an image that are not asked for: `ignore` ones, and COCOA's stuff (floor, carpet, sky)
    unless there is nothing else."""
    ignored = {annotation["id"] for annotation in annotations if annotation.get("ignore")}
    stuff = {annotation["id"] for annotation in annotations if annotation.get("isStuff")}
    everything = {annotation["id"] for annotation in annotations}
    return ignored if everything <= ignored | stuff else ignored | stuff


def _write(instances: Sequence[Instance], background: set[int], count: int, seed: tuple[int, int]) -> list[Query]:
    """Up to `count` queries about one image, of which none asks for what must not be asked for.

    The background stays in the scene, so that a phrase that would fit some of it is not used for another thing.
    """
    things = _things(instances)
    no_amodal = {instance.id for instance in instances if instance.amodal is None}
    if background.issuperset(thing.id for thing in things):
        return []
    kept: list[Query] = []
    asked = count
    while asked <= MOST_TIMES * count:
        written = write_queries(things, rng=np.random.default_rng(seed), count=asked)
        kept = [
            query
            for query in written
            if background.isdisjoint(query.instance_ids)
            and (query.mask_type == "modal" or no_amodal.isdisjoint(query.instance_ids))
        ]
        if len(kept) >= count or len(written) < asked:
            break
        asked *= 2
    return kept[:count]


def _things(instances: Sequence[Instance]) -> list[ObjectFacts]:
    """Every instance of which something is visible, as the grammar knows it."""
    return [
        ObjectFacts(
            id=instance.id,
            category=display_name(instance.category),
            box=masks.box(whole),
            area=masks.area(whole),
            occlusion=float("nan") if instance.amodal is None else 1 - masks.area(instance.modal) / masks.area(whole),
            hidden_by=_hidden_by(instance, instances),
            colour=instance.attributes.get("colour"),
            pattern=instance.attributes.get("pattern"),
            visible_box=masks.box(instance.modal),
        )
        for instance in instances
        for whole in [instance.modal if instance.amodal is None else instance.amodal]
        if instance.modal.any()
    ]


def _hidden_by(instance: Instance, instances: Sequence[Instance]) -> tuple[int, ...]:
    """The instances whose visible masks cover enough of the hidden part of another one."""
    if instance.amodal is None:
        return ()
    hidden = instance.amodal & ~instance.modal
    x0, y0, x1, y1 = masks.box(hidden)
    window = np.s_[y0:y1, x0:x1]
    least = max(1.0, HIDING_SHARE * masks.area(instance.amodal))
    return tuple(
        other.id
        for other in instances
        if other is not instance and masks.area(hidden[window] & other.modal[window]) >= least
    )
