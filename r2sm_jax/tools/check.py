"""`data check`: every problem of a dataset file at once, and what is odd about it."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.coco import read_coco
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import (
    check as check_contradictions,
    compare,
    find_pictures_in_both,
)
from r2sm_jax.data.dataset import Dataset, read_json
from r2sm_jax.data.split_summary import summarize
from r2sm_jax.data.validation import parse, problems
from r2sm_jax.errors import InputError
from r2sm_jax.progress import show_progress


def check(
    file: Positional[Path],
    /,
    images: Path | None = None,
    against: Path | None = None,
    against_images: Path | None = None,
) -> None:
    """Reports all problems of a dataset file, or of a COCO file; exit code 2 if there are any.

    Args:
        file: The dataset file. It may have no queries yet.
        images: Folder of its images, if they are not beside it.
        against: Another dataset file, such as the training split: images in both are reported too.
        against_images: Folder of that file's images.
    """
    content = file.read_bytes()
    if b'"queries"' not in content and (b'"annotations"' in content or b'"regions"' in content):
        check_masks(file, images)
        return
    refuse(file, problems(content))
    for contradiction in check_contradictions(file, compare(parse(file, content))):
        warn(file, str(contradiction))
    dataset = read_json(file, images, need_images=False)
    refuse(file, find_unusable(dataset))
    if against is not None:
        refuse(file, find_leaks(dataset, read_json(against, against_images, need_images=False)))

    for sentence in find_oddities(dataset):
        warn(file, sentence)
    summary = summarize(dataset.truth_at(index) for index in range(len(dataset)))
    for sentence in summary.warnings():
        warn(file, sentence)
    reason = summary.reason_for_nothing()
    only_lacks_queries = not summary.num_queries and summary.num_objects > summary.num_ignored
    if reason and not only_lacks_queries:
        raise InputError(f"{file}: nothing can be trained or scored, since {reason}")
    print(
        f"{file}: nothing wrong with {len(dataset)} images, {summary.num_objects} annotations, "
        f"{summary.num_queries} queries"
    )
    if only_lacks_queries:
        print(
            "to train or to score, it needs queries: "
            f"python -m r2sm_jax.data queries template {file} --out OUT"
        )


def check_masks(file: Path, images: Path | None) -> None:
    """Reports what is wrong with a COCO file, as every command reads it. Raises InputError for
    that."""
    collector = Collector()
    truths = list(read_coco(file, images, collector=collector))
    refuse(file, iter(collector.bad))
    collector.print()
    summary = summarize(truths)
    if summary.num_ignored == summary.num_objects:
        raise InputError(f"{file}: {summary.reason_for_nothing()}")
    print(
        f"{file}: nothing wrong with {len(truths)} images, {summary.num_objects} annotations, "
        f"{summary.num_ignored} of them ignored; a COCO file without queries: train on it as "
        "compose:FILE, or write some with data convert"
    )


def refuse(file: Path, sentences: Iterator[str]) -> None:
    """Prints all problems. Raises InputError if there are any."""
    found = list(sentences)
    for sentence in found:
        print(sentence, file=sys.stderr)
    if found:
        raise InputError(f"{file}: {len(found)} problems; correct the records that are listed")


def warn(file: Path, sentence: str) -> None:
    """Prints a warning about a file."""
    print(f"warning: {file}: {sentence}", file=sys.stderr)


def find_unusable(dataset: Dataset) -> Iterator[str]:
    """Yields the images that cannot be opened and the masks that cannot be read or are empty.

    One image is in memory at a time.
    """
    with show_progress("checking images and masks", len(dataset)) as advance:
        for index in range(len(dataset)):
            advance(1)
            try:
                dataset.image_at(index)
                truth = dataset.truth_at(index)
            except InputError as error:
                yield str(error)
                continue
            for instance in truth.instances:
                if instance.id == 0:
                    yield "annotation 0: its id is 0, which COCO tools read as no match"
                # An object of which nothing shows may have an empty visible mask.
                if not masks.areas([instance.complete])[0]:
                    yield f"annotation {instance.id}: its mask is empty; draw it or remove it"


def find_oddities(dataset: Dataset) -> Iterator[str]:
    """Yields what is there twice, or has two meanings, and pictures that other splits share."""
    num_annotations, num_queries, num_repeated, num_ignored, num_same_masks = 0, 0, 0, 0, 0
    ambiguous = []
    for index in range(len(dataset)):
        truth = dataset.truth_at(index)
        num_annotations += len(truth.instances)
        num_ignored += sum(instance.ignore for instance in truth.instances)
        shapes = {(i.category, str(i.modal), str(i.amodal)) for i in truth.instances}
        num_same_masks += len(truth.instances) - len(shapes)

        # One sentence about an image should have one meaning.
        meanings: dict[str, Counter] = {}
        for query in truth.queries:
            sentence = " ".join(query.text.lower().split())
            meaning = query.mask_type, frozenset(query.instance_ids)
            meanings.setdefault(sentence, Counter())[meaning] += 1
        num_queries += len(truth.queries)
        num_repeated += sum(counts.total() - len(counts) for counts in meanings.values())
        ambiguous += [s for s, counts in meanings.items() if len(counts) > 1]
    if num_ignored:
        yield f"{num_ignored} of {num_annotations} annotations are ignored (iscrowd or ignore)"
    if num_same_masks:
        yield (
            f"{num_same_masks} of {num_annotations} annotations have the mask and the category of "
            "another one of their image; remove those that are there twice"
        )
    if num_repeated:
        yield f"{num_repeated} of {num_queries} queries repeat another one of their image"
    if ambiguous:
        yield (
            f"{len(ambiguous)} sentences have queries about one image that ask for different mask "
            f"types or objects ({ambiguous[0]!r})"
        )

    names = [image.file_name for image in dataset.images]
    for other in sorted(dataset.path.parent.glob("*.json")):
        # A folder may hold files that are no splits.
        if other != dataset.path and {dataset.path.stem, other.stem} & {"train", "dev"}:
            others = read_json(other, need_images=False).images
            shared = find_pictures_in_both(names, [image.file_name for image in others])
            if shared:
                yield f"{shared} ({dataset.path.name} and {other.name})"


def find_leaks(dataset: Dataset, other: Dataset) -> Iterator[str]:
    """Yields the images of a dataset whose pixels are in the other one, too.

    Raises InputError for an image that cannot be read.
    """
    names = {
        _hash_image(other, index): other.images[index].file_name for index in range(len(other))
    }
    for index in range(len(dataset)):
        name = names.get(_hash_image(dataset, index))
        if name is not None:
            file_name = dataset.images[index].file_name
            yield f"{file_name} is in {other.path} as well ({name}); remove it from one of the two"


def _hash_image(dataset: Dataset, index: int) -> str:
    image = dataset.image_at(index)
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()
