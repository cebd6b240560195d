"""The answer to one query at the image's own resolution, as arrays, RLE, polygons, PNG or overlay."""

from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import ImageLike, open_image
from r2sm_jax.errors import InputError
from r2sm_jax.query import MaskType

MASKS = ("mask", "modal", "amodal", "occluded")
"""Names of a prediction's masks; `mask` is the one that was asked for."""


@dataclass(frozen=True)
class InstanceMask:
    """One of the instances that a query means. `mask` is of the predicted type."""

    score: float
    mask: Bool[np.ndarray, "H W"]
    modal: Bool[np.ndarray, "H W"]
    amodal: Bool[np.ndarray, "H W"]


@dataclass(frozen=True)
class Prediction:
    """The answer to one query, at the image's own resolution. `amodal = modal ∪ occluded`."""

    query: str
    mask_type: MaskType
    amodal_probability: float
    score: float
    """Predicted IoU of `mask`."""
    modal: Bool[np.ndarray, "H W"]
    amodal: Bool[np.ndarray, "H W"]
    instances: tuple[InstanceMask, ...]
    undecided: bool = False
    """The probability lies within the margin of `predict --abstain`: both `modal` and `amodal` may be the answer."""
    unread: str = ""
    """The end of the query, where it is longer than the language model's limit: it had no influence on the answer."""

    @cached_property
    def occluded(self) -> Bool[np.ndarray, "H W"]:
        """The hidden part."""
        return self.amodal & ~self.modal

    @property
    def mask(self) -> Bool[np.ndarray, "H W"]:
        """The mask that was asked for."""
        return self.amodal if self.mask_type == "amodal" else self.modal

    def rle(self, name: str = "mask") -> dict[str, Any]:
        """COCO's run-length encoding of one of the masks, ready for JSON: `{"size": [H, W], "counts": "..."}`."""
        return masks.encode(self._named(name))

    def polygons(self, name: str = "mask") -> list[list[float]]:
        """Outlines of the parts of one of the masks, largest first, as COCO has them: `[x1, y1, x2, y2, ...]` in
        pixels, true to half a pixel. A polygon cannot have holes; `rle` is exact."""
        return masks.polygons(self._named(name))

    def png(self, name: str = "mask") -> bytes:
        """A PNG file of one of the masks: 0 or 255, one channel."""
        file = BytesIO()
        Image.fromarray(np.where(self._named(name), 255, 0).astype(np.uint8)).save(file, "PNG")
        return file.getvalue()

    def overlay(self, image: ImageLike) -> UInt8[np.ndarray, "H W 3"]:
        """The image with the visible part blue, the occluded part orange, and the mask that was asked for outlined.

        Raises:
            InputError: this is not the image that was asked about, since its size differs.
        """
        from r2sm_jax.data.sheet import overlay  # matplotlib's fonts, which an answer does not need

        array = open_image(image)
        if array.shape[:2] != self.modal.shape:
            sizes = " x ".join(map(str, array.shape[1::-1])), " x ".join(map(str, self.modal.shape[::-1]))
            raise InputError(f"the image is {sizes[0]}, the masks are {sizes[1]} pixels; give the image asked about")
        return overlay(array, self.modal, self.occluded, self.mask_type)

    def _named(self, name: str) -> Bool[np.ndarray, "H W"]:
        if name not in MASKS:
            raise InputError(f"there is no mask {name!r}; say {', '.join(MASKS[:-1])} or {MASKS[-1]}")
        return getattr(self, name)
