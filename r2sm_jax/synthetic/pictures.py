"""Small operations on pictures that `compose` and `cutouts` share."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from r2sm_jax.synthetic.scenes.paint import Sprite, alpha_mask, cast_shadow

MIN_OBJECT_ALPHA = 16  # of 255, from which a pixel belongs to the picture of an object
SHADOW_SCENES_SHARE = 0.7  # of the scenes in which pasted objects cast shadows


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
