"""Template queries, and the class names that they and the cleaning of answers go by."""

import json
import re

import numpy as np
import pytest
from test_query_generation import BOX, CROWD, MODAL_ONLY, MUG, block, records, save

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.synthetic.photos import absent_names
from r2sm_jax.synthetic.queries.nouns import display_name, same_class, says_name
from r2sm_jax.synthetic.scenes.scene import describe_objects
from r2sm_jax.tools.queries import find_background, template

# Class names


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("coffee_mug_075", "coffee mug"),
        ("075", "075"),
        ("a_1_2", "a"),
        ("7_up", "7 up"),
        ("Potted plant", "Potted plant"),
    ],
)
def test_display_names(name, shown):
    assert display_name(name) == shown and same_class(shown, name) and same_class(name, name)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("knife", "two KNIVES", True),
        ("berry", "some berries", True),
        ("bench", "the benches", True),
        ("person", "the people", True),
        ("teddy bear", "a teddybear's ear", True),
        ("t-shirt", "a T shirt", True),
        ("car", "a carpet", False),
        ("potted plant", "a plant", False),
        ("???", "what???", False),
        ("tie", "untied", False),
    ],
)
def test_class_names_in_a_text(name, text, says):
    assert says_name(text, name) is says


def test_a_class_of_which_a_present_one_may_be_is_not_absent():
    names = ["lamp", "Lamps", "cup", "coffee cup", "dog"]
    assert absent_names(names, {"lamps"}) == ["cup", "coffee cup", "dog"]
    assert absent_names(names, {"Coffee Cup", "lamp"}) == ["dog"]
    assert absent_names(names, {"cup"}) == ["lamp", "Lamps", "dog"]


# Template queries


def test_template_queries(tmp_path, capsys):
    path = save(tmp_path, records((1, 2)))
    template(path, tmp_path / "out.json", queries=6)
    assert "12 queries more" in capsys.readouterr().out
    dataset = read_json(tmp_path / "out.json")
    assert [query.id for sample in dataset for query in sample.queries] == list(range(7, 20))
    for sample in dataset:
        by_id = {instance.id: instance for instance in sample.instances}
        new = [query for query in sample.queries if query.id > 7]
        assert {query.mask_type for query in new} == {"modal", "amodal"}
        targets = [(query.mask_type, by_id[i]) for query in new for i in query.instance_ids]
        assert not any(target.ignore for _, target in targets)
        assert all(
            target.amodal is not None for mask_type, target in targets if mask_type == "amodal"
        )
        assert not any(re.search(r"_|075|nan", query.text) for query in new)
        assert any("coffee mug" in query.text for query in new)
    again = tmp_path / "again.json"
    template(path, again, queries=6)
    assert again.read_bytes() == (tmp_path / "out.json").read_bytes()
    template(path, again, queries=6, seed=1, overwrite=True)
    assert again.read_bytes() != (tmp_path / "out.json").read_bytes()


def test_template_asks_for_more_where_amodal_masks_are_not_known(tmp_path):
    template(save(tmp_path, records(only=[MODAL_ONLY])), tmp_path / "out.json", queries=5)
    new = json.loads((tmp_path / "out.json").read_text())["queries"][1:]
    assert len(new) == 5 and {query["mask_type"] for query in new} == {"modal"}


def test_template_on_an_image_without_anything_to_ask_for(tmp_path, capsys):
    template(save(tmp_path, records(only=[CROWD])), tmp_path / "out.json")
    out = capsys.readouterr().out
    assert "0 queries more" in out and "1 of 1 images got none" in out


def test_an_ignored_one_of_the_same_class_makes_a_name_doubtful(tmp_path):
    content = records(only=[MUG, CROWD])
    content["annotations"][1]["category_id"] = 1
    template(save(tmp_path, content), tmp_path / "out.json", queries=4)
    new = json.loads((tmp_path / "out.json").read_text())["queries"][1:]
    alone = r"\bthe coffee mug\b(?! (?:at|on|furthest|highest|lowest|in|with|that))"
    assert not any(re.search(alone, query["text"]) for query in new)
    assert all(query["instance_ids"] == [MUG] for query in new)


def test_stuff_is_asked_for_only_where_there_is_nothing_else(tmp_path):
    content = records()
    content["annotations"][0]["isStuff"] = 1
    assert [facts.id for facts in objects_of(content, 1, tmp_path)] == [BOX, MODAL_ONLY]
    template(save(tmp_path, content), tmp_path / "out.json")
    new = json.loads((tmp_path / "out.json").read_text())["queries"][1:]
    assert len(new) == 8 and not any(MUG in query["instance_ids"] for query in new)
    content["annotations"] = [a for a in content["annotations"] if a["id"] in (MUG, CROWD)]
    assert [facts.id for facts in objects_of(content, 1, tmp_path)] == [MUG]


def test_a_query_that_the_file_has_is_not_added_again(tmp_path, capsys):
    path = save(tmp_path, records((1, 2)))
    first, second, third = (tmp_path / f"{number}.json" for number in (1, 2, 3))
    template(path, first, queries=6)
    template(first, second, queries=6)
    assert ": 0 queries more" in capsys.readouterr().out
    assert json.loads(second.read_text()) == json.loads(first.read_text())

    template(second, third, queries=6, seed=1)
    queries = json.loads(third.read_text())["queries"]
    asked = [(q["image_id"], q["text"], tuple(sorted(q["instance_ids"]))) for q in queries]
    assert len(set(asked)) == len(asked) > 13


def objects_of(content, image_id, folder):
    """What queries can ask for: the facts that the grammar gets about the objects of an image,
    without background."""
    (folder / "objects.json").write_text(json.dumps(content))
    dataset = read_json(folder / "objects.json", need_images=False)
    truth = dataset.truth_at(dataset.image_ids.index(image_id))
    instances = [instance.map_masks(masks.expand) for instance in truth.instances]
    background = find_background(truth)
    return [facts for facts in describe_objects(instances) if facts.id not in background]


def test_objects_know_what_hides_them(tmp_path):
    content = records(images=(1, 2))
    mug, box, lamp = objects_of(content, 2, tmp_path)
    assert (mug.id, mug.category, mug.occlusion, mug.hidden_by) == (MUG + 10, "coffee mug", 0, ())
    assert (box.box, box.visible_box, box.area) == ((20, 12, 50, 28), (30, 12, 50, 28), 480)
    assert (box.occlusion, box.hidden_by) == (pytest.approx(1 / 3), (MUG + 10,))
    assert np.isnan(lamp.occlusion) and lamp.hidden_by == ()
    wholly_hidden = content["annotations"][0] | {
        "id": 99,
        "image_id": 2,
        "visible_mask": masks.encode(block(0, 0, 0, 0)),
    }
    content["annotations"].append(wholly_hidden)
    assert 99 not in [facts.id for facts in objects_of(content, 2, tmp_path)]
