"""Masks: run-length encoding, polygons, boxes and unions.

A mask is a boolean array `[H W]`. In JSON it is COCO's run-length encoding (RLE), `{"size": [H, W], "counts": ...}`.
`counts` is COCO's compressed string, or the plain list of run lengths (in hand-made files and COCO's crowds). Here, "a
compressed RLE" is one with a string (or bytes) that was checked or made by this module.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from pycocotools import mask as pycocotools_mask

coco: Any = pycocotools_mask  # its type stubs do not cover compressed RLEs
RLE = Mapping[str, Any]
Mask = Bool[np.ndarray, "H W"]
MAX_PIXELS = 1 << 28
"""Larger masks are refused: decoding takes a byte a pixel, several times over."""


def encode(mask: Mask) -> dict[str, Any]:
    """The compressed RLE of a mask `[H W]`, with a string (never bytes) as counts, so that it can go into JSON."""
    rle = coco.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode("ascii")}


def check(rle: Any) -> dict[str, Any]:
    """The compressed form of any RLE. Raises ValueError, with a reason, for anything that is not one.

    pycocotools does not check: it fills what a truncated string leaves open with uninitialised memory.
    """
    height, width = rle_size(rle)
    counts = rle.get("counts")
    if isinstance(counts, bytes):
        counts = counts.decode("latin-1")
    if isinstance(counts, str):
        runs = _uncompress(counts)
    elif isinstance(counts, Sequence) and all(type(run) is int and abs(run) <= MAX_PIXELS for run in counts):
        runs = np.array(counts, np.int64)
    else:
        raise ValueError("the RLE's 'counts' is neither a string nor a list of run lengths")
    # Each run is bounded before they are summed, so that the sum of hostile runs cannot wrap around.
    if ((runs < 0) | (runs > height * width)).any() or runs.sum() != height * width:
        raise ValueError(f"the RLE's runs do not fill its size {height} x {width}")
    if not isinstance(counts, str):
        counts = coco.frPyObjects({"size": [height, width], "counts": runs.tolist()}, height, width)["counts"].decode()
    return {"size": [height, width], "counts": counts}


def decode(rle: Any) -> Mask:
    """The mask `[H W]` of any RLE, in C order. Raises ValueError like `check`."""
    return np.ascontiguousarray(expand(check(rle)))


def expand(rle: RLE) -> Mask:
    """The mask of a compressed RLE, in Fortran order. Faster than `decode`."""
    return np.asarray(coco.decode(rle)).view(bool)


def expand_columns(rle: RLE, first: int, end: int) -> Bool[np.ndarray, "H _W"]:
    """Columns `first` to `end` of a compressed RLE that has nothing outside of them."""
    height, counts = rle["size"][0], rle["counts"]
    edges = np.cumsum(_uncompress(counts.decode() if isinstance(counts, bytes) else counts)) - first * height
    columns = np.zeros((end - first) * height, bool)
    for start, stop in zip(edges[:-1:2].tolist(), edges[1::2].tolist(), strict=False):
        columns[start:stop] = True
    return columns.reshape(-1, height).T


def compressed(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """The compressed RLE of a COCO `segmentation` (RLE or polygons) of an image of this size.

    Raises ValueError, with a reason, for anything that is not a mask of this size.
    """
    if isinstance(segmentation, Mapping):
        size = rle_size(segmentation)
        if size != (height, width):
            raise ValueError(f"the RLE's size {size[0]} x {size[1]} is not its image's {height} x {width}")
        return check(segmentation)
    if isinstance(segmentation, list | tuple):
        return encode(from_polygons(segmentation, height, width))
    raise ValueError("it is neither an RLE nor a list of polygons")


def from_segmentation(segmentation: Any, height: int, width: int) -> Mask:
    """The mask `[H W]` of a COCO `segmentation`. Raises ValueError like `compressed`."""
    return np.ascontiguousarray(expand(compressed(segmentation, height, width)))


def from_polygons(polygons: Sequence[Any], height: int, width: int) -> Mask:
    """The mask `[H W]` that a polygon `[x1, y1, x2, y2, ...]`, or the union of a list of them, encloses.

    Raises ValueError for a polygon with fewer than three points (which pycocotools would take for a box), for
    an odd number of coordinates and for coordinates that are not finite numbers.
    """
    check_size(height, width)
    nested = [polygons] if polygons and isinstance(polygons[0], int | float) else polygons
    rings = []
    for polygon in nested:
        if not isinstance(polygon, Sequence) or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError("a polygon needs at least three points, as [x1, y1, x2, y2, x3, y3, ...]")
        try:
            ring = np.asarray(polygon, np.float64)
        except (TypeError, ValueError):
            ring = np.array([np.nan])
        if not np.isfinite(ring).all():
            raise ValueError("a polygon's coordinates are not all finite numbers")
        # Far points are moved towards the image: the rasteriser walks along every pixel of an edge.
        far = max(height, width)
        rings.append(np.clip(ring, -far, 2 * far).tolist())
    if not rings:
        raise ValueError("the list of polygons is empty")
    return decode(coco.merge(coco.frPyObjects(rings, height, width)))


def merge(rles: Sequence[RLE], height: int, width: int) -> RLE:
    """The union of compressed RLEs of one size; an empty mask where there are none."""
    if not rles:
        return encode(np.zeros((height, width), bool))
    return rles[0] if len(rles) == 1 else coco.merge(list(rles))


def intersect(one: RLE, other: RLE) -> RLE:
    """The intersection of two compressed RLEs."""
    return coco.merge([one, other], intersect=True)


def areas(rles: Sequence[RLE]) -> list[int]:
    """Number of pixels in each compressed RLE."""
    return [int(n) for n in coco.area(list(rles))] if rles else []


def ious(found: Sequence[RLE], wanted: Sequence[RLE], crowd: Sequence[bool]) -> Float[np.ndarray, "d g"]:
    """IoU of every pair of compressed RLEs; for a crowd region, the share of the found mask that lies in it."""
    if not found or not wanted:
        return np.zeros((len(found), len(wanted)))
    return np.asarray(coco.iou(list(found), list(wanted), [int(flag) for flag in crowd]), float)


def rle_size(rle: Any) -> tuple[int, int]:
    """Height and width that an RLE states. Raises ValueError where it states none."""
    size = rle.get("size") if isinstance(rle, Mapping) else None
    if not isinstance(size, Sequence) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ValueError("the RLE's 'size' is not [height, width]")
    check_size(size[0], size[1])
    return size[0], size[1]


def check_size(height: int, width: int) -> None:
    """Raises ValueError for what cannot be the size of an image."""
    if min(height, width) < 1:
        raise ValueError(f"{height} x {width} has no pixel")
    if height * width > MAX_PIXELS:
        raise ValueError(f"{height} x {width} is more than {MAX_PIXELS} pixels")


def box(mask: Mask) -> tuple[int, int, int, int]:
    """The tight box `(x0, y0, x1, y1)` around a mask, half-open; all zeros for an empty mask."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    if not len(rows):
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def coco_box(mask: Mask) -> list[int]:
    """The same box in COCO's form, `[x, y, width, height]`."""
    x0, y0, x1, y1 = box(mask)
    return [x0, y0, x1 - x0, y1 - y0]


def area(mask: Mask) -> int:
    """Number of pixels in a mask."""
    return int(np.count_nonzero(mask))


def union(masks: Iterable[Mask], shape: tuple[int, int]) -> Mask:
    """The union of any number of masks `[H W]` of one `shape`; an empty mask where there are none."""
    return np.logical_or.reduce([np.zeros(shape, bool), *masks])


def _uncompress(counts: str) -> Int[np.ndarray, " runs"]:
    """The run lengths in COCO's compressed counts. Raises ValueError for a damaged string.

    Each character holds five bits of a number, low bits first, and one bit that says that more follow. Bit 16 of the
    last character is the sign. From the fourth number on, a number is the difference from the run two places before.
    """
    codes = np.frombuffer(counts.encode("latin-1", "replace"), np.uint8) - np.uint8(48)  # lower characters wrap around
    if not len(codes) or codes.max() > 63 or codes[-1] & 32:
        raise ValueError("the RLE's 'counts' is damaged or cut short")
    ends = np.flatnonzero(codes < 32)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 6:  # 30 bits hold any difference of runs; pycocotools overflows beyond
        raise ValueError("the RLE's 'counts' holds an impossible run length")
    codes = codes.astype(np.int64)
    runs = codes[starts] & 31
    for place in range(1, longest):
        more = np.flatnonzero(lengths > place)
        runs[more] |= (codes[starts[more] + place] & 31) << (5 * place)
    negative = np.flatnonzero(codes[ends] & 16)
    runs[negative] -= 1 << (5 * lengths[negative])
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
