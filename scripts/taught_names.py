"""What one example brings: `python scripts/taught_names.py FILE --images DIR [--model MODEL]`.

FILE is a COCO instances file. Each class of each image counts as one whose name the model does not
know: it is called "part 7", which no word of the image tells. Printed is the gIoU of the visible
masks, all objects of the class together, over the pairs of an image and a class:

    made-up name    "every part 7", without an example
    one example     the same, with the largest object of the class in another image as its example
    real name       "every dog", for comparison

and how often the similarity is higher in the image than in one without the class (0.5 by chance).
An example is drawn at random among the other images of FILE whose largest object of the class fills
a hundredth of them. Classes with an area below 0.5 % of the image, and with crowds, are left out.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from r2sm_jax.cli import cli_main
from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.splits import split_by_hash
from r2sm_jax.errors import load_json
from r2sm_jax.inference.predictor import EncodedImage, Predictor
from r2sm_jax.inference.run import enable_compilation_cache, load

NAME = "part 7"
MIN_TARGET_SHARE = 0.005
MIN_EXAMPLE_SHARE = 0.01


@dataclass(frozen=True)
class Options:
    file: Annotated[Path, tyro.conf.Positional]
    images: Path
    model: str = "photos-small"
    share: float = 1.0
    """Ask only about the images whose hash of the file name is below this. `compose:` holds out
    those below 0.25 of each file, so that photos-small was not trained on them."""
    seed: int = 0


class Objects:
    """The masks of an instances file, by image and class."""

    def __init__(self, file: Path):
        stored = load_json(file, "COCO instances")
        self.images: dict[int, Any] = {image["id"]: image for image in stored["images"]}
        self.names = {category["id"]: category["name"] for category in stored["categories"]}
        self.crowds: set[tuple[int, int]] = set()
        self.rles: dict[tuple[int, int], list[masks.RLE]] = defaultdict(list)
        for annotation in stored["annotations"]:
            image = self.images[annotation["image_id"]]
            key = (annotation["image_id"], annotation["category_id"])
            if annotation.get("iscrowd"):
                self.crowds.add(key)
                continue
            size = (image["height"], image["width"])
            self.rles[key].append(masks.compressed(annotation["segmentation"], *size))

    def target(self, key: tuple[int, int]) -> Mask:
        """All objects of a class in an image."""
        return np.any([masks.decode(rle) for rle in self.rles[key]], axis=0)

    def largest(self, key: tuple[int, int]) -> Mask:
        return max(map(masks.decode, self.rles[key]), key=masks.area)

    def pairs(self, image_ids: Iterable[int]) -> list[tuple[int, int]]:
        """The images and classes to ask about."""
        wanted = set(image_ids)
        pairs = [key for key in self.rles if key[0] in wanted and key not in self.crowds]
        return [key for key in sorted(pairs) if self.target(key).mean() >= MIN_TARGET_SHARE]


def iou(one: Mask, other: Mask) -> float:
    return float((one & other).sum() / max((one | other).sum(), 1))


def measure(predictor: Predictor, objects: Objects, options: Options) -> None:
    """Prints the figures of all pairs."""
    draw = random.Random(options.seed)
    held_out = set(objects.images)
    if options.share < 1:
        ids = {image["file_name"]: image_id for image_id, image in objects.images.items()}
        held_out = {ids[name] for name in split_by_hash(ids, options.share)}
    examples = defaultdict(list)
    for key in sorted(objects.rles):
        if key not in objects.crowds and objects.largest(key).mean() >= MIN_EXAMPLE_SHARE:
            examples[key[1]].append(key)

    def image_of(image_id: int) -> np.ndarray:
        return open_image(options.images / objects.images[image_id]["file_name"])

    ious: dict[str, list[float]] = defaultdict(list)
    scores: list[float] = []
    absent_scores: list[float] = []
    previous: dict[int, EncodedImage] = {}
    for image_id, category in objects.pairs(held_out):
        others = [key for key in examples[category] if key[0] != image_id]
        if not others:
            continue
        example = draw.choice(others)
        target = objects.target((image_id, category))
        image = predictor.encode(image_of(image_id))
        taught = predictor.updated(weights=predictor.weights)
        taught.teach(NAME, image_of(example[0]), objects.largest(example))

        sentences = [f"every {NAME}", f"every {objects.names[category]}"]
        made_up, real = predictor.predict(sentences, "modal", image)
        (with_example,) = taught.predict(sentences[:1], "modal", image)
        ious["made-up name"].append(iou(made_up.modal, target))
        ious["one example"].append(iou(with_example.modal, target))
        ious["real name"].append(iou(real.modal, target))
        assert with_example.similarity is not None  # an answer with a taught name has one
        scores.append(with_example.similarity)

        # The last image that does not show the class.
        for other_id, other in reversed(previous.items()):
            key = (other_id, category)
            if key not in objects.rles and key not in objects.crowds:
                (absent,) = taught.predict(sentences[:1], "modal", other)
                assert absent.similarity is not None
                absent_scores.append(absent.similarity)
                break
        previous[image_id] = image
        if len(scores) % 20 == 0:
            show(ious, scores, absent_scores)
    show(ious, scores, absent_scores)


def show(ious: dict[str, list[float]], scores: list[float], absent_scores: list[float]) -> None:
    """Prints the figures so far."""
    figures = [f"{name} {np.mean(values):.3f}" for name, values in ious.items()]
    is_higher = np.greater.outer(scores, absent_scores).mean()
    print(
        f"{len(scores)} pairs: gIoU {', '.join(figures)}; similarity {np.mean(scores):.2f}, "
        f"without the class {np.mean(absent_scores):.2f}, higher in {is_higher:.0%}",
        flush=True,
    )


def main() -> None:
    """Command line."""
    options = tyro.cli(Options)
    enable_compilation_cache()
    predictor = load(options.model).predictor
    measure(predictor, Objects(options.file), options)


if __name__ == "__main__":
    cli_main(main)
