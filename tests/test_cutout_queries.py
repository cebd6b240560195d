"""What an index tells of cut-outs makes queries that do not name them."""

import json
import re
from collections import Counter

from test_cutouts import fill_folder

from r2sm_jax.synthetic.cutout_folder import label_of
from r2sm_jax.synthetic.cutouts import CutoutSource


def test_tags_and_uses_make_queries_that_do_not_name_the_object(tmp_path):
    fill_folder(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    shapes = {
        "disc": "sun",
        "slab": "meal",
        "hoop": "wedding",
        "bar": "gold",
        "kite": "wind",
        "frame": "window",
    }
    index = [
        {
            "file": name,
            "label": label_of(name).split()[1],
            "tags": [shapes[label_of(name).split()[1]], "disc shaped"],
            "uses": [f"to make a {label_of(name).split()[0]} one"],
        }
        for name in files
    ]
    (tmp_path / "index.json").write_text(json.dumps(index))
    seen = Counter()
    for split in ("train", "val_phrasing"):
        source = CutoutSource(tmp_path, split, 40, size=64)
        for sample in map(source.__getitem__, range(40)):
            meant = {i.id: i.category for i in sample.instances}
            for query in (q for q in sample.queries if q.kind["task"] == "reasoning"):
                names = {meant[i] for i in query.instance_ids}
                words = set(re.findall(r"[a-z]+", query.text.lower()))
                ideas = words & set(shapes.values())
                seen[split, "idea" if ideas else "use"] += 1
                assert not names & words
                if ideas:  # everything of that shape, and nothing else
                    (shape,) = names
                    assert shapes[shape] in ideas
                    assert set(query.instance_ids) == {
                        i for i, name in meant.items() if name == shape
                    }
                elif "disc" in words:  # an idea of all, but not where it names one
                    assert "disc" not in meant.values()
                else:
                    assert "to make a" in query.text.lower()
    assert (
        min(seen[split, kind] for split in ("train", "val_phrasing") for kind in ("idea", "use"))
        > 2
    ), seen


def test_things_that_nothing_is_told_of_get_no_reasoning_queries(tmp_path):
    fill_folder(tmp_path)
    queries = [
        q for i in range(20) for q in CutoutSource(tmp_path, "train", 20, size=64)[i].queries
    ]
    assert len(queries) > 100 and not any(q.kind["task"] == "reasoning" for q in queries)
