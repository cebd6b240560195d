"""Queries for things that could be there and are not."""

from collections import Counter

import numpy as np
import pytest
from made_pictures import write_photos

from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.queries.write import write_absent_queries
from r2sm_jax.synthetic.related import KIND_WEIGHT, MIN_WEIGHT, RelatedNames
from r2sm_jax.synthetic.sources import open_source

PHOTOS = [{"fork", "knife"}, {"fork", "knife", "person"}, {"fork"}, {"dog", "person"}]
RELATED = RelatedNames(PHOTOS, {"fork": "kitchen", "knife": "kitchen", "dog": "animal"})


def test_weights_by_hand():
    """Two of three photos with a fork have a knife, and both are of the kitchen."""
    assert RELATED.weight("knife", {"fork"}) == pytest.approx(2 / 3 + KIND_WEIGHT)
    assert RELATED.weight("person", {"fork"}) == pytest.approx(1 / 3)
    assert RELATED.weight("dog", {"fork"}) == MIN_WEIGHT
    # The best of what is there counts.
    assert RELATED.weight("dog", {"fork", "person"}) == pytest.approx(1 / 2)
    assert RELATED.weights(["dog", "zebra"], {"zebra crossing"}) == [MIN_WEIGHT, MIN_WEIGHT]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"))


def test_hard_absent_asks_for_one_to_three_things_in_training_only(file):
    spec = f"compose:{file}"
    source = open_source(spec, "train", count=24, size=96, hard_absent=True)
    counts = Counter()
    for index in range(24):
        sample = source[index]
        num_absent = sum(not query.instance_ids for query in sample.queries)
        assert len(sample.queries) <= 8
        counts[num_absent] += 1
    assert set(counts) <= {0, 1, 2, 3} and counts[2] and counts[3]

    plain = open_source(spec, "train", count=24, size=96)
    assert plain.fingerprint() != source.fingerprint()
    for split in ("dev", "val_absent"):
        ours, others = (
            open_source(spec, split, count=3, size=96, hard_absent=hard) for hard in (True, False)
        )
        assert ours.fingerprint() == others.fingerprint()
        assert [ours.queries_at(i) for i in range(3)] == [others.queries_at(i) for i in range(3)]


def test_a_heavy_name_is_asked_for_first():
    objects = [ObjectFacts(1, "chair", (0, 0, 9, 9), 81, occlusion=0, hidden_by=())]
    texts = Counter()
    for seed in range(40):
        (query,) = write_absent_queries(
            objects,
            ["dog", "clock"],
            rng=np.random.default_rng(seed),
            count=1,
            weights=[0.9, 0.1],
        )
        texts["clock" in query.text.lower()] += 1
    assert texts[False] > 2 * texts[True]
