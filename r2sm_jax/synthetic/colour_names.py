"""Names the colour of an object of a photo by its pixels, where one colour covers most of it."""

import numpy as np
from jaxtyping import Int, UInt8

from r2sm_jax.data.masks import Mask
from r2sm_jax.synthetic.queries.names import is_person

COLOURS = (
    "black", "white", "grey", "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown"
)  # fmt: skip

MIN_PIXELS = 150  # of an object, and half as many of clothes
MIN_SHARE = 0.5  # of the pixels, that have the colour
MAX_SHARE_OF_NEXT = 0.2  # of the pixels, that have the second colour
MIN_HEIGHT_OF_STANDING = 1.6  # in widths; where a person's clothes are is known of these only
CHEST = (0.22, 0.48)  # from the top, in heights of the person


def name_colour(image: UInt8[np.ndarray, "H W 3"], mask: Mask, category: str) -> str | None:
    """Returns the colour of a visible mask, of a person that of the clothes.

    None where no colour is clear.
    """
    rows, columns = np.nonzero(mask)
    min_pixels = MIN_PIXELS
    if len(rows) >= min_pixels and is_person(category):
        top, height = rows.min(), np.ptp(rows) + 1
        if height < MIN_HEIGHT_OF_STANDING * (np.ptp(columns) + 1):
            return None
        is_chest = (rows >= top + CHEST[0] * height) & (rows < top + CHEST[1] * height)
        rows, columns = rows[is_chest], columns[is_chest]
        min_pixels = MIN_PIXELS // 2
    if len(rows) < min_pixels:
        return None

    step = max(1, len(rows) // 600)
    colours = classify_pixels(image[rows[::step], columns[::step]])
    shares = np.bincount(colours[colours >= 0], minlength=len(COLOURS)) / len(colours)
    first, second = np.argsort(-shares)[:2]
    if shares[first] < MIN_SHARE or shares[second] >= MAX_SHARE_OF_NEXT:
        return None
    return COLOURS[first]


def classify_pixels(pixels: UInt8[np.ndarray, "n 3"]) -> Int[np.ndarray, "n"]:
    """Returns an index into `COLOURS` for each RGB pixel, -1 between two colours.

    The limits of hue, saturation and value leave gaps, so that what people name in two ways is
    left out.
    """
    red, green, blue = np.moveaxis(pixels.astype(np.float32) / 255, -1, 0)
    value = np.maximum(np.maximum(red, green), blue)
    chroma = value - np.minimum(np.minimum(red, green), blue)
    saturation = chroma / np.maximum(value, 1e-6)
    divisor = np.maximum(chroma, 1e-6)
    hue = 60 * np.select(
        [value == red, value == green],
        [(green - blue) / divisor % 6, (blue - red) / divisor + 2],
        (red - green) / divisor + 4,
    )

    is_grey = (saturation < 0.18) | (chroma < 0.07)
    is_dark = value < 0.17
    has_hue = ~is_grey & ~is_dark & (saturation >= 0.25)
    is_strong = has_hue & (saturation > 0.5)
    is_muted = ((value < 0.6) & (saturation < 0.85)) | ((value < 0.75) & (saturation < 0.45))

    # The first that holds.
    rules = {
        "brown": has_hue & (hue >= 8) & (hue < 45) & is_muted,
        "pink": has_hue & (hue >= 315) & (hue < 350) & (value > 0.6) & (saturation < 0.75),
        "purple": has_hue & (hue >= 262) & (hue < 305),
        "blue": has_hue & (hue >= 190) & (hue < 255),
        "green": has_hue & (hue >= 75) & (hue < 165),
        "yellow": has_hue & (hue >= 45) & (hue < 66) & (saturation > 0.4) & (value > 0.55),
        "orange": is_strong & (hue >= 14) & (hue < 40) & (value > 0.7),
        "red": is_strong & ((hue < 12) | (hue >= 345)) & (value > 0.3),
        "black": is_dark | (is_grey & (value < 0.25)),
        "white": is_grey & (value > 0.78),
        "grey": is_grey & (value >= 0.3) & (value <= 0.7),
    }
    indices = [COLOURS.index(colour) for colour in rules]
    return np.select(list(rules.values()), indices, -1)
