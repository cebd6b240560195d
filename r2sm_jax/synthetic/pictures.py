"""Small operations on pictures that `compose` and `cutouts` share, and a cache of decoded ones."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from r2sm_jax.synthetic.scenes.paint import Sprite, alpha_mask, cast_shadow

T = TypeVar("T")
BYTES_PER_PIXEL = 6  # of a cached picture: RGB or RGBA, and its masks
MIN_OBJECT_ALPHA = 16  # of 255, from which a pixel belongs to the picture of an object
SHADOW_SCENES_SHARE = 0.7  # of the scenes in which pasted objects cast shadows


class ImageCache(Generic[T]):
    """Keeps the most recently used pictures in memory. A copy in another process starts empty."""

    def __init__(self, max_bytes: int, num_pixels: Callable[[T], int]):
        """Keeps about `max_bytes` of pictures; `num_pixels` is the size of one."""
        self._options = (max_bytes, num_pixels)
        self._max_bytes = max_bytes
        self._num_pixels = num_pixels
        self._num_bytes = 0
        self._images: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], T]) -> T:
        """The picture of a key, read if it is not there."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
                return self._images[key]

        image = read()  # outside the lock: other threads go on
        with self._lock:
            if key not in self._images:
                self._images[key] = image
                self._num_bytes += BYTES_PER_PIXEL * self._num_pixels(image)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= BYTES_PER_PIXEL * self._num_pixels(oldest)
        return image

    def __reduce__(self):
        return type(self), self._options


def count_pixels(picture: Image.Image | None) -> int:
    """The number of pixels of a picture that may be missing."""
    return 0 if picture is None else picture.width * picture.height


def rescale(picture: Image.Image, scale: float, reducing_gap: float | None = None) -> Image.Image:
    """A picture at another size, at least 1 pixel wide and high."""
    width = max(1, round(picture.width * scale))
    height = max(1, round(picture.height * scale))
    return picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=reducing_gap)


def random_flip(rng: np.random.Generator, picture: Image.Image) -> Image.Image:
    """The picture or, in half of the draws, its mirror image."""
    if rng.random() < 0.5:
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return picture


def crop_to_object(picture: Image.Image) -> Image.Image:
    """The part of an RGBA picture that is not (nearly) transparent; all of it if there is none."""
    is_object = [int(alpha >= MIN_OBJECT_ALPHA) * 255 for alpha in range(256)]
    box = picture.getchannel("A").point(is_object).getbbox()
    return picture.crop(box) if box else picture


def filled_share(picture: Image.Image) -> float:
    """The share of the square around a picture that its mask covers."""
    return np.count_nonzero(alpha_mask(picture)) / max(picture.size) ** 2


def paste_sprites(rng: np.random.Generator, canvas: Image.Image, sprites: Sequence[Sprite]) -> None:
    """Pastes sprites on the canvas (mode RGB), the rearmost first, with soft shadows or without."""
    max_opacity = rng.uniform(0.15, 0.5) if rng.random() < SHADOW_SCENES_SHARE else 0.0
    opacity = [int(max_opacity * alpha) for alpha in range(256)]
    blur = 0.018 * canvas.width
    shift = (round(rng.uniform(-1, 1) * blur), round(blur))
    pad = int(3 * blur) + 1
    for sprite in sprites:
        if max_opacity > 0:
            cast_shadow(canvas, sprite, blur=blur, pad=pad, shift=shift, opacity=opacity)
        canvas.paste(sprite.image, (sprite.x, sprite.y), sprite.image)
