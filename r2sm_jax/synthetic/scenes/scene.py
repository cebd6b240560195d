"""A made picture with its objects, and what the query grammar knows of objects with masks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance
from r2sm_jax.query import MaskType
from r2sm_jax.synthetic.queries.nouns import display_name
from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.scenes.layout import PlacedItem, mask_in_picture
from r2sm_jax.synthetic.scenes.paint import Sprite

# An object hides another one if it covers this share of its complete mask. In made pictures it must
# cover so many pixels too; in annotated ones a single pixel is enough.
MIN_HIDING_SHARE = 0.01
MIN_HIDING_PIXELS = 4


@dataclass(frozen=True)
class Scene:
    """A picture `uint8 [H W 3]`, its objects, and what the query grammar knows of each.

    Coordinates are pixels. Every object of the `marked_classes` that the picture shows is among its
    instances: the others of these classes are absent.
    """

    image: np.ndarray
    instances: tuple[Instance, ...]
    facts: tuple[ObjectFacts, ...]
    marked_classes: tuple[str, ...] = ()


def make_scene(
    canvas: Image.Image, placed: Sequence[PlacedItem], sprites: Sequence[Sprite]
) -> Scene:
    """The scene on a canvas (mode RGB), with exact masks; ids run from left to right.

    `placed` and `sprites` (in the picture's coordinates) have the rearmost object first.
    """
    count = len(placed)
    shape = (canvas.height, canvas.width)
    amodal = [mask_in_picture(sprite, shape) for sprite in sprites]
    left_to_right = sorted(range(count), key=lambda k: (placed[k].x, placed[k].y, k))
    ids = {k: rank for rank, k in enumerate(left_to_right, start=1)}

    instances, facts = [], []
    for k in left_to_right:
        item = placed[k].item
        in_front = range(k + 1, count)
        modal = amodal[k] & ~np.any(amodal[k + 1 :], axis=0)
        min_pixels = max(MIN_HIDING_PIXELS, MIN_HIDING_SHARE * masks.area(amodal[k]))
        hidden_by = [ids[j] for j in in_front if masks.area(amodal[j] & amodal[k]) >= min_pixels]

        instance = Instance(ids[k], item.category, modal, amodal[k], item.attributes)
        instances.append(instance)
        facts.append(
            _describe(instance, item.category, sorted(hidden_by), uses=item.uses, ideas=item.ideas)
        )
    return Scene(np.array(canvas), tuple(instances), tuple(facts))


def describe_objects(instances: Sequence[Instance]) -> list[ObjectFacts]:
    """Describes every visible instance to the grammar.

    The hidden share is NaN where the amodal mask is unknown, so that no query relies on it.
    """
    facts = []
    for instance in instances:
        if not instance.modal.any():
            continue

        # Annotations do not say what is in front. Another object hides this one where its modal
        # mask covers the hidden part (never itself, since its own modal mask lies outside of it).
        # Only the box of that part is compared, which is faster.
        hidden = instance.complete & ~instance.modal
        x0, y0, x1, y1 = masks.box(hidden)
        window = np.s_[y0:y1, x0:x1]
        min_pixels = max(1.0, MIN_HIDING_SHARE * masks.area(instance.complete))
        hidden_by = [
            other.id
            for other in instances
            if masks.area(hidden[window] & other.modal[window]) >= min_pixels
        ]
        facts.append(_describe(instance, display_name(instance.category), hidden_by))
    return facts


def _describe(
    instance: Instance,
    name: str,
    hidden_by: Iterable[int],
    uses: tuple[str, ...] = (),
    ideas: tuple[str, ...] = (),
) -> ObjectFacts:
    """The facts of an instance that is called `name`.

    `uses` and `ideas` are known of cut-outs alone.
    """
    areas = instance.map_masks(masks.area)
    return ObjectFacts(
        id=instance.id,
        category=name,
        box=masks.box(instance.complete),
        area=areas.complete,
        occlusion=float("nan") if areas.amodal is None else 1 - areas.modal / areas.amodal,
        hidden_by=tuple(hidden_by),
        colour=instance.attributes.get("colour"),
        pattern=instance.attributes.get("pattern"),
        visible_box=masks.box(instance.modal),
        uses=uses,
        ideas=ideas,
    )


def forbidden_targets(
    instances: Sequence[Instance], background: Iterable[int] = ()
) -> dict[MaskType, set[int]]:
    """The ids that no query of a type may refer to.

    These are `background` and ignored objects, and for amodal queries also objects whose complete
    mask is unknown. The grammar still sees them, so that no phrase fits one of them by accident.
    """
    ignored = set(background)
    ignored.update(instance.id for instance in instances if instance.ignore)
    no_amodal = {instance.id for instance in instances if instance.amodal is None}
    return {"modal": ignored, "amodal": ignored | no_amodal}
