"""What a file states twice, and differently: what would be wrong without a word.

Masks are compared with each other and with `bbox`, `area` and `occlude_rate`, names of pictures
with those of other images. A file most of whose records contradict themselves is refused.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.splits import original_name
from r2sm_jax.data.validation import Annotation, File
from r2sm_jax.errors import InputError

# The edges of a stated box may differ from those of the mask by the larger of the two, in pixels
# and in longer sides of the box: annotation tools round outwards and trace outlines between pixels.
BOX_TOLERANCE_PIXELS = 3
BOX_TOLERANCE = 0.1
MAX_AREA_RATIO = 2.0
"""A stated area may be this many times larger or smaller than that of the mask."""
MAX_VISIBLE_RATIO = 1.1
"""A visible mask may be this many times larger than its complete mask: annotators' fringes reach a
few pixels beyond it. More than that means that the two may have been exchanged."""
RATE_TOLERANCE = 0.02
"""Stated and measured occlusion rates may differ by this much."""
NUM_COMPARED_ON_READING = 200
"""Reading a dataset compares so many annotations. `data check` compares all, and so do the readers
of COCO files, of folders of masks and of R2SM."""

SENTENCES = {
    "box": "bboxes contradict their masks ({}); correct the masks, or leave bbox out",
    "area": "areas contradict their masks ({}); correct the masks, or leave area out",
    "larger": "visible masks are larger than their complete masks ({}); exchange the two fields "
    "or folders",
    "apart": "visible masks lie beside their complete masks ({}); give masks of the same object",
    "unseen": "visible masks have no pixel ({}); give those of what is seen, in pixels of the "
    "image",
    "hidden": "visible masks have the size of what occlude_rate says is hidden ({})",
    "inverted": "masks have all corners of their image ({}); are black and white inverted?",
    "outside": "boxes end outside of their image ({}); give x, y, width and height in pixels, not "
    "corners",
}
"""What can be wrong with the masks of an object."""
MEANS_NOTHING_ALONE = ("unseen", "hidden", "inverted")
"""Single objects may be wholly hidden or fill their image. It is told only if most are so."""


class Contradiction(NamedTuple):
    """A fact that records state twice, and differently."""

    count: int
    compared: int
    what: str

    @property
    def is_systematic(self) -> bool:
        """Whether most records contradict themselves, so that the file cannot be trusted.

        One alone may be an annotator's slip, also where it is all that was compared.
        """
        return self.count > max(1, self.compared / 2)

    def __str__(self) -> str:
        return f"{self.count} of {self.compared} {self.what}"


class MaskComparison:
    """Compares the masks of objects with each other, and with what is stated of them."""

    def __init__(self) -> None:
        self._compared: Counter[str] = Counter()
        # The objects that are wrong, each with a few words.
        self._wrong: dict[str, list[str]] = defaultdict(list)

    def add_box(self, where: str, bbox: Sequence[float], size: tuple[int, int]) -> None:
        """Compares a box `[x y width height]` that stands for a mask with the size of its image."""
        x, y, width, height = bbox
        tolerance = max(BOX_TOLERANCE_PIXELS, BOX_TOLERANCE * max(width, height))
        is_outside = max(x + width - size[1], y + height - size[0]) > tolerance
        self._count("outside", is_outside, f"{where}: bbox {list(bbox)}")

    def add(
        self, where: str, modal: RLE, amodal: RLE | None, stated: Annotation | None = None
    ) -> None:
        """Compares the masks of one object.

        `stated` may have its `bbox` and `area`, which are those of either mask, since tools differ
        in that, and its `occlude_rate`. `where` names the object.
        """
        height, width = modal["size"]
        whole = modal if amodal is None else amodal
        visible_area, area = masks.areas([modal, whole])
        is_larger = visible_area > MAX_VISIBLE_RATIO * area
        # Objects that are fully visible tell nothing about which mask is which.
        if visible_area != area:
            self._count("larger", is_larger, where)
            (shared,) = masks.areas([masks.intersect(modal, whole)])
            self._count("apart", shared < min(visible_area, area) / 2, where)
        self._count("unseen", not visible_area, where)
        is_inverted = False
        if area > height * width / 2:
            corners = masks.expand(whole)[[0, 0, -1, -1], [0, -1, 0, -1]]
            is_inverted = bool(corners.all())
        self._count("inverted", is_inverted, where)
        if stated is None:
            return

        box = _parse_box(stated.bbox)
        if box is not None:
            # An empty mask has no box.
            boxes = [
                np.array(masks.coco.toBbox(rle), float)
                for rle, pixels in ((modal, visible_area), (whole, area))
                if pixels
            ]
            is_wrong = not any(_box_matches(box, of_mask) for of_mask in boxes)
            numbers = boxes[-1].astype(int).tolist() if boxes else "empty"
            self._count("box", is_wrong, f"{where}: bbox {stated.bbox}, mask {numbers}")

        number = stated.area
        # Tools that do not compute an area write 0, 1 or the box's.
        area_of_box = 1.0 if box is None else box[2] * box[3]
        if not isinstance(number, int | float) or not 1 < number < np.inf:
            number = area_of_box
        if area and not np.isclose(number, area_of_box, rtol=0.1):
            ratios = [number / pixels for pixels in (visible_area, area) if pixels]
            is_wrong = not any(1 / MAX_AREA_RATIO <= ratio <= MAX_AREA_RATIO for ratio in ratios)
            self._count("area", is_wrong, f"{where}: area {number}, mask {area}")

        rate = stated.occlude_rate
        if isinstance(rate, int | float) and area and visible_area != area:
            shown = masks.areas([masks.intersect(modal, whole)])[0] / area
            is_hidden_share = abs(rate - (1 - shown)) <= RATE_TOLERANCE
            is_visible_share = abs(rate - shown) <= RATE_TOLERANCE
            # Near one half it is both, which tells nothing.
            self._count("hidden", is_visible_share and not is_hidden_share, where)

    def _count(self, what: str, is_wrong: bool, words: str) -> None:
        self._compared[what] += 1
        if is_wrong:
            self._wrong[what].append(words)

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields what is wrong with the masks of all objects."""
        for what, sentence in SENTENCES.items():
            if wrong := self._wrong[what]:
                found = Contradiction(len(wrong), self._compared[what], sentence.format(wrong[0]))
                if found.is_systematic or what not in MEANS_NOTHING_ALONE:
                    yield found


def refuse_systematic(
    source: Path | str, contradictions: Iterable[Contradiction]
) -> list[Contradiction]:
    """Raises InputError for the first contradiction of most records. Returns the others."""
    found = list(contradictions)
    for contradiction in found:
        if contradiction.is_systematic:
            raise InputError(f"{source}: {contradiction}")
    return found


def _parse_box(bbox: Any) -> np.ndarray | None:
    """A stated `bbox` as `[x y width height]`; None where there is none that can be compared."""
    try:
        box = np.array(bbox, float)
    except (TypeError, ValueError):
        return None
    if box.shape != (4,) or not np.isfinite(box).all():
        return None
    # Some tools state shares of the image's size, or [0, 0, 1, 1] for each object. A box in pixels
    # has a number above 1, except for a pixel in the image's corner, which is not compared.
    is_usable = min(box[2:]) > 0 and box.max() > 1
    return box if is_usable else None


def _box_matches(stated: np.ndarray, mask_box: np.ndarray) -> bool:
    """Whether two boxes `[x y width height]` are the same within the tolerance.

    Corners `[x0 y0 x1 y1]`, as Pascal VOC has them, are understood in place of the stated one.
    """
    tolerance = max(BOX_TOLERANCE_PIXELS, BOX_TOLERANCE * max(*stated[2:], *mask_box[2:]))
    corners, of_mask = [np.concatenate([box[:2], box[:2] + box[2:]]) for box in (stated, mask_box)]
    return any(np.abs(given - of_mask).max() <= tolerance for given in (corners, stated))


def compare_records(file: File, most: int | None = None) -> Iterator[Contradiction]:
    """Compares what the records of a dataset file state twice.

    `most` annotations are compared, evenly spread over the file; None = all. Masks that cannot be
    decoded are left to whoever reads them.
    """
    yield from find_shared_files([image.file_name for image in file.images])
    sizes = {image.id: (image.height, image.width) for image in file.images}
    comparison = MaskComparison()
    stride = 1 if most is None else -(-len(file.annotations) // most) or 1
    for annotation in file.annotations[::stride]:
        size = sizes[annotation.image_id]
        try:
            amodal, modal = annotation.rles(size)
        except ValueError:
            continue
        modal = modal or amodal
        if modal is not None:
            comparison.add(f"annotation {annotation.id}", modal, amodal, annotation)
    yield from comparison.contradictions()


def find_shared_files(file_names: Sequence[str]) -> Iterator[Contradiction]:
    """The images whose file is also that of another image, in any spelling."""
    counts = Counter(map(_file_key, file_names))
    shared = [name for name in file_names if counts[_file_key(name)] > 1]
    if shared:
        what = (
            f"images share their file with another image ({shared[0]}), so that masks may lie on "
            "the wrong picture and one picture may be in two splits; give every image its own "
            "file_name, such as a path with its folder"
        )
        yield Contradiction(len(shared), len(file_names), what)


def _file_key(name: str) -> str:
    """A path in one spelling: with slashes, composed accents, and without `./`."""
    return unicodedata.normalize("NFC", str(PurePosixPath(name.replace("\\", "/"))))


def find_pictures_in_both(
    file_names: Iterable[str], other_names: Iterable[str]
) -> Contradiction | None:
    """The pictures that two splits of one folder share, by their names in any spelling; augmented
    copies of one photo are shared, too."""
    names = {original_name(_file_key(name)): name for name in file_names}
    shared = sorted(names.keys() & {original_name(_file_key(name)) for name in other_names})
    if not shared:
        return None
    what = (
        f"pictures are in both ({names[shared[0]]}), so that figures are not of pictures that "
        "training has never seen; remove them from one of the two"
    )
    return Contradiction(len(shared), len(names), what)
