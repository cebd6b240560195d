"""Folders of cut-outs and of annotated photos for tests, and what every made picture has to
fulfil."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from r2sm_jax.data.dataset import Sample

SHAPES = ("disc", "slab", "hoop", "bar", "kite", "frame")
CUTOUT_NAMES = [
    f"{colour}-{shape}" for colour in ("red", "green", "blue", "grey") for shape in SHAPES
]
WIDTH, HEIGHT = 160, 120  # of photos
PHOTO_CLASSES = ("dog", "chair", "cup", "wooden crate")


def draw_cutout(shape: str, colour: str = "red", width: int = 90, height: int = 80) -> Image.Image:
    image = Image.new("RGBA", (width, height))
    draw = ImageDraw.Draw(image)
    x, y = width - 8, height - 8
    if shape == "disc":
        draw.ellipse((7, 7, x, y), colour)
    elif shape == "slab":
        draw.rectangle((7, 7, x, y), colour)
    elif shape == "hoop":
        draw.ellipse((7, 7, x, y), outline=colour, width=width // 7)
    elif shape == "bar":
        draw.rectangle((7, height // 2 - 5, x, height // 2 + 5), colour)
    elif shape == "kite":
        draw.polygon(((width / 2, 7), (x, height / 3), (width / 2, y), (7, height / 3)), colour)
    else:
        draw.rectangle((7, 7, x, y), outline=colour, width=width // 8)
    return image


def write_cutouts(folder: Path, names: list[str] = CUTOUT_NAMES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(names):
        colour, shape = name.split("-")
        image = draw_cutout(shape, colour, 60 + 23 * k % 150, 60 + 31 * k % 150)
        image.save(folder / f"{name}.{'webp' if k % 2 else 'png'}")
    return folder


def write_photos(folder: Path, count: int = 90) -> Path:
    """Photos of a free ellipse, one that the right border cuts, and a crowd, each in colours of its
    own."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, annotations = [], []
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    for k in range(count):
        name = f"{k:03d}.jpg"
        images.append({"id": k + 1, "file_name": name, "width": WIDTH, "height": HEIGHT})
        photo = Image.new("RGB", (WIDTH, HEIGHT), tuple(rng.integers(40, 200, 3).tolist()))
        draw = ImageDraw.Draw(photo)

        masks = []
        for x, y, radius in ((45, 60, int(rng.integers(14, 30))), (WIDTH - 8, 60, 20)):
            corners = np.stack(
                [x + radius * np.cos(angles), y + 0.9 * radius * np.sin(angles)], axis=1
            ).clip(0, (WIDTH, HEIGHT))
            draw.polygon(list(map(tuple, corners)), tuple(rng.integers(0, 255, 3).tolist()))
            masks.append([corners.ravel().tolist()])
        crowd = [100 * HEIGHT, 5 * HEIGHT, (WIDTH - 105) * HEIGHT]
        masks.append({"size": [HEIGHT, WIDTH], "counts": crowd})
        for mask in masks:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": k + 1,
                    "category_id": 1 + int(rng.integers(len(PHOTO_CLASSES))),
                    "segmentation": mask,
                    "iscrowd": int(isinstance(mask, dict)),
                }
            )
        photo.save(folder / "images" / name, quality=95)

    categories = [{"id": k, "name": name} for k, name in enumerate(PHOTO_CLASSES, start=1)]
    file = folder / "instances.json"
    file.write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
    return file


def digest(sample: Sample) -> str:
    """A hash of all that a sample holds."""
    parts = [sample.image.tobytes()]
    parts.append(repr((sample.image_id, sample.file_name, sample.queries)).encode())
    for i in sample.instances:
        parts.append(repr((i.id, i.category, i.attributes, i.ignore, i.amodal is None)).encode())
        parts += [i.modal.tobytes(), i.complete.tobytes()]
    return sha256(b"\0".join(parts)).hexdigest()


def hidden_shares(sample: Sample) -> list[float]:
    """Of the instances whose amodal mask is known."""
    return [1 - i.modal.sum() / i.amodal.sum() for i in sample.instances if i.amodal is not None]


def check_instances(sample: Sample) -> None:
    """Ids count from 1, modal masks are disjoint and lie in their amodal masks."""
    ids = [i.id for i in sample.instances]
    assert ids == list(range(1, len(ids) + 1))
    assert np.sum([i.modal for i in sample.instances], axis=0).max() == 1
    for i in sample.instances:
        assert i.modal.dtype == bool and i.modal.shape == sample.image.shape[:2]
        assert i.modal.any() and not (i.modal & ~i.complete).any()
    for query in sample.queries:
        assert set(query.instance_ids) <= set(ids)


def check_hiding(instances, facts) -> None:
    """Where all are known: what is hidden is covered by another, and exactly those that cover
    enough hide it."""
    by_id = {i.id: i for i in instances}
    assert np.array_equal(
        np.any([i.modal for i in instances], axis=0), np.any([i.amodal for i in instances], axis=0)
    )
    for fact in facts:
        me = by_id[fact.id]
        min_pixels = max(4, 0.01 * me.amodal.sum())
        assert list(fact.hidden_by) == sorted(fact.hidden_by)
        for number, other in by_id.items():
            shared = me.amodal & other.amodal
            if number in fact.hidden_by:
                assert shared.sum() >= min_pixels and not (shared & me.modal).any()
            elif number != fact.id and shared.sum() >= min_pixels:
                assert not (shared & other.modal).any()  # it is the other way round
