"""Counts the objects and queries of a split, and says what can be learnt and scored on it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import find_shared_files, refuse_systematic
from r2sm_jax.data.dataset import ImageTruth, Source
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError
from r2sm_jax.query import Query, keyword_mask_type

NUM_CHECKED = 200
"""Images of a training split that `check_teaches` looks at."""
MIN_OBJECTS = 20
"""Of fewer objects nothing is said about their shapes."""
MIN_DOUBLE_IOU = 0.5
"""Of the visible masks of two objects of a class, from which on one is taken for a double."""
CROWD_REMEDY = (
    "CVAT and Datumaro set iscrowd for every mask that was drawn with a brush: if these are single "
    "objects, set it to 0, or pass --crowds objects (of train --data.crowds)"
)


@dataclass
class SplitSummary:
    """Counts of the objects and queries of some images."""

    num_images: int = 0
    num_without_query: int = 0
    """Images without any."""

    num_objects: int = 0
    num_ignored: int = 0
    """Objects that loss, queries and metrics leave out. All below is without them."""
    num_complete: int = 0
    """Objects whose complete mask is known."""
    num_occluded: int = 0
    """Objects that are known to be partly hidden."""
    hidden_shares: list[float] = field(default_factory=list)
    """Of the objects whose complete mask is known, from 0 to 1."""
    num_rectangles: int = 0
    """Objects whose complete mask is a rectangle along the image's sides."""
    num_doubles: int = 0
    """Objects that cover an earlier one of their class."""
    first_double: str = ""
    """Where one of these is."""

    num_queries: int = 0
    num_with_targets: int = 0
    num_of_several: int = 0
    """Queries that mean several objects."""
    num_against_rule: int = 0
    """Queries about whose mask type the keyword rule is wrong."""
    num_repeated: int = 0
    """Queries that stand in an image a second time."""
    ambiguous: list[str] = field(default_factory=list)
    """Sentences with several meanings in one image."""
    num_only_ignored: int = 0
    """Queries that mean ignored objects only."""
    num_amodal: int = 0
    num_without_mask: int = 0
    """Amodal queries with a target whose complete mask is not known."""
    num_amodal_of_occluded: int = 0
    """Amodal queries with a target that is partly hidden."""

    def add(self, truth: ImageTruth) -> None:
        """Counts the annotations of one image."""
        self.num_images += 1
        self.num_without_query += not truth.queries
        ignored, incomplete, occluded = set(), set(), set()
        of_class: dict[str, list[RLE]] = defaultdict(list)
        for instance in truth.instances:
            if instance.ignore:
                ignored.add(instance.id)
                continue
            of_class[instance.category].append(instance.modal)
            if instance.amodal is None:
                incomplete.add(instance.id)
            else:
                modal_area, amodal_area = masks.areas([instance.modal, instance.amodal])
                width, height = masks.coco.toBbox(instance.amodal)[2:]
                self.num_complete += 1
                self.num_rectangles += amodal_area == width * height
                self.hidden_shares.append((amodal_area - modal_area) / max(1, amodal_area))
                if modal_area < amodal_area:
                    occluded.add(instance.id)
        for name, rles in of_class.items():
            num_doubles = count_doubles(rles)
            self.num_doubles += num_doubles
            if num_doubles and not self.first_double:
                self.first_double = f"{name!r} on {truth.file_name}"
        self.num_objects += len(truth.instances)
        self.num_ignored += len(ignored)
        self.num_occluded += len(occluded)

        for query in truth.queries:
            targets = set(query.instance_ids)
            self.num_queries += 1
            self.num_with_targets += bool(targets)
            self.num_of_several += len(targets) > 1
            self.num_against_rule += keyword_mask_type(query.text) != query.mask_type
            self.num_only_ignored += bool(targets) and targets <= ignored
            if query.mask_type == "amodal":
                self.num_amodal += 1
                self.num_without_mask += bool(targets & incomplete)
                self.num_amodal_of_occluded += bool(targets & occluded)
        self._add_meanings(truth.queries)

    def _add_meanings(self, queries: Iterable[Query]) -> None:
        """Compares the sentences about one image, each of which should have one meaning."""
        meanings: dict[str, Counter] = {}
        for query in queries:
            sentence = " ".join(query.text.lower().split())
            meaning = query.mask_type, frozenset(query.instance_ids)
            meanings.setdefault(sentence, Counter())[meaning] += 1
        for sentence, counts in meanings.items():
            self.num_repeated += counts.total() - len(counts)
            if len(counts) > 1:
                self.ambiguous.append(sentence)

    def reason_for_nothing(self) -> str:
        """Why nothing can be learnt or scored, with the remedy; "" if something can."""
        if not self.num_objects:
            return "it has no annotations; add them"
        if self.num_ignored == self.num_objects:
            return f"all annotations are ignored; {CROWD_REMEDY}"
        if not self.num_queries:
            return (
                "it has no queries; write some with python -m r2sm_jax.data queries template, or "
                "requests"
            )
        if not self.num_with_targets:
            return "no query has a target; give instance_ids"
        if self.num_only_ignored == self.num_queries:
            return f"all queries mean ignored annotations only; {CROWD_REMEDY}"
        if self.num_only_ignored + self.num_without_mask == self.num_queries:
            return (
                "no query has the mask that it asks for; give segmentation, the complete mask, of "
                "its targets"
            )
        return ""

    def ignored(self) -> str:
        """Says how many objects are left out."""
        objects = f"{self.num_ignored} of {self.num_objects} objects are ignored"
        remedy = "if crowds are objects there, pass --crowds objects (of train --data.crowds)"
        return f"{objects} in training and metrics; {remedy}"

    def doubles(self) -> Iterator[str]:
        """Says which objects are there twice, as detections that are hardly sure are."""
        if self.num_doubles:
            yield (
                f"{self.num_doubles} of {self.num_objects} annotations cover another of the same "
                f"class on their image ({self.first_double}); remove those that are there twice, "
                "or leave out those with low scores (--min-score)"
            )

    def repetitions(self) -> Iterator[str]:
        """Says which queries are there twice, or have several meanings."""
        if self.num_repeated:
            queries = f"{self.num_repeated} of {self.num_queries} queries"
            yield f"{queries} repeat another one of their image"
        if self.ambiguous:
            yield (
                f"{len(self.ambiguous)} sentences have queries about one image that ask for "
                f"different mask types or objects ({self.ambiguous[0]!r})"
            )

    def warnings(self) -> Iterator[str]:
        """Says of which queries nothing is learnt or scored, which masks are likely boxes, and why
        modal and amodal masks cannot be told apart."""
        if self.num_only_ignored:
            queries = f"{self.num_only_ignored} of {self.num_queries} queries"
            yield f"{queries} mean ignored annotations only"
        if self.num_without_mask:
            queries = f"{self.num_without_mask} of {self.num_amodal} amodal queries"
            what = "are about objects whose complete mask is not known (segmentation is null)"
            yield f"{queries} {what}"
        if self.num_complete >= MIN_OBJECTS and self.num_rectangles >= 0.9 * self.num_complete:
            objects = f"{self.num_rectangles} of {self.num_complete} complete masks"
            yield f"{objects} are rectangles; a tool may have written boxes in the place of masks"

        if not self.num_complete:
            yield (
                "no complete mask is known (segmentation is null everywhere): only modal is learnt"
            )
        elif not self.num_occluded:
            yield "no object is hidden anywhere, so that modal and amodal masks are the same"
        elif self.num_amodal and not self.num_amodal_of_occluded:
            yield "no amodal query is about an object of which a part is hidden"
        elif self.num_queries and self.num_amodal in (0, self.num_queries):
            mask_type = "amodal" if self.num_amodal else "modal"
            yield f"all queries ask for {mask_type} masks, so that nothing tells the types apart"


def count_doubles(rles: Sequence[RLE]) -> int:
    """How many masks of one class cover an earlier one."""
    if len(rles) < 2:
        return 0
    ious = masks.ious(rles, rles, [False] * len(rles))
    covers_earlier = np.tril(ious, -1) > MIN_DOUBLE_IOU
    return int(covers_earlier.any(1).sum())


def summarize(truths: Iterable[ImageTruth]) -> SplitSummary:
    """The counts of the annotations of all these images."""
    summary = SplitSummary()
    for truth in truths:
        summary.add(truth)
    return summary


def review(source: Path | str, truths: Sequence[ImageTruth], collector: Collector) -> SplitSummary:
    """Notes what is odd about the images that were read: files under two ids, and doubles.

    `data check`, `convert` and `complete` call it for files of others, and so does who composes
    photos. Raises InputError if most images share their file with another one.
    """
    shared = find_shared_files([truth.file_name for truth in truths])
    summary = summarize(truths)
    for sentence in (*map(str, refuse_systematic(source, shared)), *summary.doubles()):
        collector.note(str(source), sentence)
    return summary


def check_teaches(source: Source, name: str) -> list[str]:
    """Looks at up to `NUM_CHECKED` images of a training split, evenly spread.

    Returns warnings. Raises InputError, with `name`, the data source, where nothing can be learnt.
    """
    stride = -(-len(source) // NUM_CHECKED)
    summary = summarize(source.truth_at(index) for index in range(0, len(source), stride))
    reason = summary.reason_for_nothing()
    if reason:
        raise InputError(f"{name}: nothing can be learnt from the training split, since {reason}")
    return list(summary.warnings())
