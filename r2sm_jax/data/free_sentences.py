"""Sentences about anything, for the mask-type head alone: the training wordings around nouns that no scene has.

The drawn scenes know a few dozen classes. A head that has only read about those takes the noun for a part of the
wording, and is lost when somebody asks for a lighthouse. So the same wordings are also filled with some hundred other
nouns, with people, with places and remarks that say nothing about the mask type, and with slips of the pen. They need
no image, since the type lies in the words.
"""

import re
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from r2sm_jax.data.queries import Phrasebook, Wording, phrasebook
from r2sm_jax.data.schema import MaskType
from r2sm_jax.data.targets import pick
from r2sm_jax.data.wordings import COMMANDS, QUESTIONS


def _words(name: str) -> tuple[str, ...]:
    return tuple((files("r2sm_jax.data") / "words" / f"{name}.txt").read_text(encoding="utf-8").splitlines())


THINGS, PEOPLE, KINDS = _words("things"), _words("people"), _words("kinds")
PARTS = (
    "roof", "handle", "leg", "arm", "tail", "head", "wheel", "corner", "lid", "back", "front", "top", "base", "door",
    "edge", "wing", "foot", "face", "side",
)  # fmt: skip
DETERMINERS = {
    False: ("a", "that", "this", "my", "your", "our", "her", "his", "any", "another", "some kind of", ""),
    True: ("those", "these", "my", "your", "our", "both", "some", "all", "all the", "any", "two", "three", ""),
}
"""Other than "the", of one thing and of several."""
PLACES = (
    "on the left", "on the right", "in the middle", "in the corner", "at the back", "at the front", "near the {t}",
    "next to the {t}", "beside the {t}", "on the {t}", "under the {t}", "behind the {t}", "in front of the {t}",
    "between the {t} and the {t}", "by the {t}", "below the {t}", "above the {t}", "inside the {t}",
    "to the left of the {t}", "to the right of the {t}", "with the {t}", "beyond the {t}", "hiding behind the {t}",
    "partly covered by the {t}", "between the two {t}s", "half hidden by the {t}", "standing behind the {t}",
    "partly blocked by the {t}", "covered with {t}s", "full of {t}s", "in the background", "in the foreground",
    "at the far end", "nearest to us", "with a {k} {t}", "underneath the {k} {t}", "you could {use}",
    "that belongs to the {p}", "that the {p} is holding", "next to the {p}", "behind the {p}", "in mid-air",
    "in the distance", "in the shade of the {t}", "covered in mud", "covered in paint", "completely covered in {t}s",
    "wrapped in a {t}", "in a full-length coat", "with paint all over the {part}", "that takes up the entire wall",
    "at the gate", "that fills the whole {t}", "blocking the {t}", "that hides the {t}", "covering the {t}",
    "that has just {done} the {t}", "with the missing {part}", "with a broken {part}", "with its {part} out of frame",
    "whose {part} is hidden", "for sale", "with its {part} in the {t}", "carrying a complete {t}",
    "carrying a whole {t}", "holding a full {t}", "with a {k} {part}", "third from the left", "second from right",
    "number seven", "facing the camera", "facing away from us", "looking at the {t}", "from the {t} shop",
    "used to {use}", "on which the {p} stands", "that nobody wants", "as tall as the {t}", "like a {t}", "sitting",
    "standing", "lying down", "waiting", "leaning on the {t}", "asleep", "parked", "left behind", "on display",
    "with one {part} behind the {t}", "in the whole picture", "obscured by the {t}", "the {p} paid for in full",
    "with the hidden {part}", "that was once complete", "without a {part}", "with the entire {t} on top",
    "in full bloom",
)  # fmt: skip
DONE = ("kicked", "caught", "dropped", "passed", "painted", "sold", "broken", "lost", "found", "hit")
USES = (
    "sit on", "drink from", "eat", "ride", "wear", "play with", "read", "cut with", "sleep on", "write with",
    "cook in", "live in",
)  # fmt: skip
LEADS = (
    "I have been looking the whole day.", "My view is blocked.", "We are nearly complete.", "The list is full.",
    "I am writing a report.", "This is a busy picture.", "There is a lot going on here.", "We play hide and seek.",
    "I need this for work.", "A {p} asked me.", "It is for my {t} collection.", "Look at the photo.",
    "One more thing.", "Several things overlap.", "There are {t}s all over the place.",
    "Some things are hidden here.", "You are an expert.", "We are labelling images.", "I work in a shop.",
    "My daughter likes it.", "Everybody talks about the {t}.", "The {t} is in front of the {t}.",
    "It is hard to tell what is what.", "Let me explain.", "Be careful.", "Somebody put a {t} there.",
    "The {p} has just arrived.", "There is a {t} in the way.", "I took this photo myself.",
    "The whole family is here.", "In this scene the {t} is near the {t}.", "The scene is cluttered.",
    "First things first.",
)  # fmt: skip
TAILS = (
    "please", "thanks", "if you can", "as soon as possible", "for my homework", "for the {p}", "for a talk", "okay?",
)  # fmt: skip
STYLES = (
    "{n}", "{n}?", "obj={n}", "class: {n}", "target = {n}", "item: {x}", "uh the um {n}", "{x}, I think",
    "mummy, where is {x}?", "{x}, bless {it}", "yes, {x}", "Isn't that {x}?", "I like {x}.", "We bought {x}.",
    "{x} caught my eye.", "Look, {x}!", "There is {x}, and that is what I mean.", "label {n}", "label={n} conf=0.9",
    "tag {n}", "Please to mark {x}.", "Which of these is {x}?", "You see {x}? Mark {it}.",
    "{x} belongs to me; point {it} out.", "get {x} for me, dear", "Somewhere there is {x}.", "Where did I put {x}?",
    "{x} next to the {t}, the one by the {t}", "next: {n}", "{n} {n}",
)  # fmt: skip
"""Plain requests in the manner of people who do not write in sentences."""
WHOLES = (
    "the full glass of {t} juice", "the entire row of {t}s", "the whole team of {p}s", "the complete set of {t}s",
    "a full box of {t}s", "the whole pile of {t}s", "the {t} cover", "the {p} in full dress", "the hidden {t}",
    "the cover of the {t}", "the {t} full of {t}s", "the covered {t}", "the block of {t}s",
    "the {p} hiding in the {t}",
)  # fmt: skip


PAIR_SHARE = 0.15


@dataclass(frozen=True)
class FreeSentence:
    """A sentence and what it asks for. `family` is that of its wording."""

    text: str
    mask_type: MaskType
    family: str


def write_free_sentences(count: int, *, seed: int) -> list[FreeSentence]:
    """`count` different sentences, half of them modal; half of either type are hard for a keyword rule."""
    rng, book = np.random.default_rng(seed), phrasebook(False)
    found: dict[str, FreeSentence] = {}
    while len(found) < count:
        slots = _slots(rng)
        wordings: list[tuple[Wording, MaskType]]
        if rng.random() < PAIR_SHARE:  # the same slots with both types, in wordings that differ little
            modal, amodal = pick(rng, book.pairs)
            wordings = [(pick(rng, modal), "modal"), (pick(rng, amodal), "amodal")]
        else:
            drawn: MaskType = "modal" if rng.random() < 0.5 else "amodal"
            wordings = [(_wording(rng, book, drawn), drawn)]
        for wording, mask_type in wordings:
            if wording.slots <= slots.keys():
                text = _finish(rng, _fill(rng, pick(rng, wording.texts).replace("{t}", "{{t}}").format(**slots)))
                found.setdefault(text, FreeSentence(text, mask_type, f"{mask_type}: {wording.family}"))
    return list(found.values())[:count]


def _wording(rng: np.random.Generator, book: Phrasebook, mask_type: MaskType) -> Wording:
    if mask_type == "modal" and rng.random() < 0.4:
        style = Wording((pick(rng, STYLES),), "bare", frozenset(), False)
        return (style, pick(rng, book.plain), pick(rng, book.bare))[int(rng.random() * 3)]
    wordings = (book.hard if rng.random() < 0.5 else book.easy)[mask_type]
    if rng.random() < 0.5:  # every family of meaning as often, however many wordings it has
        family = pick(rng, list(dict.fromkeys(wording.family for wording in wordings)))
        wordings = [wording for wording in wordings if wording.family == family]
    return pick(rng, wordings)


def _fill(rng: np.random.Generator, text: str) -> str:
    """Replaces {t}, {p}, {k}, {use}, {part} and {done} by words, each occurrence by its own."""
    choices = {"t": THINGS, "p": PEOPLE, "k": KINDS, "use": USES, "part": PARTS, "done": DONE}
    return re.sub(r"{(\w+)}", lambda match: pick(rng, choices[match[1]]), text)


def _slots(rng: np.random.Generator) -> dict[str, str]:
    """A target that nobody has drawn, and the thing in front of it."""
    person, several = rng.random() < 0.25, rng.random() < 0.25
    noun = _fill(rng, "{p}" if person else "{t}")
    if several:
        noun += "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    bare = noun
    if rng.random() < 0.35:
        bare = f"{pick(rng, KINDS)} {bare}"
    whole = rng.random() < 0.05
    determiner = "the" if rng.random() < 0.65 else pick(rng, DETERMINERS[several])
    text = _fill(rng, pick(rng, WHOLES)) if whole else f"{determiner} {bare}".strip()
    for _ in range(int(rng.random() < 0.5) + int(rng.random() < 0.12)):
        text += " " + _fill(rng, pick(rng, PLACES))
    several = several and not whole
    pronoun = "them" if several else pick(rng, ("him", "her", "it")) if person else "it"
    subject = {"them": "they", "him": "he", "her": "she", "it": "it"}[pronoun]
    values = {
        "x": text,
        "it": pronoun,
        "they": subject,
        "its": {"them": "their", "him": "his", "her": "her", "it": "its"}[pronoun],
        "itself": {"them": "themselves", "him": "himself", "her": "herself", "it": "itself"}[pronoun],
        "is": "are" if several else "is",
        "was": "were" if several else "was",
        "does": "do" if several else "does",
        "s": "" if several else "s",
        "es": "" if several else "es",
        "pl": "s" if several else "",
        "poss": text + ("'" if several else "'s"),
        "n": bare,
        "y": "the " + _fill(rng, pick(rng, ("{t}", "{p}", "{k} {t}", "{t}"))),
    }
    if several:
        values["ns"] = bare
    return values


def _finish(rng: np.random.Generator, text: str) -> str:
    """A shell around a noun phrase, remarks before and after, and slips of the pen."""
    form = {".": "command", "?": "question"}.get(text[-1], "noun phrase")
    if form == "noun phrase" and rng.random() < 0.5:
        text = pick(rng, COMMANDS if rng.random() < 0.6 else QUESTIONS).format(w=text)
    if rng.random() < 0.08:
        end = text[-1] if text[-1] in ".?" else ""
        text = f"{text.removesuffix(end)}, {_fill(rng, pick(rng, TAILS))}{end}"
    if rng.random() < 0.12:
        text = f"{_fill(rng, pick(rng, LEADS))} {text[0].upper()}{text[1:]}"
    casing = rng.random()
    if casing < 0.25:
        text = text.lower().removesuffix(".")
    elif casing < 0.5:
        text = text[0].upper() + text[1:]
    return _slip(rng, text) if rng.random() < 0.07 else text


def _slip(rng: np.random.Generator, text: str) -> str:
    """One to three letters dropped, doubled or swapped."""
    letters = list(text)
    for place in rng.integers(1, max(2, len(letters) - 2), rng.integers(1, 4)):
        at = int(min(place, len(letters) - 2))
        kind = rng.random()
        if kind < 0.4:
            del letters[at]
        elif kind < 0.7:
            letters.insert(at, letters[at])
        else:
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)
