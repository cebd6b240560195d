"""Reads a draft that comes back from an annotation tool.

CVAT and Label Studio give other ids, know no `visible_mask`, and draw edges anew. What people drew
is the complete mask; what shows is known from the draft.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path, PurePosixPath

import numpy as np
from scipy.optimize import linear_sum_assignment

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.dataset import COMPLETED_BY, NO_NAME, ImageTruth, Instance
from r2sm_jax.data.drafts import without_figures, without_lost_targets
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.readers.coco import read_coco, read_images
from r2sm_jax.data.readers.listing import COCOOptions, ListedImage, read_listing
from r2sm_jax.data.splits import original_name

MIN_IOU = 0.3
"""Of the complete masks of an object in the file and in its draft."""
SAME_ID = 0.5
"""Added to the IoU of objects with the same id, so that any overlap pairs them. Not more: a large
overlap under another id still wins, since tools number anew."""

UPLOADED = r"^[0-9a-f]{8}-"
"""What Label Studio puts before the name of a file."""


def read_corrected(
    path: Path, draft: Path, images_dir: Path | None, collector: Collector, counts: Counter[str]
) -> Iterator[ImageTruth]:
    """Reads a corrected file over its draft, whose images, ids and other fields stay.

    Images are looked for as by `read_coco`; those that the file does not list are kept. `counts`
    gets how many objects were kept, changed, added and dropped. Raises InputError as `read_coco`.
    """
    # CVAT marks what was drawn with a brush as crowds.
    options = COCOOptions(crowds_are_objects=True)
    drafts = list(read_coco(draft, images_dir, collector=collector))
    by_name: dict[str, list[ImageTruth]] = defaultdict(list)
    for truth in drafts:
        by_name[PurePosixPath(truth.file_name).name].append(truth)
    listing = read_listing(path, options, collector, images_dir)
    for record in listing.annotations:
        record.pop(COMPLETED_BY, None)  # the draft's counts
    find = partial(find_in_draft, by_name)
    corrected = {truth.file_name: truth for truth in read_images(listing, find, options, collector)}

    new_ids = count(1 + max((i.id for truth in drafts for i in truth.instances), default=0))
    for truth in drafts:
        if truth.file_name in corrected:
            truth = correct(truth, corrected[truth.file_name], new_ids, counts)
        else:
            counts["kept"] += len(truth.instances)
        yield truth


def find_in_draft(
    by_name: dict[str, list[ImageTruth]], image: ListedImage, is_needed: bool
) -> tuple[str, tuple[int, int]]:
    """The name of an image in the draft, and its size. Raises ValueError if there is not one."""
    path = PurePosixPath((image.file_name or "").replace("\\", "/"))
    original = original_name(re.sub(UPLOADED, "", path.name))
    found = by_name.get(path.name) or by_name.get(original, [])
    if len(found) > 1:
        found = [t for t in found if f"/{path}".endswith(f"/{t.file_name}")]
    if len(found) != 1:
        raise ValueError(f"{path} is not the name of one image of the draft")
    (truth,) = found
    if image.height is not None and (image.height, image.width) != truth.size:
        height, width = truth.size
        stated = f"it is {image.height} x {image.width}"
        raise ValueError(f"{stated}, in the draft {height} x {width}")
    by_name[PurePosixPath(truth.file_name).name].remove(truth)  # it is one image once
    return truth.file_name, truth.size


def correct(
    draft: ImageTruth, file: ImageTruth, new_ids: Iterator[int], counts: Counter[str]
) -> ImageTruth:
    """One image of the draft, with what people did to its objects, which is added to `counts`."""
    olds, news = draft.instances, file.instances
    ious = masks.ious(
        [old.complete for old in olds], [new.complete for new in news], [False] * len(news)
    )
    has_same_id = np.equal.outer([old.id for old in olds], [new.id for new in news])
    alike = ious + SAME_ID * (has_same_id & (ious > 0))
    pairs = zip(*linear_sum_assignment(alike, maximize=True), strict=True)
    partners = {i: j for i, j in pairs if alike[i, j] >= MIN_IOU}
    left = []
    for i, j in partners.items():
        old, one = olds[i], correct_object(olds[i], news[j])
        is_same = (one.modal, one.amodal, one.category) == (old.modal, old.amodal, old.category)
        counts["kept" if is_same else "changed"] += 1
        left.append(one)
    added = [
        replace(new, id=next(new_ids), amodal=new.complete)
        for j, new in enumerate(news)
        if j not in partners.values()
    ]
    counts.update(added=len(added), dropped=len(olds) - len(left))
    return without_lost_targets(replace(draft, instances=(*left, *added)))


def correct_object(old: Instance[RLE], new: Instance[RLE]) -> Instance[RLE]:
    """An object of the draft as people left it: masks whose edge alone is another stay."""
    complete = settle(new.complete, old.complete)
    modal = old.modal
    # Where a file states no visible mask, `make_instance` has put the complete one in its place.
    if new.amodal is not None and new.modal is not new.amodal:
        modal = settle(new.modal, modal)
    if complete is not old.complete and modal is old.modal:
        # What people took away from the complete mask is not the object's.
        seen = masks.expand(modal) & masks.expand(complete)
        modal = settle(masks.encode(seen), modal)
    corrected = replace(
        old,
        category=old.category if new.category == NO_NAME else new.category,
        modal=modal,
        attributes={**old.attributes, **new.attributes},
        fields={**old.fields, **new.fields},
    )
    if complete is old.complete:
        return corrected
    return without_figures(replace(corrected, amodal=complete))


def settle(new: RLE, old: RLE) -> RLE:
    """The new mask, or the old one where a tool has only drawn its edge anew."""
    return old if masks.same_but_edge(new, old) else new
