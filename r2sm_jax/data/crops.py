"""Square crops around visible masks, and the way back to the image.

The completer (models/completion.py) reads such crops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from r2sm_jax.data import masks

CROP_EXTENT = 2.2  # side of the crop, as a multiple of the longer side of the visible mask's box
MIN_CROP_SIDE = 16  # pixels


@dataclass(frozen=True)
class CropWindow:
    """A square part of an image, in pixels; it can reach over the border."""

    x: int
    y: int
    side: int

    @classmethod
    def around(cls, mask: Bool[np.ndarray, "H W"]) -> "CropWindow":
        """The window around a visible mask that leaves room for what is hidden.

        Raises ValueError for an empty mask.
        """
        x0, y0, x1, y1 = masks.box(mask)
        if x1 == 0:
            raise ValueError("the mask is empty")
        side = max(MIN_CROP_SIDE, round(CROP_EXTENT * max(x1 - x0, y1 - y0)))
        return cls((x0 + x1 - side) // 2, (y0 + y1 - side) // 2, side)

    def cut(self, pixels: UInt8[np.ndarray, "H W ..."], size: int) -> UInt8[np.ndarray, "s s ..."]:
        """This part of an image or of a mask of 0 and 255, scaled to `size`; 0 beyond the border.

        Scaled down, a pixel is the mean of what it covers.
        """
        height, width = pixels.shape[:2]
        canvas = np.zeros((self.side, self.side, *pixels.shape[2:]), np.uint8)
        left, top = max(0, self.x), max(0, self.y)
        right, bottom = min(width, self.x + self.side), min(height, self.y + self.side)
        canvas[top - self.y : bottom - self.y, left - self.x : right - self.x] = pixels[
            top:bottom, left:right
        ]
        resized = Image.fromarray(canvas).resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(resized)

    def paste(
        self, logits: Float[np.ndarray, "s s"], height: int, width: int, outside: float
    ) -> Float[np.ndarray, "H W"]:
        """Values of this part at the resolution of an image; `outside` where it does not reach."""
        scaled = Image.fromarray(np.asarray(logits, np.float32)).resize(
            (self.side, self.side), Image.Resampling.BILINEAR
        )
        canvas = np.full((height, width), outside, np.float32)
        left, top = max(0, self.x), max(0, self.y)
        right, bottom = min(width, self.x + self.side), min(height, self.y + self.side)
        canvas[top:bottom, left:right] = np.asarray(scaled)[
            top - self.y : bottom - self.y, left - self.x : right - self.x
        ]
        return canvas


def cut_crop(
    image: UInt8[np.ndarray, "H W 3"],
    window: CropWindow,
    size: int,
    object_masks: Sequence[Bool[np.ndarray, "H W"]],
) -> UInt8[np.ndarray, "s s c"]:
    """A crop of an image: its colours, which pixels are inside of the image, and the given masks.

    So c is 4 and the number of masks. Masks are 0..255: the share of a pixel that they cover.
    """
    inside = np.full(image.shape[:2], 255, np.uint8)
    parts = [window.cut(image, size), window.cut(inside, size)[..., None]]
    for mask in object_masks:
        parts.append(window.cut(mask * np.uint8(255), size)[..., None])
    return np.concatenate(parts, axis=2)
