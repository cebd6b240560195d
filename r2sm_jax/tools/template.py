"""`data queries template`: queries about annotated images, from the grammar of the scenes."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, read_records, write_records
from r2sm_jax.data.validation import is_ignored
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.synthetic.queries.write import write_queries
from r2sm_jax.synthetic.scenes.scene import describe_objects, forbidden_targets


def template(
    dataset: Positional[Path],
    /,
    out: Path,
    queries: int = 8,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Adds queries from the embedded grammar to a copy of a dataset file.

    Half of them are modal, half amodal. An `ignore` annotation gets no query, one whose complete
    mask is not known gets only modal ones, and COCOA's stuff (`isStuff`) gets queries only if there
    is nothing else. A query that the file has already is not added again.

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
    num_before = len(records["queries"])
    repeated_at = add_template_queries(dataset, records, queries, seed)
    write_records(out, records, overwrite)

    added = records["queries"][num_before:]
    types = Counter(query["mask_type"] for query in added)
    counts = f"{types['modal']} modal, {types['amodal']} amodal"
    print(f"wrote {out}: {len(added)} queries more ({counts})")
    num_images = len(records["images"])
    num_without = num_images - len({query["image_id"] for query in added}.union(repeated_at))
    if repeated_at:
        print(f"{len(repeated_at)} are in the file already; another --seed gives other queries")
    if num_without:
        reason = "nothing in them can be asked for by its class"
        print(f"{num_without} of {num_images} images got none: {reason}")


def add_template_queries(
    path: Path, records: Mapping[str, Any], count: int, seed: int
) -> list[int]:
    """Appends up to `count` queries about every image to the records of a dataset file.

    A query with the text and the targets of one that its image has is left out. Returns the image
    ids of those, one for each query. `records` must be checked (`check_records`); `path` names the
    file in messages and need not exist yet. Raises InputError for a mask that cannot be read.
    """
    dataset = Dataset(path, records)
    earlier = {
        (query["image_id"], query["text"], frozenset(query["instance_ids"]))
        for query in records["queries"]
    }
    background = find_background(records)
    repeated_at = []
    number = max((query["id"] for query in records["queries"]), default=0)
    for index, image in enumerate(dataset.images):  # only one image's masks are in memory at a time
        instances = [instance.convert(masks.expand) for instance in dataset.rles_at(index)]
        forbidden = forbidden_targets(instances, background)
        # A generator of its own for each image, so that queries do not depend on the other images.
        # A seed cannot be negative, and ids can.
        rng = np.random.default_rng((seed, image["id"] % 2**63))
        facts = describe_objects(instances)
        for query in write_queries(facts, rng=rng, count=count, forbidden=forbidden):
            if (image["id"], query.text, frozenset(query.instance_ids)) in earlier:
                repeated_at.append(image["id"])
                continue
            number += 1
            record = {
                "id": number,
                "image_id": image["id"],
                "text": query.text,
                "mask_type": query.mask_type,
                "instance_ids": list(query.instance_ids),
                "kind": dict(query.kind),
            }
            records["queries"].append(record)
    return repeated_at


def find_background(records: Mapping[str, Any]) -> set[int]:
    """The ids of the annotations of a dataset file that no query asks for.

    They are `ignore` ones, and COCOA's stuff (floor, carpet, sky) where an image has anything else.
    """
    by_image = defaultdict(list)
    for annotation in records["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    background = set()
    for annotations in by_image.values():
        ignored = {a["id"] for a in annotations if is_ignored(a)}
        stuff = {a["id"] for a in annotations if a.get("isStuff")}
        is_all = len(ignored | stuff) == len(annotations)
        background |= ignored if is_all else ignored | stuff
    return background
