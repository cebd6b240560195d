"""Counts the objects and queries of a split, and says what can be learnt and scored on it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Source
from r2sm_jax.errors import InputError

NUM_CHECKED = 200
"""Images of a training split that `check_teaches` looks at."""
MIN_OBJECTS = 20
"""Of fewer objects nothing is said about their shapes."""
CROWD_REMEDY = (
    "CVAT and Datumaro set iscrowd for every mask that was drawn with a brush: if these are single "
    "objects, set it to 0, or convert with --crowds objects"
)


@dataclass
class SplitSummary:
    """Counts of the objects and queries of some images."""

    num_objects: int = 0
    num_ignored: int = 0
    """Objects that loss, queries and metrics leave out. The next three counts are without them."""
    num_complete: int = 0
    """Objects whose complete mask is known."""
    num_occluded: int = 0
    """Objects that are known to be partly hidden."""
    num_rectangles: int = 0
    """Objects whose complete mask is a rectangle along the image's sides."""

    num_queries: int = 0
    num_with_targets: int = 0
    num_only_ignored: int = 0
    """Queries that mean ignored objects only."""
    num_amodal: int = 0
    num_without_mask: int = 0
    """Amodal queries with a target whose complete mask is not known."""
    num_amodal_of_occluded: int = 0
    """Amodal queries with a target that is partly hidden."""

    def add(self, truth: ImageTruth) -> None:
        """Counts the annotations of one image."""
        ignored, incomplete, occluded = set(), set(), set()
        for instance in truth.instances:
            if instance.ignore:
                ignored.add(instance.id)
            elif instance.amodal is None:
                incomplete.add(instance.id)
            else:
                modal_area, amodal_area = masks.areas([instance.modal, instance.amodal])
                width, height = masks.coco.toBbox(instance.amodal)[2:]
                self.num_complete += 1
                self.num_rectangles += amodal_area == width * height
                if modal_area < amodal_area:
                    occluded.add(instance.id)
        self.num_objects += len(truth.instances)
        self.num_ignored += len(ignored)
        self.num_occluded += len(occluded)

        for query in truth.queries:
            targets = set(query.instance_ids)
            self.num_queries += 1
            self.num_with_targets += bool(targets)
            self.num_only_ignored += bool(targets) and targets <= ignored
            if query.mask_type == "amodal":
                self.num_amodal += 1
                self.num_without_mask += bool(targets & incomplete)
                self.num_amodal_of_occluded += bool(targets & occluded)

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


def summarize(truths: Iterable[ImageTruth]) -> SplitSummary:
    """The counts of the annotations of all these images."""
    summary = SplitSummary()
    for truth in truths:
        summary.add(truth)
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
