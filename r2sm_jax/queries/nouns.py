"""What the query grammar knows of the drawn classes: their nouns, their groups and what they are for.

Every class has nouns for training and one held-out noun, and every class and group has function clauses for
training and one held-out clause. The held-out words never occur in a training sentence, so that the
`val_phrasing` and `val_hard` splits measure how far a model carries over to words that it was not taught.

A function clause completes "the thing …". It begins with "that", with "to", or with a subject ("you would
…"), and uses modal verbs only, so that it fits one thing and several. "Lead. | clause" puts a sentence in
front of the query.
"""

import re
from dataclasses import dataclass

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "white")

# Words before the noun; words after the noun.
PATTERNS = {
    "plain": (("plain",), ("without a pattern",)),
    "striped": (("striped",), ("with stripes",)),
    "dotted": (("dotted", "spotted"), ("with dots", "covered in dots", "covered with spots")),
    "checked": (("checked", "checkered"), ("with a checked pattern",)),
}


@dataclass(frozen=True)
class Meaning:
    """Nouns and function clauses of a class or of a group of classes.

    `unless` lists classes that would make the words doubtful when one of them is in the scene.
    """

    classes: frozenset[str]
    nouns: tuple[str, ...]
    held_out_nouns: tuple[str, ...]
    functions: tuple[str, ...]
    held_out_functions: tuple[str, ...]
    unless: frozenset[str] = frozenset()


def _of(classes: str, nouns: str, held_out_nouns: str, functions: tuple[str, ...], held_out: tuple[str, ...],
        unless: str = "") -> Meaning:  # fmt: skip
    def split(words: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in words.split(",") if word.strip())

    return Meaning(
        frozenset(split(classes)),
        split(nouns),
        split(held_out_nouns),
        functions,
        held_out,
        frozenset(split(unless)),
    )


CLASSES: dict[str, Meaning] = {
    meaning.nouns[0]: meaning
    for meaning in (
        _of("mug", "mug, cup, coffee mug", "coffee cup",
            ("you would drink hot coffee from", "that would keep your cocoa warm",
             "The espresso is ready. | to serve it in"),
            ("you would serve hot tea in",)),
        _of("bottle", "bottle, drinking bottle", "flask",
            ("you would fill with water for a hike", "you would close with a cork"),
            ("that would carry lemonade to a picnic without spilling",)),
        _of("wine glass", "wine glass, wineglass, goblet", "stemmed glass",
            ("you would raise to toast the bride", "a sommelier would swirl",
             "The Merlot has been opened. | to pour it into"),
            ("you would sip champagne from",)),
        _of("book", "book, novel", "paperback",
            ("you would borrow from a library", "you would read chapter by chapter",
             "I am bored on the train. | with a story to read"),
            ("that would tell a story at bedtime",)),
        _of("envelope", "envelope, letter", "piece of mail",
            ("you would put a stamp on", "a postman would deliver"),
            ("you would drop into a postbox",)),
        _of("pencil", "pencil, lead pencil", "drawing pencil",
            ("you would sketch with", "that would need a sharpener",
             "I want to jot down a phone number. | to write with"),
            ("an artist would shade a portrait with",)),
        _of("hat", "hat, cap", "headgear",
            ("you would wear on your head", "you would tip to greet someone"),
            ("that would shade your face from the sun",)),
        _of("shirt", "shirt, T-shirt", "jersey",
            ("you would wear on your upper body", "you would pull on over your chest and arms"),
            ("a tailor would sew sleeves onto",)),
        _of("boot", "boot, shoe", "wellington",
            ("to wear on your feet", "you would walk through puddles in",
             "My toes are freezing. | to put on"),
            ("that would keep your feet dry",)),
        _of("apple", "apple", "eating apple",
            ("that would keep the doctor away", "you would press for cider"),
            ("that would have dropped on Newton's head",)),
        _of("banana", "banana", "plantain",
            ("a monkey would peel", "you would peel from the top before eating"),
            ("a clown in a cartoon would slip on",)),
        _of("ice cream", "ice cream, ice cream cone", "gelato",
            ("that would melt in the sun", "you would lick on a hot summer day"),
            ("you would keep in the freezer for dessert",)),
        _of("hammer", "hammer, claw hammer", "mallet",
            ("you would drive a nail with", "a carpenter would reach for to pound something",
             "There is a nail sticking out of the wall. | to hit it with"),
            ("a blacksmith would strike hot iron with",)),
        _of("key", "key, door key", "house key",
            ("you would open a lock with", "a locksmith would copy",
             "The front door is locked. | that would let me in"),
            ("you would miss when standing before a locked door",)),
        _of("scissors", "scissors, pair of scissors", "shears",
            ("you would cut paper with", "a hairdresser would snip with",
             "This ribbon is too long. | that would make it shorter"),
            ("you would trim a thread with",)),
        _of("fish", "fish", "tropical fish",
            ("that would breathe under water", "that would live in an aquarium"),
            ("an angler would hope to catch",)),
        _of("cat", "cat, kitty, house cat", "feline",
            ("that would purr on your lap", "that would chase mice"),
            ("that would meow when hungry",)),
        _of("butterfly", "butterfly, insect", "winged bug",
            ("that would flutter from flower to flower", "that would have been a caterpillar before"),
            ("that would come out of a cocoon",)),
        _of("car", "car, automobile", "sedan",
            ("you would drive on the highway", "that would stop at a red traffic light"),
            ("you would park in a garage",)),
        _of("sailboat", "sailboat, sailing boat, boat", "yacht",
            ("that would glide across a lake", "that would need wind to cross the sea"),
            ("a skipper would steer out of the harbour",)),
        _of("rocket", "rocket, space rocket", "spaceship",
            ("that would fly to the moon", "an astronaut would travel in"),
            ("that would be launched into orbit",)),
        _of("ball", "ball, bouncy ball", "beach ball",
            ("you would kick into a goal", "that would bounce down the stairs"),
            ("you would throw through a hoop",)),
        _of("teddy bear", "teddy bear, teddy, stuffed bear", "plush bear",
            ("a toddler would take to bed", "that would be filled with soft stuffing"),
            ("a small child would hug to fall asleep",)),
        _of("kite", "kite, paper kite", "toy kite",
            ("that would fly on a string", "you would let rise into the sky on a windy day"),
            ("that would need a breeze and a long line",)),
    )
}  # fmt: skip

GROUPS: dict[str, Meaning] = {
    "drink": _of("mug, bottle, wine glass", "drinking vessel", "drink container",
        ("you could drink from", "that could hold a drink", "I am thirsty. | to drink from"),
        ("that could hold some juice",)),
    "read/write": _of("book, envelope, pencil", "", "",
        ("that would serve for reading, mailing or writing", "made for reading, mailing or writing"),
        ("needed by someone who reads, mails or writes",)),
    "wear": _of("hat, shirt, boot", "piece of clothing, garment", "item of apparel",
        ("you could wear", "to put on when getting dressed"),
        ("that would hang or stand in a wardrobe",)),
    "eat": _of("apple, banana, ice cream", "", "",
        ("you could eat", "that would make a sweet snack", "I am hungry. | to eat"),
        ("that would still your hunger",), "fish"),
    "tools": _of("hammer, key, scissors", "", "",
        ("made for unlocking, cutting or pounding",
         "you would use to unlock, cut or pound something"),
        ("that would serve to open a lock, snip or strike",)),
    "animals": _of("fish, cat, butterfly", "animal, creature", "living being",
        ("that would be alive", "that would eat and breathe"),
        ("that would have a heartbeat",), "teddy bear"),
    "vehicles": _of("car, sailboat, rocket", "vehicle", "means of transport",
        ("that could carry passengers", "you could travel in"),
        ("that would take people on a journey",)),
    "toys": _of("ball, teddy bear, kite", "toy", "plaything",
        ("a child would play with", "you would give a toddler to have fun with"),
        ("that would entertain a bored child",), "car, sailboat, rocket"),
    "fruit": _of("apple, banana", "piece of fruit", "item of fruit",
        ("that would have grown on a tree or plant", "that would be rich in vitamins"),
        ("you would put into a smoothie",), "ice cream"),
}  # fmt: skip

_ANYONE = frozenset({"person", "people", "human"})
_PEOPLE = _ANYONE | {
    "man", "men", "woman", "women", "boy", "girl", "child", "children", "kid", "guy", "lady", "player",
    "baby", "adult",
}  # fmt: skip
_IRREGULAR = {
    "fish": "fish", "tropical fish": "tropical fish",
    "scissors": "pairs of scissors", "shears": "pairs of shears",
    "headgear": "pieces of headgear", "means of transport": "means of transport", "person": "people",
    "man": "men", "woman": "women", "child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth",
}  # fmt: skip
_PREPOSITION = re.compile(r"\s+(?:of|in|on|with|behind|at|from|for|under|by|near|to|and)\s+")
_ALWAYS_PLURAL = {"people", "men", "women", "children", "feet", "teeth", "mice", "cattle", "police"}


def clean_name(name: str) -> str:
    """The noun in a free-text region name: lower case, no article, no stray blanks or punctuation."""
    noun = re.sub(r"[^\w\s'&/-]", " ", name.lower().replace("_", " "))
    return re.sub(r"^(?:the|a|an|some)\s+", "", " ".join(noun.split()))


def is_plural(noun: str) -> bool:
    """Whether a noun takes "are": "scissors", "people", "wooden chairs"; not "bus", "row of trees"."""
    if re.search(r"\sand\s", noun):
        return True
    word = _PREPOSITION.split(noun)[0].split()[-1:] or [""]
    head = word[0]
    if head in _ALWAYS_PLURAL:
        return True
    singular = ("ss", "us", "is", "'s", "lens", "canvas")
    return head.endswith("s") and len(head) > 3 and not head.endswith(singular)


def plural(noun: str) -> str:
    """The plural of a noun phrase: "wine glass" → "wine glasses", "piece of fruit" → "pieces of fruit"."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if is_plural(noun):
        return noun
    head, *rest = re.split(r"(?=\s+(?:of|in|on|with)\s+)", noun, maxsplit=1)
    start, _, word = head.rpartition(" ")
    if word in _IRREGULAR:
        word = _IRREGULAR[word]
    elif re.search(r"[^aeiou]y$", word):
        word = word[:-1] + "ies"
    elif re.search(r"(?:s|x|z|ch|sh)$", word):
        word += "es"
    else:
        word += "s"
    return f"{start} {word}".strip() + "".join(rest)


def could_mean(noun: str, category: str) -> bool:
    """Whether a noun could mean a thing of a category: "cup" a "mug", "box" a "cat litter box"."""
    if category in CLASSES:
        return noun in CLASSES[category].nouns or noun in CLASSES[category].held_out_nouns
    if any(category == word or category.endswith(" " + word) for word in (noun, plural(noun))):
        return True
    head, other = noun.split()[-1], category.split()[-1] if category else ""
    return {head, other} <= _PEOPLE and not {head, other}.isdisjoint(_ANYONE)
