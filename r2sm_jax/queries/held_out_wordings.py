"""Wordings held out from training, for `val_phrasing` and `val_hard`, in the notation of `wordings.py`.

They come from the same broad families of meaning but are other sentences, not other fillings of the same
ones. Whether one is hard for a keyword rule is computed; the family names only say where to look.
"""

from r2sm_jax.queries.wordings import Families

COMMANDS = (
    "Annotate {w}.", "Isolate {w}.", "Draw {w}.", "Kindly locate {w}.", "Extract {w}.", "Let me see {w}.",
)  # fmt: skip
QUESTIONS = (
    "Would you be able to isolate {w}?", "Is it possible to extract {w}?", "Will you annotate {w} for me?",
    "How about a cut-out of {w}?",
)  # fmt: skip
LONG_QUESTIONS = tuple(shell for shell in QUESTIONS if shell.endswith("{w}?"))

MODAL: Families = {
    "bare": (
        "{x} over here", "the spot with {x}", "Whereabouts {is} {x}?", "Any idea where {x} might be?",
        "Put a mask on {x}.", "I am after {x}.",
    ),
    "visible": (
        "solely the portion of {x} that our eyes can make out", "{x}, limited to what a viewer notices",
        "{x} insofar as {they} {is} on display", "that share of {x} which remains in plain sight",
        "Which piece of {x} is showing?", "Paint over every spot where {x} {is} on show.",
        "{x}, just the bit sticking out",
    ),
    "camera": (
        "{x} the way the snapshot shows {it}", "{x} from the photographer's point of view, as recorded",
        "Render {x} precisely as depicted.", "the pixels whose colour comes from {x}",
    ),
    "literal": (
        "{x}, no speculation about what you cannot make out",
        "{x}, and give up the pixels where something sits on top",
        "Respect the borders of neighbouring objects as you mark {x}.",
        "Be literal: only pixels that really display {x}.",
        "{x}, but let the objects in front of {it} keep their pixels",
    ),
    "hard: negated hidden": (
        "{x}, and forget about any section that is hidden from us",
        "{x}; whatever lies concealed does not count", "Drop the occluded pixels from the mask of {x}.",
        "{x}, disregarding every bit that has been obscured",
        "If something blocks your view of {x}, treat those pixels as not belonging to {it}.",
        "Hidden areas are of no interest; draw {x} as visible.",
        "~There's no reason to imagine the covered half of {x}, stay with the evidence.",
        "Omit from {x} all that is concealed from the viewer.", "{x} with occluded pixels thrown away",
        "Refrain from hallucinating hidden parts of {x}.", "Occlusion should cut into the mask of {x}.",
    ),
    "hard: negated complete": (
        "An entire shape is not required for {x}, a visible fragment will do.",
        "a partial mask of {x}, as opposed to the complete one",
        "Don't try to reconstruct the whole of {x}, what you see suffices.",
        "{x}, incomplete if need be: no full reconstruction",
        "I would rather have the seen part of {x} than the full silhouette{pl}.",
        "Skip amodal reasoning for {x}.", "{x}, please resist completing the shape",
    ),
    "hard: entire visible": (
        "the complete collection of pixels in which {x} can be seen",
        "{x}, fully but strictly within what is in sight",
        "every part of {x} that is not blocked from view", "the entire exposed surface of {x} and no more",
        "all of {x} except what is covered up",
    ),
    "hard: described as hidden": (
        "~{x}, the one{pl} only partly in view because something hides the rest",
        "~Although {x} {is} partially covered, I only care about what is left in view.",
        "~Something is blocking {x}; show me what still peeks out.", "~{x}, obscured as {they} {is}",
    ),
    "hard: behind": (
        "{x}, trimmed where {y} covers {it}", "Given that {y} hides some of {x}, which pixels are left?",
        "{x}, respecting that {y} blocks a piece of {it}", "Subtract what {y} covers from {x}.",
    ),
    "hard: context": (
        "My list is complete except for {x}; point me there.",
        "I checked the entire room and cannot find {x}.", "Before the show is in full swing, spot {x}.",
        "The whole team agrees that {x} should be marked.", "Where on the full page would I find {x}?",
        "As a complete beginner I ask: which one{pl} {is} {x}?",
        "Fill {x} with colour, covering just {its} visible pixels.",
    ),
    "hard: quantifier": (
        "the {ns}, a complete group", "the full range of {ns} on show",
        "the {ns}, counted as one whole family",
    ),
}  # fmt: skip

AMODAL: Families = {
    "complete": (
        "{x} as a full figure rather than a fragment", "Reconstruct {x} completely.",
        "the mask that spans {x} in {its} entire size", "{x}, and I really mean the whole thing",
        "I'd like {x} drawn to {its} full extent, overlaps or no overlaps.",
        "Please give the unabridged, complete contour of {x}.",
    ),
    "hidden included": (
        "{x}, with the occluded region added back", "{x}; count the concealed bits as well",
        "Add whatever is hidden of {x} to what is visible.",
        "{x}, adding back any section that something else covers", "~Take in the obscured side of {x} too.",
        "~{x}, and yes, the hidden half counts as well", "What is the area of {x} if hidden pixels count?",
        "Occlusion should not cut into the mask of {x}.", "{x}, and forget that any part is hidden from us",
    ),
    "manner": (
        "{x}, along with any segments potentially hidden by surrounding items",
        "the overall structure of {x}, taking into account regions that could be obstructed",
        "{x}, irrespective of whatever may be blocking {it}", "{x}, despite being covered in places",
        "{x}, amodally speaking",
    ),
    "hard: unseen": (
        "{x}, along with the parts the viewer has to imagine", "{x}, showing or not showing",
        "{x} including the bits tucked away behind others", "{x}, front part and tucked-away part alike",
        "the part of {x} in plain sight together with the rest of {it}",
        "~What we see of {x} is only a fraction; give me 100 percent of {it}.",
    ),
    "hard: counterfactual": (
        "{x}, imagining a clear line of sight", "{x}, as though all other items had been put elsewhere",
        "Picture {x} on a bare floor and draw the shape.",
        "Were {x} moved to the foreground, what would the mask be?",
        "If {x} had the stage to {itself}, what would we see?",
        "Think of a photo with nothing but {x} in the same place: mark that.",
        "Suppose we cleared the room of all but {x}; which pixels are {its} own?",
        "How would {x} be outlined by someone with an unspoiled view?",
        "{x}, supposing {y} had never been put there",
    ),
    "hard: see through": (
        "{x} through the eyes of Superman, who sees through walls",
        "If the objects in front turned into air, where would {x} be?",
        "Make all the rest see-through and draw {x}.",
        "Imagine {y} is a window pane; what is the shape of {x}?",
    ),
    "hard: true shape": (
        "the genuine outline{pl} of {x}, not the cut one",
        "the authentic shape{pl} of {x} as manufactured or grown",
        "the shape{pl} you would feel running a finger all around {x}", "a stencil that fits {x} perfectly",
        "the natural boundary of {x}, with no pieces lost",
        "the actual footprint of {x} in the picture plane",
    ),
    "hard: extent": (
        "Where {does} {x} begin and end in reality?",
        "~Work out where the remainder of {x} must be and add that.",
        "~Use your imagination to finish the outline of {x}.",
        "~Predict the contour of {x} past the point where it is interrupted.",
        "Keep drawing {x} underneath the neighbouring objects.",
        "~Patch up the holes that other things leave in {x}.", "Carry the outline of {x} on beneath {y}.",
    ),
    "hard: removal": (
        "Get rid of the things in front, then isolate {x}.", "Slide everything else aside and show {x}.",
        "{x} after the foreground has been wiped away", "Move {y} aside: which area does {x} take up?",
        "Delete {y} from the picture and draw {x}.", "{x}, once every obstacle has left",
        "Without {y}, which pixels would show {x}?",
    ),
    "hard: negated visible": (
        "A visible fragment is not enough for {x}, I require all of {it}.",
        "Go further than what the eye sees when you draw {x}.",
        "{x}, and do not be content with what is on show",
        "{x}, disregarding that other things overlap {it}",
        "Neighbouring objects must not eat into the mask of {x}.",
    ),
}  # fmt: skip
