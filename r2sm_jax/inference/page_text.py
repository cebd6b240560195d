"""The words of the web page, in HTML. What visitors wrote is escaped."""

from collections.abc import Sequence
from html import escape

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import FILE_NAME, Annotation
from r2sm_jax.data.sheet import OCCLUDED, VISIBLE
from r2sm_jax.inference.answer import Facts, describe as describe_facts
from r2sm_jax.inference.page_session import Answer, Session

START = "Choose an image, then say what you want."
WAITING = "The answer comes as soon as the image is there."
CLICK_CHOICES = [("on the object", "on"), ("beside it", "beside"), ("a corner of a box", "corner")]
TYPE_CHOICES = [("the visible part (modal)", "modal"), ("the complete shape (amodal)", "amodal")]


def describe(answer: Answer) -> str:
    """The decision in HTML. Visitors' words are escaped."""
    meanings = {mask_type: meaning for meaning, mask_type in TYPE_CHOICES}
    height, width = answer.visible["size"]
    (area,) = masks.areas([answer.mask])
    visible_area, complete_area = masks.areas([answer.visible, answer.complete])
    hidden_share = 1 - visible_area / max(1, complete_area)
    quality = "no predicted IoU"
    if answer.is_given or answer.is_corrected:
        quality = "masks given or corrected by you"
    elif answer.score is not None:
        unsure = " (unsure)" if answer.is_unsure else ""
        quality = f"predicted IoU {answer.score:.2f}{unsure}"
    facts = [
        f"{area / (height * width):.1%} of the image",
        f"{hidden_share:.0%} of the complete shape hidden",
    ]
    facts += [f"instances: {answer.num_instances}", quality]
    if answer.amodal_probability is not None:
        facts.insert(0, f"probability of amodal {answer.amodal_probability:.3f}")
    words = describe_facts(
        Facts(
            query=answer.text,
            mask_type=answer.mask_type,
            score=answer.score,
            presence=answer.presence,
            has_mask=bool(area),
            num_instances=answer.num_instances,
            hidden_share=hidden_share,
            is_unsure=answer.is_unsure or answer.presence < 0.5,
            is_given=answer.is_given,
        )
    )
    lines = [f"<strong>{answer.mask_type}</strong>: {meanings[answer.mask_type]}"]
    lines += [escape(words), ", ".join(facts)]
    if not area:
        lines.append(f"nothing of the kind is seen (probability {answer.presence:.3f})")
    if answer.unread:
        lines.append(f"too long; not read: {escape(answer.unread[:80])}")
    return "<br>".join([*lines, legend()])


def legend() -> str:
    """What the colours mean, in HTML."""
    entries = []
    for colour, meaning in ((VISIBLE, "visible part"), (OCCLUDED, "hidden part")):
        entries.append(f'<span style="color: rgb{colour}">■</span> {meaning}')
    return " &nbsp; ".join([*entries, "the outline is what the sentence asks for"])


def describe_session(session: Session) -> str:
    """The answer in HTML, or what to do next."""
    if session.draft is not None:
        return (
            "Paint over what shows of the object, say what you want, and press <b>Segment</b>. The "
            "bin empties the mask."
        )
    if session.corrects_hidden:
        return (
            "The brush adds to the hidden part, the eraser takes away from it. Then press <b>Take "
            "over</b>, or add it to the annotations."
        )
    if session.answer is not None:
        return describe(session.answer)
    if session.photo is not None:
        return "Say what you want. A click on the picture says which one."
    return WAITING if session.is_waiting else START


def name_annotations(annotations: Sequence[Annotation]) -> list[tuple[str, int]]:
    """The choices of a list of annotations: a line about each, and its index."""
    choices = []
    for index, annotation in enumerate(annotations):
        visible_area, complete_area = masks.areas([annotation.visible, annotation.complete])
        facts = [annotation.mask_type, f"{1 - visible_area / max(1, complete_area):.0%} hidden"]
        if annotation.category.strip():
            facts.insert(0, annotation.category.strip())
        line = f"{index + 1}. {annotation.name}: {annotation.text} ({', '.join(facts)})"
        choices.append((line, index))
    return choices


def describe_saved(annotations: Sequence[Annotation]) -> str:
    """What is in the file of all annotations, and how to use it, in HTML."""
    num_photos = len({annotation.photo for annotation in annotations})
    lines = [
        f"{len(annotations)} annotations, {num_photos} photos. Unpack the file as a folder, such "
        "as <code>my</code>, then:",
        f"<code>python -m r2sm_jax.data check my/{FILE_NAME}</code>",
        f"<code>python -m r2sm_jax.train --data.source json:my/{FILE_NAME}</code>",
    ]
    if num_photos < 3:
        lines.append(
            "Training holds photos out to choose and to report on, so annotate three or more: with "
            "fewer, it is scored on photos that it was trained on."
        )
    return "<br>".join(lines)
