"""Completes the objects of one image: outlines boxes, draws what is hidden, says what hides it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import COMPLETED_BY, ImageTruth, Instance, completed_by
from r2sm_jax.data.drafts import hidden_part, is_of_people, without_figures
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.readers.listing import DRAWN_FROM
from r2sm_jax.query import Prompt

if TYPE_CHECKING:
    # It loads JAX. The other data commands need none, and a slip in a flag should be told at once.
    from r2sm_jax.inference.parts import Parts

MIN_OCCLUDER_SHARE = 0.1
"""Of the added part: an object whose visible mask covers as much of it hides the object."""
MIN_FRONT_SHARE = 0.5
"""Share of an outline that lies in another one, from which on it is in front of that one."""


def is_box(instance: Instance[RLE]) -> bool:
    """Whether the mask of an object is no more than its box, and is to be drawn. A region to ignore
    keeps its box."""
    is_drawn = "visible_score" in instance.fields
    return DRAWN_FROM in instance.fields and not is_drawn and not instance.ignore


def complete_image(
    parts: "Parts", pixels: UInt8[np.ndarray, "H W 3"], truth: ImageTruth, model: str
) -> ImageTruth:
    """Completes the objects of one image, and says which object hides which.

    What shows in a box is outlined first, and `visible_score` is the predicted IoU of that; a box
    in which nothing is found goes. Crowds, ignored regions, complete masks that people drew or
    changed, and objects of which nothing shows stay as they are. All but the last can hide others.
    """
    # The scores of outlines by id, without masks: these wait in `instances` as RLEs, since a photo
    # can have a thousand objects.
    outlines = {}
    instances = []
    for instance in truth.instances:
        if is_box(instance):
            box = masks.box(masks.expand(instance.modal))
            outline = parts.outline(pixels, Prompt(box))
            outlines[instance.id] = outline._replace(mask=np.zeros((0, 0), bool))
            fields = {**instance.fields, "visible_score": outline.iou}
            instance = replace(instance, modal=masks.encode(outline.mask), fields=fields)
        instances.append(instance)
    instances = cut_out_fronts(instances, [instance.id in outlines for instance in instances])
    instances = [i for i in instances if i.id not in outlines or any(masks.areas([i.modal]))]

    def outline_of(instance: Instance[RLE]):
        mask = masks.expand(instance.modal)
        if instance.id in outlines:
            return outlines[instance.id]._replace(mask=mask)
        # A mask that an earlier call drew from a box is no surer than it was then.
        iou = float(instance.fields.get("visible_score", 1.0))
        return parts.outline(pixels, mask)._replace(iou=iou)

    visible = {instance.id: instance.modal for instance in instances}
    others = None
    if len(visible) > 1:
        others = masks.expand(masks.merge(list(visible.values()), *truth.size))
    objects = [instance for instance in instances if needs_completion(instance)]
    completions = parts.complete(pixels, map(outline_of, objects), others)
    completed = {}
    for instance, completion in zip(objects, completions, strict=True):
        amodal = masks.encode(completion.mask)
        fields = dict(instance.fields)
        # A score beside `occluded_by` is of an earlier completion, not of the source.
        if "score" in fields and "occluded_by" not in fields:
            fields["source_score"] = fields["score"]
        fields |= {
            COMPLETED_BY: completed_by(model, amodal),
            "score": completion.iou,
            "hidden_probability": completion.hidden_probability,
        }
        completed[instance.id] = replace(instance, amodal=amodal, fields=fields)

    named = []
    for instance in instances:
        if instance.id in completed:
            instance = completed[instance.id]
        elif is_of_people(instance):
            instance = without_figures(instance)
        if COMPLETED_BY in instance.fields:
            beside = {number: rle for number, rle in visible.items() if number != instance.id}
            occluders = find_occluders(hidden_part(instance), beside)
            instance = replace(instance, fields={**instance.fields, "occluded_by": occluders})
        named.append(instance)
    return replace(truth, instances=tuple(named))


def needs_completion(instance: Instance[RLE]) -> bool:
    """Whether the completer draws the complete mask of an object."""
    is_seen = any(masks.areas([instance.modal]))
    return is_seen and not instance.ignore and not is_of_people(instance)


def cut_out_fronts(
    instances: Sequence[Instance[RLE]], is_drawn: Sequence[bool]
) -> list[Instance[RLE]]:
    """Takes what is in front of them out of the outlines of boxes: a pixel shows one object.

    A given mask is in front of an outline, unless the outline lies in it for the greater part. Of
    two outlines that one is in front which lies for the greater part in the other, as a frisbee in
    the dog that bites it. Outlines that cover each other are of one thing, and stay.
    """
    rles = [instance.modal for instance in instances]
    shares = masks.ious(rles, rles, [True] * len(rles))  # [i, j]: how much of i lies in j
    lies_in = shares >= MIN_FRONT_SHARE
    is_given = ~np.array(is_drawn, bool)
    is_object = np.array([not instance.ignore for instance in instances], bool)
    is_front = (shares > 0) & ~lies_in & (is_given | lies_in.T) & is_object
    cut = []
    for instance, fronts, is_outline in zip(instances, is_front, is_drawn, strict=True):
        if is_outline and fronts.any():
            front = masks.merge([rles[j] for j in np.flatnonzero(fronts)], *instance.modal["size"])
            seen = masks.expand(instance.modal) & ~masks.expand(front)
            instance = replace(instance, modal=masks.encode(seen))
        cut.append(instance)
    return cut


def find_occluders(added: RLE, others: Mapping[int, RLE]) -> list[int]:
    """The ids of the objects that hide another one: their visible masks cover at least a tenth of
    what was added to it. The one that covers most stands first."""
    (num_added,) = masks.areas([added])
    if not num_added:
        return []
    overlaps = masks.areas([masks.intersect(added, rle) for rle in others.values()])
    shares = {key: n / num_added for key, n in zip(others, overlaps, strict=True)}
    occluders = [key for key, share in shares.items() if share >= MIN_OCCLUDER_SHARE]
    return sorted(occluders, key=lambda key: -shares[key])
