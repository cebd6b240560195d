"""Sentences about anything, for the mask-type head alone: the training wordings around nouns that no scene has.

The drawn scenes know a few dozen classes. A head that has only read about those takes the noun for a part of the
wording, and is lost when somebody asks for a lighthouse. So the same wordings are also filled with some hundred other
nouns, with people, with places and remarks that say nothing about the mask type, and with slips of the pen. They need
no image, since the type lies in the words.
"""

import re
from importlib.resources import files

import numpy as np

from r2sm_jax.queries.objects import pick
from r2sm_jax.queries.wordings import COMMANDS, QUESTIONS, agreement
from r2sm_jax.queries.write import Phrasebook, Wording, phrasebook
from r2sm_jax.query import MaskType, Sentence


def _words(name: str) -> tuple[str, ...]:
    return tuple((files("r2sm_jax.queries") / "words" / f"{name}.txt").read_text(encoding="utf-8").splitlines())


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
    "with the hidden {part}", "well hidden in the {t}", "deep inside the {t}", "buried in {t}s",
    "tucked in behind the {t}", "that was once complete", "without a {part}", "with the entire {t} on top",
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
TASKS = (
    "cut the bread", "light a fire", "put out a fire", "carry water", "open a bottle", "keep food cold",
    "tell the time",
    "cross a river", "sit down", "measure a room", "paint a wall", "keep the rain off", "fix a {t}", "make music",
    "warm up",
    "feed a {t}", "reach the roof", "catch a fish", "play with a child", "call a friend", "write a letter",
    "sweep the floor",
    "read at night", "protect your head", "see far away", "weigh a parcel", "lift the {t}", "win the race",
    "travel by night",
)  # fmt: skip
QUESTIONS_OF_USE = (
    "Which of these would you use to {task}?", "What in this scene could be used to {task}?",
    "What helps one to {task}?",
    "Which item would a {p} take along to {task}?", "Which {t} suits somebody who wants to {task}?", "Who can {task}?",
    "What does the {p} need to {task}?", "Find something that could {task}.", "Identify what a {p} uses to {task}.",
    "How many {t}s are there?", "Which {t} is the {k} one?", "What is it that the {p} holds?",
    "Who is about to {task}?",
)  # fmt: skip
CASUAL: dict[MaskType, tuple[str, ...]] = {
    "modal": (
        "{n}", "{n}?", "obj={n}", "class: {n}", "target = {n}", "item: {x}", "uh the um {n}", "{x}, I think", "{x} now",
        "mummy, where is {x}?", "{x}, bless {it}", "yes, {x}", "Isn't that {x}?", "I like {x}.", "We bought {x}.",
        "{x} caught my eye.", "Look, {x}!", "There is {x}, and that is what I mean.", "label {n}", "label={n} conf=0.9",
        "tag {n}", "Please to mark {x}.", "Which of these is {x}?", "You see {x}? Mark {it}.", "next: {n}", "{n} {n}",
        "{x} belongs to me; point {it} out.", "get {x} for me, dear", "Somewhere there is {x}.", "Where did I put {x}?",
        "{x} next to the {t}, the one by the {t}", "How many {t}s are there? Mark the {k} one.", "pick {x} out for us!",
        "How many {t}s can you count? Mark the one furthest to the left.", "Something to {task}.",
        "whatever could {task}",
        *QUESTIONS_OF_USE,
    ),
    "amodal": (
        "{x} whole, dont care that {y} is on {it}", "the full {n}, {y} in front or not",
        "{x}, and pay no attention to {y}",
        "{x} in {its} entire form, with what {y} covers", "{x} complete, down to the {part} that {y} covers",
        "last time you stopped at {y}, this time do all of {x}", "{x} like there is nothing lying on {it} at all",
        "you only did half of {x}, do the whole of {it} please", "{x}, buried bits and everything",
        "{x}, {part} and all",
        "{x}, hidden {part} included", "whole {n}, obscured {part} too", "{x} with the {part} that is behind {y}",
        "I mean all of {x}, also the {part}", "draw {x} like {y} is invisible", "{x}, never mind {y} in the way",
        "{x} as one entire piece", "{x} the way {they} left the workshop", "the full outline of {x}, {y} or not",
        "if {y} went away, what shape would {x} be? draw that", "{x}: fill in the regions that {y} blocks",
        "count {x} as one whole, add the {part} behind {y}", "mark {x} in full nevertheless",
        "{x}, the entire shape of {it}",
    ),
}  # fmt: skip
"""Plain requests, and requests for everything, in the manner of people who do not write in sentences."""
BARELY = (
    "just {x} nothing you have to guess", "only pixels of {x} that are really there", "do {x}, but no inventing",
    "{x} but dont make up any bits you cant see", "{x} exactly as the photo shows {it}, with {y} still in front",
    "stop at {y} and dont paint in the rest of {x}", "{x}, holding to the edges as they read on this frame",
    "{x}: measured pixels only, nothing inferred", "nothing more of {x} than this angle gives us",
    "It is sufficient if I get what is seen of {x}.", "{x}, wherever you can see {it}, guessing nothing",
    "the surface of {x} that the sensor has seen", "{x} as shot, {y} still biting into {it}",
)  # fmt: skip
"""The same, for what is seen and no more."""
PREFIXES = (
    "For the drawing", "For our catalogue", "For the record", "To estimate the mass", "Before we start",
    "For my homework",
    "In the next frame", "For the survey", "For the gripper", "If it is not too much to ask", "If you don't mind",
    "When you have time", "As a {p}", "In this photo", "For Saturday's game", "For the {p}", "To be honest",
    "For a colour index",
)  # fmt: skip
WHOLES = (
    "the full glass of {t} juice", "the entire row of {t}s", "the whole team of {p}s", "the complete set of {t}s",
    "a full box of {t}s", "the whole pile of {t}s", "the {t} cover", "the {p} in full dress", "the hidden {t}",
    "the cover of the {t}", "the {t} full of {t}s", "the covered {t}", "the block of {t}s",
    "the {p} hiding in the {t}",
)  # fmt: skip


PAIR_SHARE = 0.15


def write_free_sentences(count: int, *, seed: int) -> list[Sentence]:
    """`count` different sentences, half of them modal; half of either type are hard for a keyword rule."""
    rng, book = np.random.default_rng(seed), phrasebook(False)
    found: dict[str, Sentence] = {}
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
                text = _finish(rng, slots.get("lead"), _fill(rng, _literal(pick(rng, wording.texts)).format(**slots)))
                found.setdefault(text, Sentence(text, mask_type, f"{mask_type}: {wording.family}"))
    return list(found.values())[:count]


def _wording(rng: np.random.Generator, book: Phrasebook, mask_type: MaskType) -> Wording:
    if mask_type == "modal" and rng.random() < 0.4:
        return (_loose(rng, CASUAL["modal"], "bare"), pick(rng, book.plain), pick(rng, book.bare))[
            int(rng.random() * 3)
        ]
    if rng.random() < 0.12:
        return _loose(rng, CASUAL["amodal"] if mask_type == "amodal" else BARELY, "casual")
    wordings = (book.hard if rng.random() < 0.5 else book.easy)[mask_type]
    if rng.random() < 0.5:  # every family of meaning as often, however many wordings it has
        family = pick(rng, list(dict.fromkeys(wording.family for wording in wordings)))
        wordings = [wording for wording in wordings if wording.family == family]
    return pick(rng, wordings)


def _literal(text: str) -> str:
    """Keeps what `_fill` replaces from being taken for a slot of the target."""
    return re.sub(r"{(t|p|k|use|part|done|task)}", r"{{\1}}", text)


def _loose(rng: np.random.Generator, texts: tuple[str, ...], family: str) -> Wording:
    return Wording((pick(rng, texts),), family, frozenset(), False)


def _fill(rng: np.random.Generator, text: str) -> str:
    """Replaces {t}, {p}, {k}, {use}, {part}, {done} and {task} by words, each occurrence by its own."""
    choices = {"t": THINGS, "p": PEOPLE, "k": KINDS, "use": USES, "part": PARTS, "done": DONE, "task": TASKS}
    while "{" in text:
        text = re.sub(r"{(\w+)}", lambda match: pick(rng, choices[match[1]]), text)
    return text


def _slots(rng: np.random.Generator) -> dict[str, str]:
    """A target that nobody has drawn, and the thing in front of it."""
    draw = rng.random()
    if draw < 0.1:
        subject = pick(
            rng, ("what you would use", "the thing one needs", "something", "whatever one would take", "what helps")
        )
        noun = pick(rng, ("thing", "item", "object", "tool"))
        return _forms(rng, f"{subject} to {_fill(rng, '{task}')}", noun, several=False, person=False)
    if draw < 0.16:
        return _forms(rng, "it", "thing", several=False, person=False) | {
            "lead": _fill(rng, pick(rng, QUESTIONS_OF_USE))
        }
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
    return _forms(rng, text, bare, several=several, person=person)


def _forms(rng: np.random.Generator, text: str, bare: str, *, several: bool, person: bool) -> dict[str, str]:
    """The words that agree with a target."""
    pronoun = "them" if several else pick(rng, ("him", "her", "it")) if person else "it"
    values = agreement(pronoun) | {
        "x": text,
        "pl": "s" if several else "",
        "poss": text + ("'" if several else "'s"),
        "n": bare,
        "y": "the " + _fill(rng, pick(rng, ("{t}", "{p}", "{k} {t}", "{t}"))),
    }
    if several:
        values["ns"] = bare
    return values


def _finish(rng: np.random.Generator, lead: str | None, text: str) -> str:
    """A shell around a noun phrase, remarks before and after, and slips of the pen."""
    form = {".": "command", "?": "question", "!": "command"}.get(text[-1], "noun phrase")
    if form == "noun phrase" and rng.random() < 0.5:
        text = pick(rng, COMMANDS if rng.random() < 0.6 else QUESTIONS).format(w=text)
    if rng.random() < 0.08:
        end = text[-1] if text[-1] in ".?" else ""
        text = f"{text.removesuffix(end)}, {_fill(rng, pick(rng, TAILS))}{end}"
    if rng.random() < 0.08:
        text = f"{_fill(rng, pick(rng, PREFIXES))}, {text[0].lower()}{text[1:]}"
    if lead or rng.random() < 0.12:
        text = f"{lead or _fill(rng, pick(rng, LEADS))} {text[0].upper()}{text[1:]}"
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
