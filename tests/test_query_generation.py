"""Queries by a language model: requests, tolerant reading of answers, strict filters."""

import base64
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main
from r2sm_jax.data.dataset import read_json
from r2sm_jax.data.masks import MOST_PARTS, MOST_POINTS, outline
from r2sm_jax.synthetic.queries.nouns import same_class, says_name
from r2sm_jax.tools.queries import parse, read_answer, requests, system_prompt

HEIGHT, WIDTH = 40, 60
MUG, BOX, CROWD, MODAL_ONLY = 11, 12, 13, 14


def block(x0, y0, x1, y1):
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def records(images=(1,), only=None):
    """A mug in front of a box, a region to ignore, and a lamp of which only the visible mask is
    known.

    Ids of later images' annotations are ten higher; `only` keeps some annotations.
    """
    front, back = block(10, 10, 30, 30), block(20, 12, 50, 28)
    visible = {BOX: back & ~front, MODAL_ONLY: block(2, 2, 6, 20)}
    complete = {MUG: front, BOX: back, CROWD: block(0, 35, 60, 40), MODAL_ONLY: None}
    annotations = []
    for n, image_id in enumerate(images):
        for category, (number, mask) in enumerate(complete.items(), start=1):
            if only is not None and number not in only:
                continue
            annotation = {"id": number + 10 * n, "image_id": image_id, "category_id": category}
            annotation["segmentation"] = None if mask is None else masks.encode(mask)
            if number in visible:
                annotation["visible_mask"] = masks.encode(visible[number])
            if number == CROWD:
                annotation["ignore"] = True
            annotations.append(annotation)
    names = ["coffee_mug_075", "cardboard box", "person", "floor_lamp"]
    old = {"id": 7, "image_id": images[0], "text": "the old query", "mask_type": "modal"}
    size = {"height": HEIGHT, "width": WIDTH}
    return {
        "images": [{"id": i, "file_name": f"{i}.png", **size} for i in images],
        "annotations": annotations,
        "categories": [{"id": i, "name": name} for i, name in enumerate(names, start=1)],
        "queries": [old | {"instance_ids": []}],
    }


def save(folder, content=None):
    """Writes a dataset file, by default `records()`, with its images."""
    content = content or records()
    (folder / "data.json").write_text(json.dumps(content))
    for image in content["images"]:
        Image.new("RGB", (WIDTH, HEIGHT), "teal").save(folder / image["file_name"])
    return folder / "data.json"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def offered(request):
    """The rows of the list in a request."""
    text = request["body"]["messages"][1]["content"][0]["text"]
    return [json.loads(row) for row in re.findall(r"^\{.*\}$", text, re.M)]


def answer(path, *texts, custom_id="img1-modal"):
    path.write_text(
        "".join(json.dumps({"custom_id": custom_id, "text": text}) + "\n" for text in texts)
    )
    return path


def qa(question="What warms cold hands?", number=MUG, name="coffee_mug_075"):
    return f"<Q>{question}</Q><A>instance id is [{number}], class name is [{name}]</A>"


def parsed(tmp_path, *texts, custom_id="img1-modal"):
    """The new queries of a run over some answers, and the reasons for what was left out."""
    answers = answer(tmp_path / "answers.jsonl", *texts, custom_id=custom_id)
    out, rejected = tmp_path / "out.json", tmp_path / "rejected.jsonl"
    parse(save(tmp_path), (answers,), out, rejected, overwrite=True)
    return json.loads(out.read_text())["queries"][1:], [row["reason"] for row in lines(rejected)]


# Requests


def test_requests_list_the_objects(tmp_path, capsys):
    requests(save(tmp_path), tmp_path / "r.jsonl", model="some-model", queries=3)
    assert "2 requests (1 modal, 1 amodal)" in capsys.readouterr().out
    modal, amodal = lines(tmp_path / "r.jsonl")
    assert (modal["custom_id"], amodal["custom_id"]) == ("img1-modal", "img1-amodal")
    assert modal["method"] == "POST" and modal["url"] == "/v1/chat/completions"
    assert modal["body"]["model"] == "some-model"
    for request, mask_type in ((modal, "modal"), (amodal, "amodal")):
        system = {"role": "system", "content": system_prompt(mask_type, 3)}
        assert request["body"]["messages"][0] == system
    image = {"type": "image_url", "image_url": {"url": "1.png"}}
    assert modal["body"]["messages"][1]["content"][1] == image
    is_occluded = {row["id"]: row["is_occluded"] for row in offered(modal)}
    assert is_occluded == {MUG: False, BOX: True, MODAL_ONLY: None}
    assert [row["id"] for row in offered(amodal)] == [MUG, BOX]
    assert [row["box"] for row in offered(amodal)] == [[10, 10, 20, 20], [20, 12, 30, 16]]
    assert offered(modal)[1]["box"] == [30, 12, 20, 16]
    assert offered(modal)[0]["class_name"] == "coffee_mug_075"
    ring = np.array(offered(amodal)[1]["polygon"][0]).reshape(-1, 2)
    assert (ring.min(0).tolist(), ring.max(0).tolist()) == ([20, 12], [50, 28])


def test_requests_and_answers_leave_stuff_out_as_the_template_does(tmp_path):
    content = records()
    content["annotations"][0]["isStuff"] = 1
    path = save(tmp_path, content)
    requests(path, tmp_path / "r.jsonl")
    rows = [[row["id"] for row in offered(request)] for request in lines(tmp_path / "r.jsonl")]
    assert rows == [[BOX, MODAL_ONLY], [BOX]]
    answers = answer(tmp_path / "answers.jsonl", qa())
    parse(path, (answers,), tmp_path / "out.json", tmp_path / "rejected.jsonl")
    assert [row["reason"] for row in lines(tmp_path / "rejected.jsonl")] == ["wrong instance"]


def test_prompts_say_how_many_and_what_type():
    modal, amodal = system_prompt("modal", 4), system_prompt("amodal", 4)
    assert "exactly 4" in modal and "exactly 4" in amodal
    assert "`is_occluded` true" in amodal and "`is_occluded` true" not in modal
    names = {41: "umbrella", 42: "bench", 47: "bicycle"}
    for prompt in (modal, amodal):
        example = read_answer(prompt.partition("could be written:")[2])
        assert len(example) == 3
        for written in example:
            for number, name in written.instances:
                assert names[number] == name and not says_name(written.question, name)


def test_an_embedded_image_is_the_image(tmp_path):
    path = save(tmp_path)
    requests(path, tmp_path / "r.jsonl", image="embed")
    request = lines(tmp_path / "r.jsonl")[0]
    assert "model" not in request["body"]
    kind, _, data = request["body"]["messages"][1]["content"][1]["image_url"]["url"].partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (WIDTH, HEIGHT)


def test_images_with_nothing_to_ask_for_get_no_request(tmp_path):
    requests(save(tmp_path, records((1, 2), [MODAL_ONLY, CROWD])), tmp_path / "r.jsonl")
    ids = [request["custom_id"] for request in lines(tmp_path / "r.jsonl")]
    assert ids == ["img1-modal", "img2-modal"]


def test_outlines_are_short_and_close():
    rows, columns = np.mgrid[:200, :300]
    disc = (rows - 90) ** 2 + (columns - 140) ** 2 < 80**2
    hole = (rows - 90) ** 2 + (columns - 140) ** 2 < 30**2
    (ring,) = outline(disc & ~hole)  # the hole is left out
    assert 8 <= len(ring) // 2 <= MOST_POINTS
    drawn = masks.from_segmentation([ring], 200, 300)
    assert masks.area(drawn & disc) / masks.area(drawn | disc) > 0.95
    noise = np.random.default_rng(0).random((50, 50)) < 0.4
    assert len(outline(noise)) == MOST_PARTS
    assert outline(np.zeros((5, 5), bool)) == []
    assert outline(block(7, 3, 8, 4)) == [[7, 3, 8, 3, 8, 4, 7, 4]]
    assert len(outline(np.ones((5, 9), bool))[0]) >= 6


# Answers


def test_round_trip(tmp_path, capsys):
    """A model that answers every request becomes queries that the dataset reader takes."""
    path = save(tmp_path, records((1, 2)))
    requests(path, tmp_path / "r.jsonl")
    answers = []
    for request in lines(tmp_path / "r.jsonl"):
        rows = offered(request)
        texts = []
        for letter, row in zip("abcdef", rows, strict=False):
            texts.append(qa(f"Thing {letter}?", row["id"], row["class_name"]))
        both = [f"instance id is [{r['id']}], class name is [{r['class_name']}]" for r in rows]
        texts.append(f"<Q>Everything here?</Q><A>{'; '.join(both)}</A>")
        message = {"role": "assistant", "content": "\n".join(texts)}
        response = {"status_code": 200, "body": {"choices": [{"message": message}]}}
        answers.append(json.dumps({"custom_id": request["custom_id"], "response": response}))
    (tmp_path / "a.jsonl").write_text("\n".join(reversed(answers)))

    parse(path, (tmp_path / "a.jsonl",), tmp_path / "out.json")
    assert "8 modal and 6 amodal queries more" in capsys.readouterr().out
    samples = list(read_json(tmp_path / "out.json"))
    queries = [query for sample in samples for query in sample.queries]
    assert sorted(query.id for query in queries) == list(range(7, 22))
    for sample in samples:
        multi = [query for query in sample.queries if query.kind.get("multi")]
        counts = {query.mask_type: len(query.instance_ids) for query in multi}
        assert counts == {"modal": 3, "amodal": 2}
        assert multi[0].kind["source"] == "llm" and multi[0].kind["task"] == "reasoning"
        assert multi[0].kind["answer"].startswith("instance id is [")
    parse(tmp_path / "out.json", (tmp_path / "a.jsonl",), tmp_path / "again.json")
    assert "0 modal and 0 amodal queries more" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "<Q>Warm hands?</Q><A>instance id is [3], class name is [red mug]</A>",
        "<q>Warm hands?</q> <a>Instance ID is 3, Class Name is red mug.</a>",
        "<Q>Warm hands?<A>instance id is [3], class name is [red mug]",
        "<Q>Warm hands?</Q><A>instance id is (3), label name is Red_Mug;",
        "Sure!\n<Q> Warm hands? </Q>\n<A> instance id is #3, class name is **red mug** </A>\nBye.",
        '<Q>Warm hands?</Q><A>The answer: instance id is "3", class name is "red mug"</A>',
        "< Q1 >Warm hands?< /Q1 ><A1>instance_id: [3], class_name: [red mug] (it is red)</A1>",
        "<Q>Warm hands?</Q><A>instance id is [3], and the class name is [red mug]<A>",
    ],
)
def test_lenient_reading(text):
    (written,) = read_answer(text)
    assert written.question == "Warm hands?"
    ((number, name),) = written.instances
    assert number == 3 and same_class(name, "red_mug_05")


def test_every_question_is_read_for_itself():
    one, two, three = read_answer(
        "<Q>One?<A>instance id is [3], class name is mug. <Q>Two?</Q><A>instance id is 3, class "
        "name is mug; instance id is 4, label name is [salt and pepper];\n<Q>Three?</Q>"
    )
    assert (one.question, one.instances) == ("One?", ((3, "mug"),))
    assert (two.question, two.instances) == ("Two?", ((3, "mug"), (4, "salt and pepper")))
    assert three.instances == () == read_answer("I cannot help.")[0].instances


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("unreadable", "I cannot do that."),
        ("unreadable", "<Q>What warms cold hands?</Q><A>the mug</A>"),
        ("unreadable", "<Q></Q><A>instance id is [11], class name is [coffee_mug_075]</A>"),
        ("unreadable", "<Q>Both?</Q><A>instance id is [11]; " + qa()[len("<Q>") :]),
        ("wrong instance", qa(number=99)),
        ("wrong instance", qa(number=CROWD, name="person")),
        ("wrong instance", qa(name="cardboard box")),
        ("gives away", qa("Which Coffee-Mugs are warm?")),
        ("gives away", qa("What is at (10, 20)?")),
        ("gives away", qa("What is in [10, 10, 20, 20]?")),
        ("gives away", qa("What is at x=10?")),
        ("gives away", qa("What is in the bounding box?")),
        ("near-duplicate", qa() + qa("What would warm the cold hands?")),
    ],
)
def test_every_reason_to_leave_a_query_out(tmp_path, capsys, reason, text):
    # A line that is always good: answers that hold no question are refused.
    cup = qa("What would I sip a hot drink from?")
    queries, reasons = parsed(tmp_path, cup, text)
    assert reasons == [reason] and len(queries) == max(1, text.count("<Q>"))
    assert re.search(rf"{reason}\W+1\W", capsys.readouterr().out)


@pytest.mark.parametrize("thoughts", ["<think>{}</think>", "{}</think>", "<THINK>\n{}\n</THINK>"])
def test_what_a_model_thinks_is_no_answer(tmp_path, thoughts):
    text = thoughts.format(qa("Which thing is red?")) + qa("What would I sip a hot drink from?")
    queries, reasons = parsed(tmp_path, text)
    assert [query["text"] for query in queries] == ["What would I sip a hot drink from?"]
    assert reasons == []


def test_amodal_queries_need_a_known_amodal_mask(tmp_path):
    lamp = qa("What lights the room?", MODAL_ONLY, "floor lamp")
    assert parsed(tmp_path, lamp, custom_id="img1-modal")[0][0]["instance_ids"] == [MODAL_ONLY]
    assert parsed(tmp_path, lamp, custom_id="img1-amodal") == ([], ["wrong instance"])


def test_good_queries_are_kept(tmp_path):
    texts = [
        qa("What would I sip a hot drink from?"),
        qa("Which thing on the left holds 2,500 ml of juice?"),
        qa("What could be used for muggy days?"),
        "<Q>Both of them?</Q><A>instance id is [12], class name is [cardboard box]; "
        "instance id is [11], class name is [coffee mug]</A>",
    ]
    queries, reasons = parsed(tmp_path, *texts)
    assert reasons == [] and [query["id"] for query in queries] == [8, 9, 10, 11]
    assert queries[-1] == {
        "id": 11,
        "image_id": 1,
        "text": "Both of them?",
        "mask_type": "modal",
        "instance_ids": [BOX, MUG],
        "kind": {"task": "reasoning", "multi": True, "source": "llm"},
        "answer": texts[-1].split("<A>")[1][:-4],
    }


def test_bad_lines_stop_nothing(tmp_path):
    good = json.dumps({"custom_id": "img1-amodal", "text": [{"text": qa("Half here?")}]})
    failed = json.dumps({"custom_id": "img1-modal", "response": None, "error": "too long"})
    bad = ["{", "[1]", '{"custom_id": "img5-modal", "text": "x"}', failed]
    (tmp_path / "a.jsonl").write_text("\n".join([*bad, good]))
    rejected = tmp_path / "deep" / "rejected.jsonl"
    parse(save(tmp_path), (tmp_path / "a.jsonl",), tmp_path / "out.json", rejected)
    assert [row["reason"] for row in lines(rejected)] == ["unreadable"] * 4
    assert "too long" in lines(rejected)[3]["answer"]
    new = json.loads((tmp_path / "out.json").read_text())["queries"][1]
    assert new["text"] == "Half here?" and new["mask_type"] == "amodal"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("requests data.json --out mine.json", "--overwrite"),
        ("requests broken.json --out x.jsonl", "annotation 11: its segmentation"),
        ("requests data.json --out x.jsonl --image embed --images empty", "--images DIR"),
        ("parse data.json gone.jsonl --out x.json", "gone.jsonl"),
        ("parse data.json idle.jsonl --out x.json", "no line holds a question"),
        ("parse data.json a.jsonl --out mine.json", "--overwrite"),
        ("template data.json --out x.json --queries 0", "--queries"),
        ("template data.json --out mine.json", "--overwrite"),
    ],
)
def test_refusals(line, word, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path)
    answer(tmp_path / "a.jsonl", qa())
    answer(tmp_path / "idle.jsonl", "I cannot.")
    (tmp_path / "mine.json").write_text("mine")
    (tmp_path / "empty").mkdir()
    broken = records()
    broken["annotations"][0]["segmentation"]["counts"] = "0"
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    assert word in refused(main, "queries", *line.split())
    assert not (tmp_path / "x.json").exists() and not (tmp_path / "x.jsonl").exists()
    assert (tmp_path / "mine.json").read_text() == "mine"


PIECES = ["<Q>", "</Q>", "<A>", "</A>", "instance id is ", "[3]", ", class name is ", "mug", "; "]


@settings(max_examples=150, deadline=None)
@given(st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=4)).map("".join))
def test_reading_never_fails(text):
    for one in read_answer(text):
        assert all(isinstance(number, int) and name for number, name in one.instances)
        assert one.question or not one.instances
