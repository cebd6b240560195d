"""More training wordings, by what somebody is up to: purposes, thought experiments, repairs, and refusals of these.

In the notation of `wordings.py`. Most families come in both types, so that it is what is asked and not what is talked
about that decides.
"""

from r2sm_jax.queries.wordings import Families

MODAL: Families = {
    "purpose": (
        "I want to [recolour|repaint|brighten|blur|sharpen] {x} in this very [photo|picture], so [stay on|keep to] "
        "the pixels shown.",
        "For [counting pixels|measuring the exposed area|colour statistics|a study of overlap] I need {x} [as "
        "imaged|exactly as seen|as shown].",
        "To show how things overlap, mark {x} [exactly as cut by {y}|with the overlap left in|as the picture has "
        "{it}].", "I will cut {x} out of this print with scissors; where {y} lies on top I cannot.",
        "A blur goes over {x}, and over nothing that stands in front.",
        "We compare with the raw photo, so {x} must match it pixel by pixel.", "I only pay for pixels that show {x}.",
        "I am colouring in what I see of {x}.",
        "For the [court|report|record|file] I need {x} as photographed, nothing added.",
        "How many pixels of {x} reach the camera? Mark those.", "I want to touch up {x} without touching {y}.",
    ),
    "left as it is": (
        "Where {y} [covers|crosses|hides] {x}, [leave a hole|the mask stops|leave a gap|the mask has a notch].",
        "When a part of {x} disappears [behind|under] {y}, [let it disappear|it is gone for me|the mask disappears "
        "too].",
        "The [missing|lost|hidden|covered] [part|area|half|piece] of {x} [should|may|can] stay [missing|lost|out].",
        "What {y} takes from {x} is [lost|gone|not ours any more].",
        "[Leave|Keep|Respect] the [gap|hole|notch|break] that {y} makes in {x}.", "{y} stays where it is; mark {x}.",
        "Leave {y} where it is and [mark|outline|trace] {x}.",
        "{x}, [split|cut|interrupted|broken up|divided] by {y} as {they} {is}",
        "{x} the way {they} appear{s}, [gaps|interruptions|holes|breaks] and all",
        "{x} as far as {y} lets us see {it}", "{x} except where {y} [covers|crosses|overlaps] {it}",
        "all of {x} except what {y} hides", "You may stop at the edge of {y} when you mark {x}.",
        "Holes in {x} are fine where {y} is in front.", "{x}, and respect [{y}|whatever stands] in front of {it}",
        "Mind {y} when you mark {x}; do not paint over it.", "Let the picture decide where {x} end{s}.",
        "The gap in {x} is real, keep it.",
    ),
    "no reconstruction": (
        "Do not [reconstruct|restore|repair|extend|extrapolate|continue|infer|finish] {x} [behind|under|beyond] {y}.",
        "Don't [look|peer|see] [past|behind|through] {y} when you mark {x}.", "No X-ray vision, please: {x}.",
        "Do not [pretend|imagine|suppose] that {y} [is gone|is not there|has left]; mark {x}.",
        "Do not [remove|lift|erase|push aside] {y}; [mark|outline|trace] {x}.",
        "Don't [close|bridge|fill|mend|patch] the [gap|hole|break|notch] in {x}.",
        "I don't [care|need to know|ask] [how far|where] {x} [go{es} on|continue{s}] [behind|under] {y}.",
        "I'm not interested in the [real|true|full|actual|total] [size|extent|shape|length] of {x}.",
        "The [rest|hidden part|covered half|other half] of {x} is [none of my business|of no concern|not my "
        "concern].",
        "[Resist the urge|There is no need|It is not your job] to [finish|complete|continue|restore] {x}.",
        "{x}, with no [imagination|guesswork|speculation|hallucination|fantasy]",
        "no [imagination|reconstruction|restoration|inference], just {x}",
        "[Who cares|Never mind|It does not matter] what {x} would look like without {y}; mark what you see.",
        "Leave it to others to guess the rest of {x}.", "Don't give {x} back what {y} hides.",
        "I'd rather not have {x} behind {y}, only beside it.", "{x}, and no make-believe",
        "There's no use in inferring the rest of {x}.", "Don't undo the overlap on {x}.",
    ),
    "a part will do": (
        "[A fragment|A piece|Half|A partial mask|The part in view] of {x} [is fine|will do|is enough|suffices|is "
        "all I need].", "I can [work|live|get by] with a [fragment|piece|part] of {x}.",
        "Some of {x} is better than a guess at all of {it}.",
        "A modal mask [will do|is fine|is enough|suffices] for {x}.", "Modal, please: {x}.",
        "whatever of {x} made it into the [picture|photo|view|frame]", "how much of {x} {is} in [sight|view]?",
        "the [bit|piece|share|corner|end] of {x} that [sticks out|pokes out|peeks out|is left over]",
        "the [lit|bare|open|free|exposed] [part|side|area] of {x}, [nothing else|and that is all]",
        "every pixel [showing|that shows] {x}, no others", "pixels that belong to {x} and to nothing else",
        "{poss} own pixels, no one else's", "Be strictly literal with {x}.", "an honest mask of {x}",
        "{x}; if you can't see it, don't mark it", "Where you don't see {x}, mark nothing.",
        "just what peeps out of {x} [between|beside|around|above] the other things",
    ),
    "everyone of them": (
        "all of the {ns}, every single one", "each and every one of the {ns}", "the {ns}, one and all",
        "All the {ns}, please, don't miss any.", "Have I got the full [number|count|tally] of {ns}?",
    ),
    "placed": (
        "{x} behind {y}", "{x} that {is} behind {y}", "Who put {x} behind {y}?", "{x}, the one{pl} behind {y}",
        "{x} that {is} [half|partly|partially|mostly] [hidden|covered|blocked|obscured|concealed] by {y}",
        "Point at {x}, which {y} [obstructs|blocks|hides] from view.", "{x}, half of which {y} [hides|covers]",
        "Look behind {y} and you find {x}.", "Do you see {x} there, hiding behind {y}?",
        "{y} is standing in front of {x}; which pixels are still {x}?",
    ),
}  # fmt: skip

AMODAL: Families = {
    "purpose": (
        "I want to [paste|move|drag|copy] {x} [somewhere else|into another picture|onto a blank page] [without "
        "holes|with nothing missing|in one piece].",
        "For a [jigsaw|stencil|cut-out|sticker|template|pattern] I need {x} with no piece missing.",
        "I am [animating|redrawing|layering] the scene, so {x} must be there even where {y} lies on top now.",
        "To [weigh|pack|ship|wrap|store] {x}, I must know how big {they} really {is}.",
        "How much [room|space] {does} {x} take up in reality?",
        "A robot arm has to [lift|grip|avoid] {x}, so mark also what it cannot see of {it}.",
        "We will [print|carve|cast|knit|build] {x}, so the mask must have every part.",
        "Which region must be [painted|inpainted|filled in] to [have|get] {x} back?",
        "the layer of {x}, with the layers above switched off",
        "Draw {x} first; the other things go on top of {it} later.",
        "For [the insurance|the museum|a catalogue|a floor plan] I need the real size of {x}.",
        "If I order a cover for {x}, which shape must it have?", "{x} as a closed shape, ready to be moved about",
        "I'm making {x} a layer of {its} own, so nothing may be missing when {y} moves.",
        "When {y} moves on in the next frame, {x} must not have a hole.",
        "I want to lay {x} out flat, every part of {it}.",
    ),
    "restore": (
        "Give {x} back [what|the part that|the piece that] {y} [took|hides|covers|took away].",
        "Put the missing [piece|corner|part|half|end] of {x} back.", "Restore {x} where {y} crosses {it}.",
        "[Repair|Mend|Heal] {x} where {y} [cuts|crosses|covers] {it}.", "Make {x} [whole|one piece] again.",
        "[Close|Bridge|Fill|Mend|Patch] the [gap|hole|break|notch] that {y} [makes|leaves|tears] in {x}.",
        "[Close|Bridge|Fill|Mend] the [gap|hole|break] in {x}.", "Undo the [overlap|occlusion] and show {x}.",
        "Connect the [two ends|pieces|parts] of {x} [behind|on either side of] {y}.",
        "Join {x} up again where {y} [splits|cuts|divides] {it}.", "Reunite the parts of {x} on both sides of {y}.",
        "[Trace|Follow|Continue] {x} [behind|beneath|under] {y} [to the other side|until the line closes|and out "
        "again].", "Let the [outline|line|edge] of {x} [run|carry|go] on [behind|under|beneath] {y}.",
        "[Close|Finish] the outline of {x} behind {y}.", "Pull {x} out from [behind|under] {y} and outline {it}.",
        "We see only [half|a part|the top|one end] of {x}; [infer|add|guess|imagine] the rest.",
        "Reconstruct {x} from the part you [see|have|can see].", "{x}, extrapolated", "Extrapolate {x}.",
        "Use what you know of such things to [fill in|add] the missing [half|part] of {x}.",
        "your best [guess|estimate] of {x} where {y} is in the way", "a reconstruction of {x}", "{x}, rebuilt",
        "Work out how {x} go{es} on.", "the missing part of {x} and the rest of {it}",
    ),
    "disregard": (
        "{x}, [regardless of|irrespective of|never mind|disregarding|notwithstanding] [what is in front|what lies "
        "on top|the things in the way|the clutter|{y}]",
        "Never mind [{y}|what is in the way|the others]; [mark|outline|trace] {x}.",
        "Never mind {y}, where {is} {x}?",
        "[Ignore|Disregard|Forget|Overlook] [whatever|all that|everything that|anything that] [is in front "
        "of|overlaps|stands before|lies on|gets in the way of] {x}.",
        "[Ignore|Disregard|Forget|Overlook] {y} and [mark|outline|trace] {x}.",
        "{x}, whether or not something is in front", "{x}, something in front or not",
        "What stands before {x} does not matter.", "{x}, obstacles or no obstacles",
        "Let [nothing|no other object|nobody] [cut into|bite into|eat into|take anything from|shorten|interrupt] "
        "{x}.", "[Nothing|No object|Nobody] may [cut into|bite into|shorten|interrupt|split] {x}.",
        "Don't let {y} [split|cut|divide|interrupt|shorten|break up] {x}.",
        "{x}, with or without {y}, it makes no difference",
        "The mask of {x} [should not|must not|shouldn't|doesn't] end where {y} begins.",
        "no [holes|gaps|notches|breaks|bites] in {x}, please", "{x}, [no holes|without holes|free of gaps|hole-free]",
        "{x} no matter [what|who] is in front", "{y} shall not take anything away from {x}.",
    ),
    "a part will not do": (
        "[A fragment|A piece|Half|A part|A partial mask] of {x} [is of no use|is useless to me|is no good|does not "
        "help me|isn't enough|won't do].",
        "I [cannot|can't] [work with|use|do anything with|live with] [a fragment|half|a piece|a part] of {x}.",
        "A modal mask [will not do|won't do|is not enough|is useless] for {x}.",
        "What good is half of {x}? Mark {it} all.",
        "There is more of {x} than [the picture|the photo|the camera|this view] [reveals|lets on|tells]; [mark "
        "everything|include the rest].",
        "[Don't|Do not] stop at [what you see|the part in view|the edge of {y}] when you mark {x}.",
        "The part in view is only [half|a piece] of {x}; [I want the rest|add the rest] too.",
        "{x}, and [don't forget|do not forget|remember] [the half|the part|the bit|the rest] [behind {y}|under "
        "{y}|that you cannot see]", "{x}, [the lot|everything of {it}], [in view or not|seen or unseen]",
        "{x} with nothing lost to {y}",
        "{x} [from top to bottom|from head to toe|from side to side|from corner to corner|from front to back|from "
        "tip to tip]", "{x}, all [corners|edges|sides|ends] of {it}",
        "{x}, with every [corner|end|edge|limb|side], wherever it may be",
        "The part of {x} that you don't see counts as much as the part you see.", "I won't accept half of {x}.",
    ),
    "thought experiment": (
        "{x} [after|once] {y} has [left|gone|moved|been removed|been put away|been cleared away|been lifted "
        "off|been taken off]", "{x} as {they} {was} before {y} [came|arrived|got in the way|was put there]",
        "Suppose [I|we|someone|you] [lift|take|push|pull|move] {y} away; [mark|outline] {x} then.",
        "Suppose {y} [moves|leaves|falls over|goes home]: [which pixels are {x}|where {is} {x}] then?",
        "If {y} were [somewhere else|not in the picture|further left|made of air], [where would {x} be|what would "
        "you mark for {x}]?", "Had {y} not been [there|put there|in the way], what would [we see|you mark] of {x}?",
        "What if {y} [moved|went away|vanished]? Mark {x} for that case.", "Somebody takes {y}. Now mark {x}.",
        "Take {y} away in your [mind|head|imagination] and [mark|outline|trace] {x}.",
        "{y} [steps aside|is lifted off|leaves|moves on]: [mark|outline] {x} now.",
        "{x} as [the maker made {it}|nature made {it}|a friend behind {y} would see {it}]",
        "[Look|Peer|See] [past|behind|around|through] {y} and [mark|trace|outline] {x}.",
        "Treat {y} as [glass|air|transparent|invisible|clear]: [mark|outline] {x}.",
        "{y} is [glass|see-through|transparent|air] now; trace {x}.", "{x} on a day without {y}",
        "{x} as you remember {it} without {y}", "Close your eyes, think of {x} without {y}, and draw that.",
        "I know what {x} look{s} like without {y}. Do you? Mark that.",
    ),
    "true size": (
        "Where {does} {x} really [end|begin|stop|start]?", "Where {does} {x} end, [under|behind|beyond] {y}?",
        "How far {does} {x} [reach|go|extend|stretch] [behind|under|beneath] {y}?",
        "How [long|wide|tall|big|large] {is} {x} really?",
        "I want to measure {x} from [end to end|tip to tip|one side to the other].",
        "the [real|true|actual|total] [size|area|dimensions|measurements|footprint|length|extent] of {x}",
        "the [space|room|area|surface] that {x} take{s} up, never mind what is on {it}",
        "the shape of {x} as [an engineer|a designer|a carpenter|an expert] knows it",
        "{x} with {its} far end, wherever that is", "{x} as the blueprint has {it}",
    ),
}  # fmt: skip

PAIRS: tuple[tuple[str, str], ...] = (
    ("Let {y} [split|cut|interrupt|shorten] {x}.", "Don't let {y} [split|cut|interrupt|shorten] {x}."),
    (
        "[A fragment|Half|A piece] of {x} [will do|is of use to me].",
        "[A fragment|Half|A piece] of {x} [will not do|is of no use to me].",
    ),
    ("I can [work with|use] a [fragment|piece] of {x}.", "I can't [work with|use] a [fragment|piece] of {x}."),
    ("Don't [close|bridge|fill|mend] the gap in {x}.", "[Close|Bridge|Fill|Mend] the gap in {x}."),
    (
        "Do not [ignore|disregard|forget|overlook] what is in front of {x}.",
        "[Ignore|Disregard|Forget|Overlook] what is in front of {x}.",
    ),
    ("Don't [look|peer|see] [past|through] {y}; mark {x}.", "[Look|Peer|See] [past|through] {y}; mark {x}."),
    ("{y} stays; mark {x}.", "{y} goes; mark {x}."),
    ("{x} with {y} there", "{x} without {y} there"),
    ("You may stop at the edge of {y} when you mark {x}.", "You may not stop at the edge of {y} when you mark {x}."),
    ("A modal mask will do for {x}.", "A modal mask won't do for {x}."),
    ("{x}, holes allowed", "{x}, no holes allowed"),
    ("The missing part of {x} should stay missing.", "The missing part of {x} should come back."),
    ("Don't put the missing piece of {x} back.", "Put the missing piece of {x} back."),
    ("{x} except where {y} covers {it}", "{x} even where {y} covers {it}"),
    ("{x}, not counting the half behind {y}", "{x}, not forgetting the half behind {y}"),
    ("Mind what is in front of {x}.", "Never mind what is in front of {x}."),
    ("Respect {y} when you mark {x}.", "Disregard {y} when you mark {x}."),
    ("{x}; if you can't see it, leave it out", "{x}; if you can't see it, guess it"),
    ("Don't imagine {y} gone; mark {x}.", "Imagine {y} gone; mark {x}."),
    ("I want to know how much of {x} shows.", "I want to know how much of {x} there is."),
    (
        "[Under no circumstances|On no account|By no means|In no case] [include|mark|add|count] the <hidden> "
        "[side|half|part|end] of {x}.",
        "[Under no circumstances|On no account|By no means|In no case] [leave out|drop|skip|forget] the <hidden> "
        "[side|half|part|end] of {x}.",
    ),
    ("We have the amodal mask of {x}; now the other kind.", "We have the modal mask of {x}; now the other kind."),
    ("{x} by what the camera got, not by physical outline", "{x} by physical outline, not by what the camera got"),
    ("{x} as an image, not as a thing", "{x} as a thing, not as an image"),
    ("{y} makes a difference to the mask of {x}.", "{y} makes no difference to the mask of {x}."),
    ("{x}, as cut by {y}", "{x}, as if never cut by {y}"),
    ("{x}, dented by {y}", "{x}, not dented by {y}"),
    ("Stop {x} wherever {y} crosses {it}.", "Do not stop {x} wherever {y} crosses {it}."),
    (
        "It is enough to draw what [I|you|we] can make out of {x}.",
        "It is not enough to draw what [I|you|we] can make out of {x}.",
    ),
    ("Do not draw as far as {x} must reach behind {y}.", "Draw as far as {x} must reach behind {y}."),
    ("The rest of {x} does not matter.", "The rest of {x} matters too."),
)  # fmt: skip
