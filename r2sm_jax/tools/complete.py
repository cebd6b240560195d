"""`data complete`: visible masks of any system become a dataset file with complete ones.

A reader gives the visible masks of each image, the completer adds to each what is hidden, and the
one writer of dataset files writes them. Each object sees the visible masks of all others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import UInt8
from tyro.conf import Positional

from r2sm_jax.cli import parse_shard
from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector, check_share
from r2sm_jax.data.dataset import (
    ImageTruth,
    Instance,
    number_classes,
    with_distinct_ids,
    write,
)
from r2sm_jax.data.images import find_image, image_folders, open_annotated
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.readers.coco import DRAWN_FROM, COCOOptions, read_coco
from r2sm_jax.data.readers.mask_folders import read_mask_folders
from r2sm_jax.data.split_summary import review
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.progress import show_progress
from r2sm_jax.query import Prompt

if TYPE_CHECKING:
    # They load JAX. The other data commands need none, and a slip in a flag should be told at once.
    from r2sm_jax.inference.crop_models import Outline
    from r2sm_jax.inference.parts import Parts

MIN_OCCLUDER_SHARE = 0.1
"""Of the added part: an object whose visible mask covers as much of it hides the object."""
HIDDEN_FROM = 0.01
"""Share of the complete mask: less than this is the rounding of two masks."""


def complete(
    source: Positional[Path],
    /,
    out: Path,
    images: Path,
    model: str = "photos-small",
    annotations: Path | None = None,
    min_score: float = 0.0,
    crowds: Literal["keep", "objects"] = "keep",
    max_bad: float = 0.1,
    shard: str = "1/1",
    overwrite: bool = False,
) -> None:
    """Completes the visible masks of a data set: an amodal draft of it, with the ids that it has.

    Args:
        source: A COCO instances file, a COCO results file of masks or of boxes, or a folder of mask
            PNGs, named IMAGE/anything.png or IMAGE_1.png after the image.
        out: The dataset file to write.
        images: Folder of the images.
        model: A model that has a completer: an export, a released model, or the run folder of a
            completer.
        annotations: For a results file: the COCO file with its images and categories; default: an
            image is the file in --images that is named as its id.
        min_score: Annotations and results with a lower score are left out.
        crowds: What `iscrowd` 1 marks: a region to keep as it is, or an object, as in files of
            supervision and CVAT.
        max_bad: Share of the records that may be bad, 0 to 1. Bad ones are left out and listed; if
            there are more, nothing is written.
        shard: I/N takes every N-th image, from the I-th on, so that N machines can share the work.
        overwrite: Replace the dataset file if it exists.
    """
    if not images.is_dir():
        raise InputError(f"--images {images}: there is no such folder; give that of the images")
    check_share(max_bad)
    first, step = parse_shard(shard)
    refuse_overwrite(out, overwrite)

    # They load JAX.
    from r2sm_jax.inference.load import load_part
    from r2sm_jax.inference.parts import Parts

    completer = load_part(model, "completer")
    collector = Collector()
    truths = list(read_source(source, images, annotations, min_score, crowds, collector))
    collector.check(max_bad)
    summary = review(source, truths, collector)
    collector.print()
    if not summary.num_objects:
        raise InputError(f"{source}: there are no masks to complete in it; give another file")
    if summary.num_ignored == summary.num_objects:
        raise InputError(
            f"{source}: all {summary.num_ignored} annotations are crowds or ignored regions, which "
            "are not completed; if crowds are objects there, pass --crowds objects"
        )

    # Of the whole source, so that ids are the same, and no two, in the files of all shards.
    truths = with_distinct_ids(truths)
    categories = number_classes(truths, collector.categories)
    boxes = [is_box(instance) for truth in truths for instance in truth.instances]
    parts = Parts(completer, load_part(model, "outliner") if any(boxes) else None)
    completed = []
    of_images = Collector()
    truths = truths[first - 1 :: step]
    with show_progress("completing objects of images", len(truths)) as advance:
        for truth in truths:
            with of_images.record(f"{source}: image {truth.image_id}"):
                completed.append(complete_image(parts, images, truth, str(source)))
            advance(1)
    of_images.check(max_bad)
    of_images.print()
    kept = collector.other
    info = {"description": f"{source.name}, completed by {model}", "source": source.name}
    info = {**kept.get("info", {}), **info}
    records = write(out, completed, info, categories, overwrite, kept)

    rates = [a["occlude_rate"] for a in records["annotations"] if "occluded_by" in a]
    hidden = [rate for rate in rates if rate >= HIDDEN_FROM]
    print(
        f"wrote {out}: {len(rates)} objects completed in {len(completed)} images, {len(hidden)} of "
        f"them larger now by {HIDDEN_FROM:.0%} and more; {len(records['annotations']) - len(rates)}"
        " crowds or ignored regions kept as they are"
    )
    if any("source_id" in annotation for annotation in records["annotations"]):
        print("annotations have new ids, as theirs were not above 0 and all different: source_id")
    if images.resolve() not in [folder.resolve() for folder in image_folders(out, None)]:
        print(f"the images are in {images}; pass --data.images {images} with the dataset")


def read_source(
    source: Path,
    images_dir: Path,
    annotations: Path | None,
    min_score: float,
    crowds: str,
    collector: Collector,
) -> Iterator[ImageTruth]:
    """Reads the visible masks of a file or a folder. Raises InputError as the readers, and for an
    option that is not of the source."""
    if source.is_dir():
        for flag, is_given in (
            ("--annotations", annotations is not None),
            ("--min-score", min_score > 0),
            ("--crowds", crowds == "objects"),
        ):
            if is_given:
                raise InputError(f"{flag} is for COCO files; {source} is a folder")
        return read_mask_folders(images_dir, source, None, collector)
    options = COCOOptions(
        crowds_are_objects=crowds == "objects",
        min_score=min_score,
        boxes=True,
        listed_in=annotations,
    )
    return read_coco(source, images_dir, options, collector)


def is_box(instance: Instance[RLE]) -> bool:
    """Whether the mask of an object is no more than its box, and is not drawn yet."""
    return DRAWN_FROM in instance.fields and "visible_score" not in instance.fields


def complete_image(parts: "Parts", images_dir: Path, truth: ImageTruth, source: str) -> ImageTruth:
    """Completes the objects of one image, and says which object hides which.

    What shows in a box is outlined first, and `visible_score` is the predicted IoU of that. Where
    the outliner finds nothing the mask is empty. Crowds and ignored regions stay as they are, and
    count as objects that can hide others. So do objects of which nothing shows, which hide nothing.
    Raises InputError for an image that cannot be read.
    """
    if not truth.instances:
        return truth
    path = find_image([images_dir], truth.file_name)
    if path is None:
        raise InputError(f"{truth.file_name} is not in {images_dir}")
    pixels: UInt8[np.ndarray, "H W 3"] = open_annotated(path, truth.size, source)

    # A photo can have a thousand objects: masks wait as RLEs.
    drawn = {}
    instances = []
    for instance in truth.instances:
        if is_box(instance):
            box = masks.box(masks.expand(instance.modal))
            outline = parts.outline(pixels, Prompt(box))
            drawn[instance.id] = outline._replace(mask=np.zeros((0, 0), bool))
            fields = {**instance.fields, "visible_score": outline.iou}
            instance = replace(instance, modal=masks.encode(outline.mask), fields=fields)
        instances.append(instance)

    def outline_of(instance: Instance[RLE]) -> "Outline":
        mask = masks.expand(instance.modal)
        if instance.id in drawn:
            return drawn[instance.id]._replace(mask=mask)
        return parts.outline(pixels, mask)

    visible = {instance.id: instance.modal for instance in instances}
    others = None
    if len(visible) > 1:
        others = masks.expand(masks.merge(list(visible.values()), *truth.size))
    objects = [i for i in instances if not i.ignore and any(masks.areas([i.modal]))]
    completions = parts.complete(pixels, map(outline_of, objects), others)
    completed = {}
    for instance, completion in zip(objects, completions, strict=True):
        added = masks.encode(completion.mask & ~masks.expand(instance.modal))
        beside = {number: rle for number, rle in visible.items() if number != instance.id}
        fields = {
            **instance.fields,
            "occluded_by": find_occluders(added, beside),
            "score": completion.iou,
            "hidden_probability": completion.hidden_probability,
        }
        if "score" in instance.fields:
            fields["source_score"] = instance.fields["score"]
        amodal = masks.encode(completion.mask)
        completed[instance.id] = replace(instance, amodal=amodal, fields=fields)
    return replace(truth, instances=tuple(completed.get(i.id, i) for i in instances))


def find_occluders(added: RLE, others: Mapping[int, RLE]) -> list[int]:
    """The ids of the objects that hide another one: their visible masks cover at least a tenth of
    what was added to it. The one that covers most stands first."""
    (num_added,) = masks.areas([added])
    if not num_added:
        return []
    overlaps = masks.areas([masks.intersect(added, rle) for rle in others.values()])
    shares = {key: n / num_added for key, n in zip(others, overlaps, strict=True)}
    occluders = [key for key, share in shares.items() if share >= MIN_OCCLUDER_SHARE]
    return sorted(occluders, key=lambda key: -shares[key])
