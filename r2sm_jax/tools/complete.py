"""`data complete`: visible masks of any system become a dataset file with complete ones.

A reader gives the visible masks of each image, the completer adds to each what is hidden, and the
one writer of dataset files writes them. Each object sees the visible masks of all others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import UInt8
from tyro.conf import Positional

from r2sm_jax.cli import parse_shard
from r2sm_jax.data import masks
from r2sm_jax.data.coco import DRAWN_FROM, COCOOptions, read_coco, read_results
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.crops import count_masks
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance, write
from r2sm_jax.data.images import find_image, image_folders, open_annotated
from r2sm_jax.data.mask_folders import read_mask_folders
from r2sm_jax.data.masks import RLE, Mask
from r2sm_jax.errors import InputError, read_bytes, refuse_overwrite
from r2sm_jax.progress import show_progress
from r2sm_jax.query import Prompt

if TYPE_CHECKING:
    # It loads JAX. The other data commands need none, and a slip in a flag should be told at once.
    from r2sm_jax.inference.crop_models import Completion, MaskCompleter, MaskOutliner

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
        min_score: Results with a lower score are left out.
        crowds: What `iscrowd` 1 marks: a region to keep as it is, or an object, as in files of
            supervision and CVAT.
        max_bad: Share of the records that may be bad, 0 to 1. Bad ones are left out and listed; if
            there are more, nothing is written.
        shard: I/N takes every N-th image, from the I-th on, so that N machines can share the work.
        overwrite: Replace the dataset file if it exists.
    """
    if not images.is_dir():
        raise InputError(f"--images {images}: there is no such folder; give that of the images")
    first, step = parse_shard(shard)
    refuse_overwrite(out, overwrite)

    from r2sm_jax.inference.load import load_part  # loads JAX

    completer = load_part(model, "completer")
    collector = Collector()
    truths = list(read_source(source, images, annotations, min_score, crowds, collector))
    collector.check(max_bad)
    ignored = [instance.ignore for truth in truths for instance in truth.instances]
    if not ignored:
        collector.print()
        raise InputError(f"{source}: there are no masks to complete in it; give another file")
    if all(ignored):
        raise InputError(
            f"{source}: all {len(ignored)} annotations are crowds or ignored regions, which are "
            "not completed; if crowds are objects there, pass --crowds objects"
        )

    # Of the whole source, so that a class has one id in the files of all shards.
    names = [" ".join(i.category.split()) or NO_NAME for t in truths for i in t.instances]
    ids = collector.category_ids
    categories = {
        name: ids.setdefault(name, max(ids.values(), default=0) + 1)
        for name in dict.fromkeys(names)
    }
    drawn = [DRAWN_FROM in i.fields for truth in truths for i in truth.instances]
    outliner = load_part(model, "outliner") if any(drawn) else None
    completed = []
    truths = truths[first - 1 :: step]
    with show_progress("completing objects of images", len(truths)) as advance:
        for truth in truths:
            with collector.record(f"{source}: image {truth.image_id}", is_new=False):
                completed.append(complete_image(completer, outliner, images, truth, str(source)))
            advance(1)
    collector.check(max_bad)
    collector.print()
    info = {"description": f"{source.name}, completed by {model}", "source": source.name}
    records = write(out, completed, info, categories, overwrite)

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
    """Reads the visible masks of a file or a folder. Raises InputError as the readers."""
    if source.is_file() and read_bytes(source).lstrip()[:1] == b"[":
        return read_results(source, images_dir, annotations, min_score, collector)
    if annotations is not None:
        raise InputError(f"--annotations is for COCO results, a list; {source} is none")
    if source.is_dir():
        return read_mask_folders(images_dir, source, None, collector)
    options = COCOOptions(crowds_are_objects=crowds == "objects")
    return read_coco(source, images_dir, options, collector)


class Decoded(Sequence[Mask]):
    """Masks that are made when they are asked for: a photo can have a thousand of them."""

    def __init__(self, make: Callable[[RLE], Mask], rles: Sequence[RLE]):
        self.make = make
        self.rles = rles

    def __len__(self) -> int:
        return len(self.rles)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.make(rle) for rle in self.rles[index]]
        return self.make(self.rles[index])


def complete_image(
    completer: "MaskCompleter",
    outliner: "MaskOutliner | None",
    images_dir: Path,
    truth: ImageTruth,
    source: str,
) -> ImageTruth:
    """Completes the objects of one image, and says which object hides which.

    What shows in a box is outlined first. Crowds and ignored regions stay as they are, and count as
    objects that can hide others. So do objects of which nothing shows, which hide nothing. Raises
    InputError for an image that cannot be read.
    """
    if not truth.instances:
        return truth
    path = find_image([images_dir], truth.file_name)
    if path is None:
        raise InputError(f"{truth.file_name} is not in {images_dir}")
    pixels: UInt8[np.ndarray, "H W 3"] = open_annotated(path, truth.size, source)
    if outliner is not None:
        instances = tuple(outline(outliner, pixels, one) for one in truth.instances)
        truth = replace(truth, instances=instances)
    visible = {instance.id: instance.modal for instance in truth.instances}
    objects = [i for i in truth.instances if not i.ignore and any(masks.areas([i.modal]))]
    modal_masks = Decoded(masks.expand, [instance.modal for instance in objects])
    neighbours = None
    if len(visible) > 1:
        counts = count_masks(Decoded(masks.expand, list(visible.values())))
        neighbours = Decoded(lambda rle: counts > masks.expand(rle), modal_masks.rles)

    completed = {}
    completions = completer.complete(pixels, modal_masks, neighbours=neighbours)
    for instance, completion in zip(objects, completions, strict=True):
        modal = masks.expand(instance.modal)
        others = {number: rle for number, rle in visible.items() if number != instance.id}
        hidden_by = find_occluders(masks.encode(completion.mask & ~modal), others)
        completed[instance.id] = replace(
            instance,
            amodal=masks.encode(completion.mask),
            fields={**instance.fields, "occluded_by": hidden_by, **scores(instance, completion)},
        )
    instances = tuple(completed.get(i.id, i) for i in truth.instances)
    return replace(truth, instances=instances)


def outline(outliner: "MaskOutliner", pixels: np.ndarray, instance: Instance[RLE]) -> Instance[RLE]:
    """Draws what shows in the box of an object that has nothing but one; others stay as they are.

    Its `visible_score` is the predicted IoU. Where the outliner finds nothing the mask is empty.
    """
    if DRAWN_FROM not in instance.fields:
        return instance
    box = masks.box(masks.expand(instance.modal))
    (drawn,) = outliner(pixels, [Prompt(box)])
    fields = {**instance.fields, "visible_score": drawn.iou}
    return replace(instance, modal=masks.encode(drawn.mask), fields=fields)


def scores(instance: Instance[RLE], completion: "Completion") -> dict[str, Any]:
    """Returns the fields of an annotation that say how sure its completion is. The score that a
    finder gave it becomes `source_score`."""
    # The completer is calibrated on true visible masks; an outline may be wrong, too.
    iou = completion.iou * instance.fields.get("visible_score", 1.0)
    fields = {"score": iou, "hidden_probability": completion.hidden_probability}
    if "score" in instance.fields:
        fields["source_score"] = instance.fields["score"]
    return fields


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
