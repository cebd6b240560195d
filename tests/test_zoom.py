"""Parts of photos that are enlarged in training: their masks lie on their objects, and what is cut is not complete."""

import numpy as np
from PIL import Image
from scipy import ndimage

from r2sm_jax.data.masks import box
from r2sm_jax.synthetic.photos import MAX_ZOOM, Photo, PhotoObject, random_zoom
from r2sm_jax.synthetic.scenes.paint import Sprite

WIDTH, HEIGHT, SIZE = 160, 120, 96
NAMES = ("dog", "chair", "cup")


def painted() -> Photo:
    """Three ellipses, each on a channel of its own; the third touches the border."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image, objects = np.zeros((HEIGHT, WIDTH, 3), np.uint8), []
    ellipses = ((45, 60, 30, 24), (100, 80, 20, 26), (WIDTH - 10, 30, 22, 16))
    for channel, (cx, cy, rx, ry) in enumerate(ellipses):
        mask = ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 <= 1
        image[mask, channel] = 255
        x0, y0, x1, y1 = box(mask)
        picture = Image.fromarray(image[y0:y1, x0:x1])
        objects.append(
            PhotoObject(
                NAMES[channel],
                Sprite(picture, mask[y0:y1, x0:x1], x0, y0, x1 - x0),
                channel < 2,
                False,
            )
        )
    return Photo(Image.fromarray(image), tuple(objects), image.mean((0, 1)))


def in_place(photo: Photo, seen: PhotoObject) -> np.ndarray:
    """The mask of an object in its whole photo."""
    whole, (h, w) = np.zeros((photo.image.height, photo.image.width), bool), seen.sprite.mask.shape
    whole[seen.sprite.y : seen.sprite.y + h, seen.sprite.x : seen.sprite.x + w] = seen.sprite.mask
    return whole


def test_masks_lie_on_the_objects_of_a_zoomed_photo() -> None:
    photo, largest, cut = painted(), 0.0, 0
    for seed in range(60):
        part = random_zoom(np.random.default_rng(seed), photo, SIZE)
        assert max(part.image.size) == SIZE and abs(part.image.height - SIZE * HEIGHT / WIDTH) <= 1
        found = {seen.category: seen for seen in part.objects}
        for channel, before in enumerate(photo.objects):
            drawn = np.asarray(part.image)[..., channel] >= 128
            seen = found.get(before.category)
            mask = in_place(part, seen) if seen else np.zeros_like(drawn)
            # An outline may be off by a pixel.
            assert not (mask & ~ndimage.binary_dilation(drawn, np.ones((3, 3)))).any()
            assert not (ndimage.binary_erosion(drawn, np.ones((3, 3))) & ~mask).any()
            if seen:
                assert np.array_equal(seen.sprite.image, part.image.crop(box(mask)))
            if seen and seen.complete:
                scale = (mask.sum() / before.sprite.mask.sum()) ** 0.5 * WIDTH / SIZE
                assert before.complete and 0.95 < scale < 1.05 * MAX_ZOOM
                largest = max(largest, scale)
            cut += seen is not None and before.complete and not seen.complete
    assert largest > 1.3 and cut > 5


def test_a_photo_that_is_not_zoomed_keeps_all_but_its_size() -> None:
    photo = painted()
    for seed in (s for s in range(12) if np.random.default_rng(s).random() >= 0.5):
        same = random_zoom(np.random.default_rng(seed), photo, WIDTH)
        assert np.array_equal(same.image, photo.image) and np.array_equal(
            same.mean_colour, photo.mean_colour
        )
        for one, other in zip(same.objects, photo.objects, strict=True):
            assert (one.category, one.complete, one.ignored) == (
                other.category,
                other.complete,
                other.ignored,
            )
            assert np.array_equal(in_place(same, one), in_place(photo, other))
        small = random_zoom(np.random.default_rng(seed), photo, WIDTH // 2)
        assert small.image.size == (WIDTH // 2, HEIGHT // 2)
        assert [seen.complete for seen in small.objects] == [
            seen.complete for seen in photo.objects
        ]
