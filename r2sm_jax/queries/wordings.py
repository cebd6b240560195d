"""The training wordings: how people ask for the visible or for the complete mask, by family of meaning.

A wording is a template. `[a|b]` is a choice of words and `<name>` a shared choice. Without a final "." or "?"
it is a noun phrase, which a shell such as "Segment …" may take; otherwise it is a sentence. Slots, in the
grammatical number of the target:

    {x}      the target, "the red mug"            {n}     a single target without "the", "red mug"
    {poss}   its possessive, "the red mug's"      {ns}    several of one class without "the", "red mugs"
    {y}      the thing in front of a single hidden target, "the book"
    {it} {they} {its} {is} {was} {does} {s} {es} (verb ending) {pl} (noun ending)

A template that begins with "~" is only for a target that is really hidden in part. An amodal template with
{y} is only for a target that nothing but {y} hides, because it asks to think away {y} alone. Wordings held
out from training are in `held_out_wordings.py`, the training ones in `modal_wordings.py`,
`amodal_wordings.py` and, as minimal pairs, here.
"""

import re

Families = dict[str, tuple[str, ...]]

COMMANDS = (
    "Segment {w}.", "Please segment {w}.", "Mark {w}.", "Please mark {w}.", "Highlight {w}.", "Select {w}.",
    "Show me {w}.", "Give me {w}.", "I need {w}.", "I would like {w}.", "Find {w}.", "Please pick out {w}.",
    "I want {w}.", "Get me {w}.", "Single out {w}.", "Detect {w}.", "Return {w}.", "Let me have {w}.",
    "Your task: {w}.", "I'm interested in {w}.", "Now {w}.", "We need {w}.", "Click on {w}.", "Capture {w}.",
)  # fmt: skip
QUESTIONS = (
    "Could you show me {w}?", "Can you segment {w}?", "Could you highlight {w} for me?", "Can you find {w}?",
    "Would you mark {w}, please?", "May I have {w}?", "Which pixels make up {w}?", "Can you give me {w}?",
    "Would you pick out {w}?", "Could I get {w}?", "Do you mind selecting {w}?", "Can we have {w}?",
)  # fmt: skip
LONG_QUESTIONS = tuple(shell for shell in QUESTIONS if shell.endswith("{w}?"))

# Words that templates share, as <name>; <Name> is the same with a capital.
VOCABULARY = {
    "whole": "whole|complete|entire|full",
    "shape": "shape|outline|silhouette|contour|form|extent",
    "shape0": "shape|outline|silhouette|contour",
    "part": "part|portion|area|section|region",
    "parts": "parts|portions|areas|sections|bits|pixels",
    "hidden": "hidden|covered|occluded|blocked|obscured|concealed|obstructed|unseen|invisible|overlapped",
    "hide": "hide|cover|occlude|block|obscure|conceal|overlap",
    "hides": "hides|covers|occludes|blocks|obscures|conceals|overlaps",
    "hid": "hid|covered|blocked|obscured|overlapped",
    "visible": "visible|exposed|seen|uncovered|unobstructed",
    "shows": "shows|is visible|can be seen|is in view|is showing|we can see|you see|the eye can see",
    "are seen": "are visible|can be seen|show|are in view|we can see|you see",
    "only": "only|just|nothing but|strictly|no more than|exclusively",
    "more than": "more than|not just|not only|beyond|and not merely",
    "drop": "leave out|drop|skip|exclude|omit|ignore|discard|leave off|cut away",
    "dropping": "leaving out|dropping|skipping|excluding|omitting|ignoring|discarding|without|minus"
    "|except for|but not|not counting|apart from",
    "keep": "include|keep|add|count|take in|restore|fill in|recover",
    "keeping": "including|keeping|adding|counting|with|plus|along with|together with|as well as"
    "|not forgetting|and also|inclusive of",
    "guess": "guess|infer|imagine|predict|estimate|reconstruct|extrapolate|work out|fill in|make up",
    "guessed": "guessed|inferred|imagined|invented|reconstructed",
    "avoid guessing": "avoid <guessing>|do not bother <guessing>|be careful not to <guess>"
    "|no point in <guessing>|hold back from <guessing>|there is no need to <guess>"
    "|you need not <guess>|stop short of <guessing>",
    "settle for": "settle for|stop at|content yourself with|confine yourself to|limit yourself to|stick to"
    "|be satisfied with|be happy with|make do with",
    "guessing": "guessing|inferring|imagining|predicting|estimating|reconstructing|extrapolating|filling in|adding",
    "without guessing": "without guessing|without inferring|without imagining|without inventing"
    "|not reconstructing|instead of extrapolating|rather than filling in|no guessing of",
    "back": "restored|added back|filled in|put back|recovered|included",
    "the front": "the things in front|the objects in front|whatever is in front|everything in front"
    "|whatever lies on top|the other objects|anything in the way"
    "|nearer things|overlapping items|the occluders",
    "remove": "remove|take away|erase|delete|clear away|move away|think away|look past|see past|ignore",
    "gone": "gone|removed|taken away|erased|deleted|out of the way|cleared away|no longer there",
    "the front were gone": "the things in front were gone|nothing were in front|nothing blocked the view"
    "|the other objects did not exist|all else were removed|there were no other objects"
    "|everything in front had vanished|the view were free",
    "if the front were gone": "if <the front were gone>",
    "as if the front were gone": "as if <the front were gone>|as though <the front were gone>",
    "if y were gone": "if {y} were gone|if {y} were not there|if {y} did not exist|if {y} were taken away",
}

_SHARED = re.compile(r"<([\w ]+)>")

# Nearly the same sentence, with the meaning turned round: (modal, amodal).
PAIRS: tuple[tuple[str, str], ...] = (
    ("{x}, excluding the part that is hidden", "{x}, including the part that is hidden"),
    ("{x} without the hidden part{pl}", "{x} with the hidden part{pl}"),
    ("{x}, hidden parts excluded", "{x}, hidden parts included"),
    ("{x}, as if drawn with what is in front of {it}", "{x}, as if drawn without what is in front of {it}"),
    ("{x} as {they} stand{s} behind {y}", "{x} as {they} would stand without {y}"),
    ("the visible outline{pl} of {x}", "the true outline{pl} of {x}"),
    ("the visible [shape|silhouette]{pl} of {x}", "the real [shape|silhouette]{pl} of {x}"),
    ("{x}; don't guess what is behind {y}", "{x}; do guess what is behind {y}"),
    ("{x}; do not guess the rest", "{x}; do guess the rest"),
    ("Do not fill in the hidden part of {x}.", "Do fill in the hidden part of {x}."),
    ("Mark {x} but not what is covered.", "Mark {x} and also what is covered."),
    ("{x}, only the part we can see", "{x}, not only the part we can see"),
    ("just the visible part of {x}", "not just the visible part of {x}"),
    ("{x}, and leave out what {y} hides", "{x}, and do not leave out what {y} hides"),
    ("{x}, with {y} in front", "{x}, with {y} out of the way"),
    ("the part of {x} outside {y}", "the part of {x} outside {y} and the part behind it"),
    ("Stop at the edge of {y} when you trace {x}.", "Do not stop at the edge of {y} when you trace {x}."),
    ("Stop where {x} go{es} out of sight.", "Do not stop where {x} go{es} out of sight."),
    ("{x}, counting only what shows", "{x}, counting more than what shows"),
    ("{x} as {they} {is} seen", "{x} as {they} would be seen with nothing in front"),
    ("What {does} {x} look like here?", "What would {x} look like with nothing in front?"),
    ("Where do the visible edges of {x} run?", "Where do the true edges of {x} run?"),
    ("How much of {x} is visible?", "How much of {x} is there in total, visible or not?"),
    ("{x}, ignoring what is hidden", "{x}, not ignoring what is hidden"),
    ("{x}, ignoring the occluded part", "{x}, ignoring the occlusion"),
    ("{x}, excluding whatever is covered by other things", "{x}, ignoring that other things cover {it}"),
    ("{x}, cropped where something overlaps {it}", "{x}, not cropped where something overlaps {it}"),
    ("the whole visible part of {x}", "the whole of {x}, not just the visible part"),
    ("not the full shape of {x}, the visible one", "the full shape of {x}, not the visible one"),
    ("a modal mask of {x}, not an amodal one", "an amodal mask of {x}, not a modal one"),
    ("{x}, broken up by what is in front", "{x}, unbroken by what is in front"),
    ("{x} with a gap where something is in front", "{x} without a gap where something is in front"),
    ("{x} as {they} appear{s} behind what is in front", "{x} as {they} continue{s} behind what is in front"),
    ("With other objects left in place, mark {x}.", "With other objects taken away, mark {x}."),
    ("{x}, treating the things in front as solid", "{x}, treating the things in front as transparent"),
    ("{x}, visible or nothing", "{x}, visible or not"),
    ("{x} with the <hidden> <parts> <gone>", "{x} with the <hidden> <parts> <back>"),
    ("{x} with the <hidden> <parts> <gone>", "{x} with <the front> <gone>"),
    ("Remove the <hidden> <parts> of {x}.", "Remove what <hides> {x}."),
    ("{x}, not amodally completed", "{x}, amodally completed"),
    (
        "I like the <visible> <part> of {x} better than the <whole> <shape>.",
        "I like the <whole> <shape> of {x} better than the <visible> <part>.",
    ),
    (
        "Sooner the <visible> <part> of {x} than the <whole> <shape>.",
        "Sooner the <whole> <shape> of {x} than the <visible> <part>.",
    ),
    (
        "Where something <hides> {x}, the pixels are lost.",
        "Where something <hides> {x}, the pixels still count.",
    ),
    (
        "If something <hides> a <part> of {x}, accept that.",
        "If something <hides> a <part> of {x}, do not accept that.",
    ),
    ("Make do with the <visible> <part> of {x}.", "Don't make do with the <visible> <part> of {x}."),
    ("Be happy with what <shows> of {x}.", "Never be happy with what <shows> of {x}."),
    ("Other objects are allowed to interrupt {x}.", "Other objects are not allowed to interrupt {x}."),
    ("{x}, whose mask may have holes", "{x}, whose mask may not have holes"),
    ("The mask of {x} may stay incomplete.", "The mask of {x} may not stay incomplete."),
    ("{x}, <dropping> the <hidden> <parts>", "{x}, <keeping> the <hidden> <parts>"),
    ("{x}, <dropping> whatever is <hidden>", "{x}, <keeping> whatever is <hidden>"),
    ("<Drop> the <hidden> <parts> of {x}.", "<Keep> the <hidden> <parts> of {x}."),
    ("<Drop> the <hidden> <parts> of {x}.", "Do not <drop> the <hidden> <parts> of {x}."),
    ("Do not <keep> the <hidden> <parts> of {x}.", "<Keep> the <hidden> <parts> of {x}."),
    ("Do not <guess> what is <hidden> of {x}.", "<Guess> what is <hidden> of {x}."),
    ("{x}, <without guessing> the rest", "{x}, <guessing> the rest"),
    ("{x}, <only> what <shows>", "{x}, <more than> what <shows>"),
    ("{x}, <only> the <visible> <part>", "{x}, <more than> the <visible> <part>"),
    (
        "I want what <shows> of {x}, not the <whole> <shape>.",
        "I want the <whole> <shape> of {x}, not what <shows>.",
    ),
    (
        "The <whole> <shape> of {x} is too much, mark what <shows>.",
        "What <shows> of {x} is too little, mark the <whole> <shape>.",
    ),
    ("Leave <the front> in place and mark {x}.", "<Remove> <the front> and mark {x}."),
    ("Let <the front> cut into {x}.", "Do not let <the front> cut into {x}."),
    ("{x}, with {y} left in place", "{x}, with {y} <gone>"),
    ("{x}, partly <hidden>, as seen", "{x}, partly <hidden>, but drawn in one piece"),
    (
        "{x}, although other things <hide> a part, as {they} {is}",
        "{x}, as {they} would be if nothing <hid> a part",
    ),
    ("The outline of {x} ends at the edge of {y}.", "The outline of {x} does not end at the edge of {y}."),
    (
        "Trace {x} where {they} {is} not <hidden>.",
        "Trace {x} where {they} {is} <hidden> and where {they} {is} not.",
    ),
    ("A fragment of {x} is enough.", "A fragment of {x} is not enough."),
    ("A partial mask of {x} will do.", "A partial mask of {x} will not do."),
    ("The overlap does not belong to {x}.", "The overlap belongs to {x} too."),
    ("{x}, with the occlusion left in", "{x}, with the occlusion undone"),
    ("{x}, nothing beyond what <shows>", "{x}, also beyond what <shows>"),
    ("<only> the pixels of {x} that <are seen>", "all the pixels of {x}, not just those that <are seen>"),
)


def agreement(pronoun: str) -> dict[str, str]:
    """The slots that agree with a target that is "it", "him", "her" or "them"."""
    many = pronoun == "them"
    subject, possessive = {"it": ("it", "its"), "him": ("he", "his"), "her": ("she", "her"), "them": ("they", "their")}[
        pronoun
    ]
    return {
        "it": pronoun,
        "they": subject,
        "its": possessive,
        "itself": "themselves" if many else f"{pronoun}self",
        "is": "are" if many else "is",
        "was": "were" if many else "was",
        "does": "do" if many else "does",
        "s": "" if many else "s",
        "es": "" if many else "es",
    }


_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(template: str) -> tuple[str, ...]:
    """Every wording that a template's choices and shared words stand for."""
    if match := _CHOICE.search(template):
        words = match[1]
    elif match := _SHARED.search(template):
        words = VOCABULARY[match[1].lower()]
        if match[1][0].isupper():
            words = "|".join(word[0].upper() + word[1:] for word in words.split("|"))
    else:
        return (template,)
    start, end = template[: match.start()], template[match.end() :]
    return tuple(done for word in words.split("|") for done in expand(start + word + end))
