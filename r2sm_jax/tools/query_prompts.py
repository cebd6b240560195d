"""What a vision-language model is told so that it writes modal or amodal queries about an image.

The rules are those of the R2SM paper's query generation (its appendix), in words of our own.
"""

from r2sm_jax.query import MaskType

_TASK = """\
You write test questions for image segmentation. You get an image and a list of the objects that were marked in it. \
Later, a program is given nothing but the image and one of your questions, and has to mark the very objects that the \
question is about.

Each line of the list is one object: `id` and `class_name` are used in your answers; `box` is [x, y, width, height] \
and `polygon` its outline [x1, y1, x2, y2, ...], one for each of its parts, both in pixels from the top left corner; \
`is_occluded` says whether something covers a part of it (null: not known)."""

_RULES = """\
Rules:
- Write exactly {count} question(s). Each has to be understood alone, without the list and without the others.
- A question is about one object or about several; several may be of different classes. It has to fit all objects \
in its answer and no other object in the list.
- Ask by way of what objects are for, what they can do, how they are used or what they are by nature. Looks may help, \
but not be all there is.
- A question never has a class name in it, nor coordinates, nor a box or polygon.
- Taken together, the questions deal with every object in the list at least once.
- Only what is in the list may be asked for, whatever else the image shows."""

_MODAL_RULE = """\
- What is wanted is just the part of an object that can be seen; `box` and `polygon` go around \
this part. Do not ask for whole shapes or covered parts."""

_AMODAL_RULES = """\
- What is wanted is the entire object, with the parts that cannot be seen; \
`box` and `polygon` go around all of it.
- Every object with `is_occluded` true is dealt with by some question, and this question says that the object is \
partly out of sight. Choose other words for it each time.
- Some of the questions ask outright for the complete object, as if nothing were in its way."""

_FORM = """\
Give each question with its answer on one line, in this form and with nothing else around it:
<Q>question</Q><A>instance id is [id], class name is [class_name]</A>
For several objects, the answer goes on after a semicolon:
<Q>question</Q><A>instance id is [id], class name is [class_name]; instance id is [id], class name is [class_name]</A>
Copy `id` and `class_name` from the list as they are."""

_EXAMPLE_LIST = """\
{"id": 41, "class_name": "umbrella", "box": [30, 12, 96, 60], \
"polygon": [[30, 48, 52, 18, 84, 12, 116, 22, 126, 50, 80, 72]], "is_occluded": false}
{"id": 42, "class_name": "bench", "box": [60, 90, 180, 70], \
"polygon": [[60, 92, 238, 90, 240, 158, 64, 160]], "is_occluded": true}
{"id": 47, "class_name": "bicycle", "box": [150, 60, 110, 104], \
"polygon": [[150, 120, 182, 60, 236, 66, 260, 128, 232, 164, 170, 160]], "is_occluded": false}"""

_EXAMPLE_LINES: dict[MaskType, str] = {
    "modal": """\
<Q>It starts to drizzle and I have left my hat at home. What would keep my hair dry?</Q>\
<A>instance id is [41], class name is [umbrella]</A>
<Q>Where could a tired walker sit down, and what could somebody else ride home without any fuel?</Q>\
<A>instance id is [42], class name is [bench]; instance id is [47], class name is [bicycle]</A>
<Q>Which one would need its tyres pumped up from time to time?</Q>\
<A>instance id is [47], class name is [bicycle]</A>""",
    "amodal": """\
<Q>Two people could rest here side by side, although something parked before it takes away part of the view. Mark \
all of it.</Q><A>instance id is [42], class name is [bench]</A>
<Q>What would somebody open against a shower, from edge to edge, and what would they pedal home on?</Q>\
<A>instance id is [41], class name is [umbrella]; instance id is [47], class name is [bicycle]</A>
<Q>If nothing stood in front of it, what would be the complete outline of the seat that a park offers to everybody?\
</Q><A>instance id is [42], class name is [bench]</A>""",
}


def system_prompt(mask_type: MaskType, count: int) -> str:
    """The rules for `count` queries of a mask type, with the form of the answers and a worked example."""
    rules = _RULES.format(count=count) + "\n" + (_MODAL_RULE if mask_type == "modal" else _AMODAL_RULES)
    example = (
        "An example, about another image and with three questions only. From the list\n"
        f"{_EXAMPLE_LIST}\nthese could be written:\n{_EXAMPLE_LINES[mask_type]}"
    )
    return "\n\n".join([_TASK, rules, _FORM, example])


def user_prompt(width: int, height: int, table: str, count: int) -> str:
    """What goes with the image: its size and the list of its objects, one on a line."""
    return f"The image is {width} pixels wide and {height} high. Its objects:\n{table}\nNow write {count} question(s)."
