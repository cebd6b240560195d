"""`data complete`: visible masks of any system become a dataset file with complete ones.

A reader gives the visible masks of each image, the completer adds to each what is hidden, and the
one writer of dataset files writes them. Each object sees the visible masks of all others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from r2sm_jax.cli import parse_shard
from r2sm_jax.data.collector import Collector, check_share
from r2sm_jax.data.dataset import (
    COMPLETED_BY,
    ImageTruth,
    encode_records,
    number_classes,
    to_records,
    with_distinct_ids,
    write,
)
from r2sm_jax.data.drafts import Finished, is_of_people, without_lost_targets
from r2sm_jax.data.images import image_folders, locate_image, open_annotated
from r2sm_jax.data.readers.coco import COCOOptions, read_coco
from r2sm_jax.data.readers.mask_folders import read_mask_folders
from r2sm_jax.data.split_summary import review
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.progress import show_progress
from r2sm_jax.tools.complete_image import complete_image, is_box

HIDDEN_FROM = 0.01
"""Hidden share from which on the summary counts an object as larger. Less is rounding."""


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
    polygons: bool = False,
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
        polygons: Write masks as polygons, for tools that read no RLE.
        overwrite: Replace the dataset file if it exists.
    """
    if not images.is_dir():
        raise InputError(f"--images {images}: there is no such folder; give that of the images")
    check_share(max_bad)
    first, step = parse_shard(shard)
    refuse_overwrite(out, overwrite)

    # They load JAX.
    from r2sm_jax.inference.load import load_part
    from r2sm_jax.inference.model_folder import find_folder, hash_model
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
    kept = collector.other
    info = {"description": f"{source.name}, completed by {model}", "source": source.name}
    info = {**kept.get("info", {}), **info}
    # What cannot be written is told before the work.
    encode_records(source, {**kept, **to_records(truths, info, categories)})

    boxes = [is_box(instance) for truth in truths for instance in truth.instances]
    parts = Parts(completer, load_part(model, "outliner") if any(boxes) else None)
    finished = Finished(out.with_name(f"{out.name}.images"), hash_model(find_folder(model)))
    completed, files = [], []
    num_earlier = num_bare = 0
    of_images = Collector()
    truths = truths[first - 1 :: step]
    with show_progress("completing objects of images", len(truths)) as advance:
        for truth in truths:
            advance(1)
            if not truth.instances:
                completed.append(truth)
                continue
            pixels = None
            with of_images.record(f"{source}: image {truth.image_id}"):
                photo = locate_image([images], truth.file_name, source)
                pixels = open_annotated(photo, truth.size, str(source))
            if pixels is None:
                continue
            file = finished.path(truth, pixels)
            if file.exists():
                drawn = finished.read(file, truth)
                num_earlier += 1
            else:
                drawn = complete_image(parts, pixels, truth, model)
                finished.write(file, drawn)
            num_bare += len(truth.instances) - len(drawn.instances)
            completed.append(without_lost_targets(drawn))
            files.append(file)
    of_images.check(max_bad)
    of_images.print()
    records = write(out, completed, info, categories, overwrite, kept, polygons)
    finished.remove(files)

    written = records["annotations"]
    drawn = [a for a in written if COMPLETED_BY in a and "score" in a and not a["iscrowd"]]
    rates = [annotation["occlude_rate"] for annotation in drawn]
    hidden = [rate for rate in rates if rate >= HIDDEN_FROM]
    num_kept = sum(is_of_people(i) for truth in completed for i in truth.instances)
    num_ignored = sum(annotation["iscrowd"] for annotation in written)
    print(
        f"wrote {out}: {len(rates)} objects completed in {len(completed)} images, {len(hidden)} of "
        f"them larger now by {HIDDEN_FROM:.0%} and more; {num_ignored} crowds or ignored regions "
        "kept as they are"
    )
    if num_kept:
        print(f"{num_kept} complete masks that people drew or changed are kept")
    if num_earlier:
        print(f"{num_earlier} of the images were finished by an earlier call")
    if num_bare:
        print(f"{num_bare} boxes have no annotation, since nothing was found in them")
    if any("source_id" in annotation for annotation in written):
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
        annotations=annotations,
    )
    return read_coco(source, images_dir, options, collector)
