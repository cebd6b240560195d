"""The square frame that the model sees, and the way back from its masks to the image."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from scipy.sparse import csr_array

from r2sm_jax.data.masks import box

PAD_COLOUR = (124, 116, 104)
"""The colour of the border: ImageNet's mean, which normalisation turns into nearly zero."""

BAND_ROWS = 256
"""So many rows of a mask are computed at a time."""


@dataclass(frozen=True)
class Letterbox:
    """Fits an image `[height width]` into a square frame with sides of `size`.

    The longer side is scaled to `size`, the aspect stays, and the rest is padded at the right and
    at the bottom. Images, masks and logits share one geometry: pixel centres at half-integers
    (`align_corners=False`), scaled by `resized / original` along each axis, top left corners on
    each other.
    """

    height: int
    width: int
    size: int

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.size) < 1:
            raise ValueError(
                f"a letterbox needs positive sides, not {self.height} x {self.width} in {self.size}"
            )

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width of the image inside the frame."""
        scale = self.size / max(self.height, self.width)
        return max(1, int(self.height * scale + 0.5)), max(1, int(self.width * scale + 0.5))

    def image(self, image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "S S 3"]:
        """The image in its frame; antialiased where it shrinks, `PAD_COLOUR` around it."""
        self._check(image.shape[:2])
        height, width = self.resized
        resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        frame = np.empty((self.size, self.size, 3), np.uint8)
        frame[:height, :width] = np.asarray(resized)
        # Only the border, since a colour of three numbers is filled in slowly.
        frame[:height, width:] = PAD_COLOUR
        frame[height:] = PAD_COLOUR
        return frame

    def coverage(self, mask: Bool[np.ndarray, "H W"], cells: int) -> UInt8[np.ndarray, "s s"]:
        """How much of each cell of the frame, cut into `cells` x `cells`, the mask covers: 0..255.

        The exact area of the overlap, so area and outline stay true and sit on the image's at any
        scale. It is monotone: modal ⊆ amodal before means modal <= amodal after. More than 127 is
        at least half of the cell.
        """
        self._check(mask.shape)
        # The sides of the frame in pixels of the image.
        frame_height = self.height * self.size / self.resized[0]
        frame_width = self.width * self.size / self.resized[1]
        # Most masks are small, so only their boxes are multiplied.
        x0, y0, x1, y1 = box(mask)
        rows, down = _overlaps_of(y0, y1, self.height, frame_height, cells)
        columns, across = _overlaps_of(x0, x1, self.width, frame_width, cells)
        covered = np.zeros((cells, cells), np.uint8)
        # Sparse matrices multiply from the left only, so columns are reached by transposing.
        shares = (across @ (down @ mask[y0:y1, x0:x1].astype(np.float64)).T).T
        # A little more than half, so that rounding errors do not decide on exact halves.
        covered[rows, columns] = 255 * shares + 0.500001
        return covered

    def valid(self) -> Bool[np.ndarray, "S S"]:
        """Which pixels of the frame are image and not padding."""
        height, width = self.resized
        frame = np.zeros((self.size, self.size), bool)
        frame[:height, :width] = True
        return frame

    def undo(self, logits: Float[np.ndarray, "... s s"]) -> Float[np.ndarray, "... H W"]:
        """Brings logits at a square resolution of the frame back to the image's own resolution.

        In this order: bilinear to the whole frame, crop to the resized image, bilinear to the
        original size, without antialiasing: what SAM does. Raises ValueError for logits whose side
        does not divide the frame's.
        """
        logits = np.asarray(logits, np.float32)
        side = logits.shape[-1]
        self._check_logits(logits)
        rows = _undo_axis(side, self.size, self.resized[0], self.height)
        columns = _undo_axis(side, self.size, self.resized[1], self.width)
        resized = np.empty((*logits.shape[:-2], self.height, self.width), np.float32)
        for index in np.ndindex(logits.shape[:-2]):
            # Sparse matrices multiply from the left only, so columns are reached by transposing.
            wide = columns @ np.ascontiguousarray(logits[index].T)
            resized[index] = rows @ np.ascontiguousarray(wide.T)
        return resized

    def undo_mask(self, logits: Float[np.ndarray, "s s"]) -> Bool[np.ndarray, "H W"]:
        """The mask of the image's own resolution: where what `undo` gives is above 0.

        It is computed only around the logits that are above 0, some rows at a time. So small masks
        are quick, and large images need little memory. Raises ValueError as `undo`.
        """
        logits = np.asarray(logits, np.float32)
        side = logits.shape[-1]
        self._check_logits(logits)
        mask = np.zeros((self.height, self.width), bool)
        positive = logits > 0
        if not positive.any():
            return mask

        # A pixel is a mean of logits with weights of at least 0, so it is above 0 only if one of
        # them is.
        rows = _undo_axis(side, self.size, self.resized[0], self.height)
        columns = _undo_axis(side, self.size, self.resized[1], self.width)
        reached_rows = np.flatnonzero(rows @ positive.any(1).astype(np.float32))
        reached_columns = np.flatnonzero(columns @ positive.any(0).astype(np.float32))
        if not len(reached_rows) or not len(reached_columns):
            return mask  # all of it lies in the padding
        top, bottom = int(reached_rows[0]), int(reached_rows[-1]) + 1
        left, right = int(reached_columns[0]), int(reached_columns[-1]) + 1

        # Sparse matrices multiply from the left only, so columns are reached by transposing.
        wide = np.ascontiguousarray((columns[left:right] @ np.ascontiguousarray(logits.T)).T)
        for start in range(top, bottom, BAND_ROWS):
            end = min(start + BAND_ROWS, bottom)
            mask[start:end, left:right] = rows[start:end] @ wide > 0
        return mask

    def _check_logits(self, logits: np.ndarray) -> None:
        side = logits.shape[-1]
        if logits.ndim < 2 or logits.shape[-2] != side or self.size % side:
            raise ValueError(
                f"logits {logits.shape} are not a square that divides the frame of {self.size}"
            )

    def _check(self, shape: tuple[int, ...]) -> None:
        if shape != (self.height, self.width):
            raise ValueError(f"this letterbox is for {self.height} x {self.width}, not for {shape}")


@lru_cache(maxsize=2048)
def _overlaps_of(start: int, stop: int, side: int, frame: float, cells: int) -> tuple[slice, Any]:
    """The cells that pixels `start` to before `stop` reach along one axis, and their overlaps.

    The overlaps are those of `_cell_shares`, for these cells and pixels.
    """
    reached = slice(int(start * cells / frame), ceil(stop * cells / frame))
    return reached, _cell_shares(side, frame, cells)[reached, start:stop]


@lru_cache(maxsize=256)
def _cell_shares(pixels: int, frame: float, cells: int) -> Any:
    """The share of each cell that each pixel takes along one axis, sparse `[cells pixels]`.

    `frame` is the length of all cells together in pixels, at least `pixels`.
    """
    edges = np.linspace(0, frame, cells + 1)
    pixel = np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return csr_array(overlap.clip(0) * cells / frame)


@lru_cache(maxsize=256)
def _undo_axis(side: int, frame: int, resized: int, original: int) -> Any:
    """The matrix `[original side]` of both resizes and the crop along one axis.

    It is sparse, since SciPy multiplies sparse matrices in one thread. NumPy would leave dense ones
    to BLAS, whose threads wait long for each other where other programs use the same cores.
    """
    enlarged = csr_array(_bilinear(side, frame)[:resized])
    matrix: Any = csr_array(_bilinear(resized, original)) @ enlarged
    return matrix.astype(np.float32)


def _bilinear(source: int, target: int) -> Float[np.ndarray, "target source"]:
    """The matrix that resizes one axis bilinearly, without antialiasing.

    Pixel centres are at half-integers, and edges are repeated.
    """
    # Interpolating a row of the identity gives what its one pixel contributes to each target.
    centres = (np.arange(target) + 0.5) * (source / target) - 0.5
    return np.stack([np.interp(centres, np.arange(source), row) for row in np.eye(source)], axis=1)
