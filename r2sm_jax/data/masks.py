"""Masks: run-length encoding, polygons, boxes and unions.

A mask is a boolean array `[H W]`. In JSON it is COCO's run-length encoding (RLE), `{"size": [H, W],
"counts": ...}`. `counts` is COCO's compressed string, or the plain list of run lengths (in
hand-made files and COCO's crowds). Here, "a compressed RLE" is one with a string (or bytes) that
was checked or made by this module.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import contourpy
import numpy as np
from jaxtyping import Bool, Float, Int
from pycocotools import mask as pycocotools_mask
from scipy.ndimage import binary_erosion
from scipy.spatial import KDTree

coco: Any = pycocotools_mask  # its type stubs do not cover compressed RLEs
RLE = Mapping[str, Any]
Mask = Bool[np.ndarray, "H W"]
MAX_PIXELS = 1 << 28
"""Larger masks are refused: decoding takes a byte a pixel, several times over."""
MAX_COORDINATE = 100_000
"""Polygons that reach farther out are refused: the rasteriser walks along every pixel of an
edge."""
MIN_SIDE_FOR_SHARES = 8
"""In smaller images a polygon inside of one pixel may have coordinates from 0 to 1."""
MAX_AREAS = 255
"""RLEs that `coco.area` takes in one call; more overflow its counter (pycocotools 2.0.11)."""
MOST_PARTS = 4
"""How many parts of a mask an `outline` has at most."""
MOST_POINTS = 24
"""How many corners a part of an `outline` has at most."""


def encode(mask: Mask) -> dict[str, Any]:
    """The compressed RLE of a mask `[H W]`, whose counts are a string, as JSON needs it."""
    return _with_text(coco.encode(np.asarray(mask, np.uint8, order="F")))


def check(rle: Any) -> dict[str, Any]:
    """Checks any RLE and returns its compressed form. Raises ValueError, with a reason.

    pycocotools does not check: it fills what a truncated string leaves open with uninitialised
    memory.
    """
    height, width = rle_size(rle)
    counts = rle.get("counts")
    if isinstance(counts, str | bytes):
        runs = _uncompress(counts)
    elif isinstance(counts, Sequence) and all(map(_is_run, counts)):
        runs = np.array(counts, np.int64)
    else:
        raise ValueError("the RLE's 'counts' is neither a string nor a list of run lengths")
    # Each run is bounded before they are summed, so that the sum of hostile runs cannot wrap
    # around.
    if ((runs < 0) | (runs > height * width)).any() or runs.sum() != height * width:
        raise ValueError(f"the RLE's runs do not fill its size {height} x {width}")
    if not isinstance(counts, str | bytes):
        uncompressed = {"size": [height, width], "counts": runs.tolist()}
        counts = coco.frPyObjects(uncompressed, height, width)["counts"]
    if isinstance(counts, bytes):
        counts = counts.decode()
    return {"size": [height, width], "counts": counts}


def _is_run(value: Any) -> bool:
    """Whether a value may be a run length. `bool` is an `int` for Python, and not for JSON."""
    return type(value) is int and abs(value) <= MAX_PIXELS


def decode(rle: Any) -> Mask:
    """The mask `[H W]` of any RLE, in C order. Raises ValueError like `check`."""
    return np.ascontiguousarray(expand(check(rle)))


def expand(rle: RLE, first: int = 0, end: int | None = None) -> Bool[np.ndarray, "H _W"]:
    """The mask `[H W]` of a compressed RLE in Fortran order, or only some of its columns.

    These are the columns from `first` to before `end`; None stands for the width. It is faster than
    `decode`, since it does not check the RLE or change the order.
    """
    height, width = rle["size"]
    columns = (width if end is None else end) - first
    # Runs count pixels column by column, so columns are a range of pixels.
    edges = np.cumsum(_uncompress(rle["counts"])) - first * height
    edges = edges.clip(0, columns * height)
    pixels = np.zeros(columns * height, bool)
    # Background and mask alternate, and the first run is background. Only from the first run of the
    # mask to the last are pixels written one by one.
    runs = np.diff(edges)
    pixels[edges[0] : edges[-1]] = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
    return pixels.reshape(columns, height).T


def compressed(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """The compressed RLE of a `segmentation` of an image of this size, in any usual layout.

    `segmentation` is an RLE, a polygon, or a list of either, which are united. A polygon is a list
    of numbers `[x1, y1, x2, y2, ...]` or of points; those of fewer than three points are left out
    if there are others. Raises ValueError, with a reason, for anything that is not a mask of this
    size.
    """
    if isinstance(segmentation, Mapping):
        if not segmentation.keys() & {"size", "counts"}:
            fields = ", ".join(map(str, segmentation)) or "no field"
            raise ValueError(
                f"it has {fields}, and not the 'size' and 'counts' of one mask's RLE; give the "
                "segmentation of one object"
            )
        size = rle_size(segmentation)
        if size != (height, width):
            problem = f"the RLE's size {size[0]} x {size[1]} is not its image's {height} x {width}"
            if size == (width, height):
                problem += "; height and width seem to be exchanged in one of the two"
            raise ValueError(problem)
        return check(segmentation)
    if not isinstance(segmentation, list | tuple):
        raise ValueError("it is neither an RLE nor a list of polygons")
    if not segmentation:
        raise ValueError("the list of polygons is empty")
    if all(isinstance(part, Mapping) for part in segmentation):
        rles = [compressed(rle, height, width) for rle in segmentation]
        return _with_text(coco.merge(rles))
    check_size(height, width)
    rings = _rings(segmentation)
    corners = np.concatenate(rings)
    refuse_shares(corners, height, width)
    # The corners of a pixel are eight numbers.
    if len(corners) > 8 and np.isin(corners, (0, 1)).all():
        raise ValueError("its numbers are 0 and 1, as pixels are; give a picture, RLE or polygons")
    # Runs that pycocotools made itself need no check.
    polygons = coco.frPyObjects([ring.tolist() for ring in rings], height, width)
    return _with_text(coco.merge(polygons))


def refuse_shares(corners: np.ndarray, height: int, width: int) -> None:
    """Raises ValueError for coordinates that are shares of the size of an image of this size."""
    has_fractions = (corners % 1 != 0).any()
    is_small = min(height, width) < MIN_SIDE_FOR_SHARES
    if has_fractions and not is_small and corners.min() >= 0 and corners.max() <= 1:
        raise ValueError("the polygon's coordinates are shares of the image's size, not pixels")


def _rings(polygons: Sequence[Any]) -> list[Float[np.ndarray, " n"]]:
    """The coordinates of one polygon or of several. Raises ValueError for anything else.

    pycocotools would take four numbers for a box, and crash on others.
    """
    try:
        values = np.asarray(polygons, np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.empty((0, 0))  # several polygons of different lengths
    is_one = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 2)
    nested = [polygons] if is_one else polygons
    rings = []
    for polygon in nested:
        try:
            ring = np.asarray(polygon, np.float64)
        except (TypeError, ValueError, OverflowError):
            ring = np.full(1, np.nan)
        is_flat = ring.ndim == 1 and ring.size % 2 == 0
        is_list_of_points = ring.ndim == 2 and ring.shape[-1] == 2
        if not is_flat and not is_list_of_points:
            raise ValueError("a polygon is neither [x1, y1, x2, y2, x3, y3, ...] nor points [x, y]")
        if not (np.abs(ring) <= MAX_COORDINATE).all():
            raise ValueError(f"a polygon's coordinates are not all numbers up to {MAX_COORDINATE}")
        if ring.size >= 6:
            rings.append(ring.ravel())
    if not rings:
        raise ValueError("a polygon needs at least three points, as [x1, y1, x2, y2, x3, y3, ...]")
    return rings


def from_segmentation(segmentation: Any, height: int, width: int) -> Mask:
    """The mask `[H W]` of a `segmentation`. Raises ValueError like `compressed`."""
    return np.ascontiguousarray(expand(compressed(segmentation, height, width)))


def merge(rles: Sequence[RLE], height: int, width: int) -> RLE:
    """The union of compressed RLEs of one size; an empty mask if there are none."""
    if not rles:
        return encode(np.zeros((height, width), bool))
    if len(rles) == 1:
        return rles[0]
    return _with_text(coco.merge(list(rles)))


def intersect(one: RLE, other: RLE) -> RLE:
    """The intersection of two compressed RLEs."""
    return coco.merge([one, other], intersect=True)


def _with_text(rle: RLE) -> dict[str, Any]:
    """An RLE of pycocotools with a string as counts, so that it can go into JSON."""
    height, width = rle["size"]
    return {"size": [int(height), int(width)], "counts": rle["counts"].decode("ascii")}


def digest(rle: RLE) -> str:
    """A hash of a mask, the same for all of its RLEs."""
    same = encode(expand(rle))
    return hashlib.sha256(f"{same['size']} {same['counts']}".encode()).hexdigest()[:16]


def same_but_edge(one: RLE, other: RLE) -> bool:
    """Whether masks differ no more than by an edge of two pixels, as where a tool drew a mask
    anew."""
    difference = np.pad(expand(one) ^ expand(other), 1)
    x0, y0, x1, y1 = box(difference)
    return not binary_erosion(difference[y0:y1, x0:x1], np.ones((3, 3))).any()


def areas(rles: Sequence[RLE]) -> list[int]:
    """Number of pixels in each compressed RLE."""
    counts: list[int] = []
    for start in range(0, len(rles), MAX_AREAS):
        counts += [int(n) for n in coco.area(list(rles[start : start + MAX_AREAS]))]
    return counts


def ious(
    detections: Sequence[RLE], truth: Sequence[RLE], is_crowd: Sequence[bool]
) -> Float[np.ndarray, "d g"]:
    """IoU of every pair of compressed RLEs.

    For a crowd region it is the share of the detection that lies in the region.
    """
    if not detections or not truth:
        return np.zeros((len(detections), len(truth)))
    flags = [int(flag) for flag in is_crowd]
    return np.asarray(coco.iou(list(detections), list(truth), flags), float)


def rle_size(rle: Any) -> tuple[int, int]:
    """Height and width that an RLE states. Raises ValueError if it states none."""
    # What JSON gives is looked at first: millions of RLEs are checked when a large file is opened.
    size = rle.get("size") if isinstance(rle, dict | Mapping) else None
    if not isinstance(size, list | Sequence) or len(size) != 2:
        raise ValueError("the RLE's 'size' is not [height, width]")
    height, width = size
    if type(height) is not int or type(width) is not int:
        raise ValueError("the RLE's 'size' is not [height, width]")
    check_size(height, width)
    return height, width


def check_size(height: int, width: int) -> None:
    """Raises ValueError if no image and no RLE can have this size."""
    if min(height, width) < 1 or height * width > MAX_PIXELS:
        raise ValueError(
            f"{height} x {width} is no size of an RLE or an image, or more than {MAX_PIXELS} pixels"
        )


def box(mask: Mask) -> tuple[int, int, int, int]:
    """The tight box `(x0, y0, x1, y1)` around a mask, half-open; all zeros for an empty mask."""
    columns = np.flatnonzero(mask.any(0))
    rows = np.flatnonzero(mask.any(1))
    if not len(rows):
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def coco_box(mask: Mask) -> list[int]:
    """The tight box around a mask in COCO's form, `[x, y, width, height]`."""
    x0, y0, x1, y1 = box(mask)
    return [x0, y0, x1 - x0, y1 - y0]


def area(mask: Mask) -> int:
    """Number of pixels in a mask."""
    return int(np.count_nonzero(mask))


def occlude_rate(visible: Mask, complete: Mask) -> float:
    """Share of an object that is hidden, from 0 to 1 (COCOA's `occlude_rate`).

    The visible mask lies in the complete one.
    """
    return 1 - area(visible) / max(1, area(complete))


def union(masks: Iterable[Mask], shape: tuple[int, int]) -> Mask:
    """The union of masks `[H W]` of one `shape`; an empty mask if there are none."""
    return np.logical_or.reduce([np.zeros(shape, bool), *masks])


def mask_fields(modal: RLE, amodal: RLE | None) -> dict[str, Any]:
    """The fields of an annotation that its masks determine, compressed RLEs of one size.

    `amodal` is None if the complete mask is not known.
    """
    # Visible fringes outside the complete mask are added to it: modal ⊆ amodal holds everywhere, as
    # losses and metrics assume.
    complete = modal if amodal is None else merge([modal, amodal], *modal["size"])
    (num_pixels,) = areas([complete])
    fields: dict[str, Any] = {
        "bbox": [int(number) for number in coco.toBbox(complete)],
        "area": num_pixels,
        "iscrowd": 0,
        "segmentation": None if amodal is None else complete,
    }
    if amodal is None:
        return fields | {"visible_mask": modal}
    occluded = expand(complete) & ~expand(modal)
    fields["occlude_rate"] = area(occluded) / max(1, num_pixels)
    if occluded.any():  # without a visible mask an object counts as fully visible
        fields |= {"visible_mask": modal, "invisible_mask": encode(occluded)}
    return fields


def polygons(mask: Mask) -> list[list[float]]:
    """The outlines of all parts of a mask `[H W]` in pixels, largest first, without holes.

    Each is `[x1, y1, x2, y2, ...]`, and moves by no more than half a pixel.
    """
    rings = (_simplify(ring, 0.5)[:-1] for ring in _outer_rings(mask))
    return [ring.round(2).ravel().tolist() for ring in rings if len(ring) > 2]


def as_polygons(rle: RLE) -> list[list[float]] | RLE:
    """A mask as polygons: its outlines, or one polygon if it has holes. One of a few pixels stays
    an RLE."""
    mask = expand(rle)
    rings = polygons(mask)
    if rings and not same_but_edge(compressed(rings, *rle["size"]), rle):
        rings = [one_polygon(mask).ravel().tolist()]
    return rings or rle


def one_polygon(mask: Mask) -> Float[np.ndarray, "n 2"]:
    """The outlines of all parts and holes of a mask `[H W]` as one polygon in pixels; none of a
    mask without area.

    A bridge without width leads to each outline from the nearest point of those before, and back,
    as in YOLO's labels of objects in several parts.
    """
    rings = [_simplify(ring, 0.5)[:-1] for ring in _all_rings(mask)]
    joined, *others = [ring for ring in rings if len(ring) > 2] or [np.empty((0, 2))]
    for ring in others:
        distances, places = map(np.asarray, KDTree(ring).query(joined))
        start = int(distances.argmin())
        around = np.roll(ring, -int(places[start]), axis=0)
        joined = np.concatenate([joined[: start + 1], around, around[:1], joined[start:]])
    return joined.round(2)


def outline(mask: Mask) -> list[list[int]]:
    """The outlines of the largest parts of a mask `[H W]`, short enough for a language model.

    There are at most `MOST_PARTS`, each `[x1, y1, x2, y2, ...]` of at most `MOST_POINTS` points,
    without holes.
    """
    return [_few_points(ring) for ring in _outer_rings(mask)[:MOST_PARTS]]


def _few_points(ring: np.ndarray) -> list[int]:
    """Simplifies a closed ring `[n 2]` to at most `MOST_POINTS` corners, in whole pixels, flat."""
    tolerance = 1.0
    points = _simplify(ring, tolerance)
    while len(points) - 1 > MOST_POINTS:
        tolerance *= 2
        points = _simplify(ring, tolerance)

    corners = np.rint(points).astype(int).tolist()
    distinct = [point for point, following in pairwise(corners) if point != following]
    if len(distinct) < 3:
        # Rounding leaves a part of a few pixels no area, so its box stands for it.
        x0, y0 = np.floor(ring.min(0)).astype(int).tolist()
        x1, y1 = np.ceil(ring.max(0)).astype(int).tolist()
        distinct = [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]
    return [coordinate for point in distinct for coordinate in point]


def _outer_rings(mask: Mask) -> list[np.ndarray]:
    """The closed outlines `[n 2]` of a mask's parts, largest first."""
    return [ring for ring in _all_rings(mask) if _signed_area(ring) > 0]


def _all_rings(mask: Mask) -> list[np.ndarray]:
    """The closed outlines `[n 2]` of a mask's parts, largest first, and after them of its holes."""
    x0, y0, x1, y1 = box(mask)
    # The frame of background closes the outlines of parts at the border of the box.
    framed = np.pad(mask[y0:y1, x0:x1].astype(np.float32), 1)
    lines = contourpy.contour_generator(z=framed, line_type="Separate").lines(0.5)
    corner = np.array([x0 - 0.5, y0 - 0.5])  # centre of the top left pixel of the frame
    rings = [np.asarray(line, np.float64) + corner for line in lines]
    return sorted(rings, key=_signed_area, reverse=True)


def _signed_area(ring: np.ndarray) -> float:
    """Area inside a closed ring `[n 2]`; below zero for holes."""
    x, y = ring.T
    return float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]) / 2)


def _simplify(points: np.ndarray, tolerance: float) -> np.ndarray:
    """Leaves out points of a line `[n 2]` that moves by no more than `tolerance` without them.

    The method is that of Douglas and Peucker (1973): the point that is farthest from the chord
    stays, and so on with the two spans beside it.
    """
    corners = {0, len(points) - 1}
    spans = [(0, len(points) - 1)]
    while spans:
        start, end = spans.pop()
        chord = points[end] - points[start]
        offsets = points[start : end + 1] - points[start]
        along = np.clip(offsets @ chord / max(float(chord @ chord), 1e-12), 0, 1)
        distances = np.linalg.norm(offsets - along[:, None] * chord, axis=1)
        middle = start + int(distances.argmax())
        if start < middle < end and distances.max() > tolerance:
            corners.add(middle)
            spans += [(start, middle), (middle, end)]
    return points[sorted(corners)]


def _uncompress(counts: str | bytes) -> Int[np.ndarray, " runs"]:
    """The run lengths in COCO's compressed counts. Raises ValueError for a damaged string.

    Each character holds five bits of a number, low bits first, and one bit that says that more
    follow. In the last character the bit of value 16 is the sign. From the fourth number on, a
    number is the difference from the run two before it.
    """
    text = counts if isinstance(counts, bytes) else counts.encode("latin-1", "replace")
    codes = np.frombuffer(text, np.uint8) - np.uint8(48)  # characters below "0" wrap around
    if not len(codes) or codes.max() > 63 or codes[-1] & 32:
        if text.startswith((b"b'", b'b"')):
            raise ValueError("the RLE's 'counts' is str() of bytes; write counts.decode() instead")
        raise ValueError("the RLE's 'counts' is damaged or cut short")
    ends = np.flatnonzero(codes < 32)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 6:  # 30 bits hold any difference of runs; pycocotools overflows beyond
        raise ValueError("the RLE's 'counts' holds an impossible run length")
    codes = codes.astype(np.int64)
    runs = codes[starts] & 31
    for digit in range(1, longest):
        more = np.flatnonzero(lengths > digit)
        runs[more] |= (codes[starts[more] + digit] & 31) << (5 * digit)
    negative = np.flatnonzero(codes[ends] & 16)
    runs[negative] -= 1 << (5 * lengths[negative])
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
