"""Queries from the grammar for any dataset file, written from its class names and masks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import Instance, category_names, group_by_image, read_instance
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.queries.nouns import display_name
from r2sm_jax.queries.objects import ObjectFacts
from r2sm_jax.queries.write import write_queries
from r2sm_jax.query import Query
from r2sm_jax.tools.conversion import write_json

HIDING_SHARE = 0.01
"""One object hides another from this share of the other's complete mask on."""


def template(
    dataset: Positional[Path],
    /,
    out: Path,
    queries: int = 8,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Adds queries from the embedded grammar to a copy of a dataset file, half modal and half amodal.

    An `ignore` annotation gets no query, one whose complete mask is not known gets only modal ones, and COCOA's stuff
    (`isStuff`) gets queries only where there is nothing else.

    Args:
        dataset: The dataset file. Its class names become the nouns; its masks tell what hides what.
        out: The dataset file to write.
        queries: How many queries to write for an image.
        seed: Another seed gives other queries.
        overwrite: Replace the dataset file if it exists.
    """
    if queries < 1 or seed < 0:
        raise InputError("queries template: give --queries 1 or more and --seed 0 or more")
    refuse_overwrite(out, overwrite)
    records = read_records(dataset)
    before, images = len(records["queries"]), len(records["images"])
    add_template_queries(records, queries, seed, dataset)
    write_json(out, records, overwrite)
    added = records["queries"][before:]
    types = Counter(query["mask_type"] for query in added)
    print(f"wrote {out}: {len(added)} queries more ({types['modal']} modal, {types['amodal']} amodal)")
    if without := images - len({query["image_id"] for query in added}):
        print(f"{without} of {images} images got none: nothing in them can be asked for by its class")


def add_template_queries(records: Mapping[str, Any], count: int, seed: int, path: Path | None = None) -> None:
    """Appends up to `count` queries about every image to the records of a checked dataset file.

    `path` is the file that they are from, for messages. Only one image's masks are in memory at a time.

    Raises:
        InputError: a mask cannot be read.
    """
    names, by_image = category_names(records), group_by_image(records, "annotations")
    number = max((query["id"] for query in records["queries"]), default=0)
    for image in records["images"]:
        annotations = by_image[image["id"]]
        file = path or Path(image["file_name"])
        instances = [read_instance(file, image, a, names).convert(masks.expand) for a in annotations]
        for query in _write_queries(instances, background_ids(annotations), count, (seed, image["id"] % 2**63)):
            number += 1
            records["queries"].append(
                {"id": number, "image_id": image["id"], "text": query.text, "mask_type": query.mask_type}
                | {"instance_ids": list(query.instance_ids), "kind": dict(query.kind)}
            )


def background_ids(annotations: Sequence[Mapping[str, Any]]) -> set[int]:
    """The annotations of an image that no query asks for: `ignore` ones, and COCOA's stuff (floor, carpet, sky) unless
    there is nothing else."""
    ignored = {annotation["id"] for annotation in annotations if annotation.get("ignore")}
    stuff = {annotation["id"] for annotation in annotations if annotation.get("isStuff")}
    return ignored if len(ignored | stuff) == len(annotations) else ignored | stuff


def _write_queries(instances: list[Instance], background: set[int], count: int, seed: tuple[int, int]) -> list[Query]:
    """Up to `count` queries about one image that ask for no background, and for no amodal mask that is not known.

    The grammar sees the background too, so that it does not use a phrase for an object that would also fit there.
    """
    objects = describe_objects(instances)
    if background.issuperset(facts.id for facts in objects):
        return []
    excluded = {"modal": background, "amodal": background | {i.id for i in instances if i.amodal is None}}
    usable: list[Query] = []
    for wanted in (count, 2 * count, 4 * count, 8 * count):  # more to choose from, where some cannot be used
        written = write_queries(objects, rng=np.random.default_rng(seed), count=wanted)
        usable = [query for query in written if excluded[query.mask_type].isdisjoint(query.instance_ids)]
        if len(usable) >= count or len(written) < wanted:
            break
    return usable[:count]


def describe_objects(instances: Sequence[Instance]) -> list[ObjectFacts]:
    """What the grammar is told about every instance that is visible."""
    return [_describe(instance, instances) for instance in instances if instance.modal.any()]


def _describe(instance: Instance, instances: Sequence[Instance]) -> ObjectFacts:
    """The hidden share is not a number where the amodal mask is not known, so that no query relies on it."""
    area, hidden = masks.area(instance.complete), instance.complete & ~instance.modal
    x0, y0, x1, y1 = masks.box(hidden)
    window = np.s_[y0:y1, x0:x1]
    least = max(1.0, HIDING_SHARE * area)
    return ObjectFacts(
        id=instance.id,
        category=display_name(instance.category),
        box=masks.box(instance.complete),
        area=area,
        occlusion=float("nan") if instance.amodal is None else 1 - masks.area(instance.modal) / area,
        hidden_by=tuple(
            other.id
            for other in instances
            if other is not instance and masks.area(hidden[window] & other.modal[window]) >= least
        ),
        colour=instance.attributes.get("colour"),
        pattern=instance.attributes.get("pattern"),
        visible_box=masks.box(instance.modal),
    )
