"""Which images are asked about, what they are called, and which answers may be resumed; without a model."""

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data.dataset import Sample
from r2sm_jax.errors import InputError
from r2sm_jax.inference.journal import find_tasks, is_mine, read_journal
from r2sm_jax.query import Query
from r2sm_jax.tools.convert import write_json

HEADER = {"weights": "a", "queries": "b"}


@pytest.fixture
def scans(tmp_path) -> Path:
    """Twelve folders, each with an image of the same name, and the data set of them."""
    samples = []
    for number in range(12):
        query = Query(number + 1, "the mug", "modal", ())
        name = f"{number:02}/rgb.png"
        samples.append(Sample(number + 1, name, np.zeros((4, 5, 3), np.uint8), (), (query,)))
        (tmp_path / name).parent.mkdir()
        Image.fromarray(samples[-1].image).save(tmp_path / name)
    write_json(tmp_path / "data.json", to_records(samples))
    return tmp_path


def test_answers_of_products_that_were_rounded_do_not_mix_with_others(tmp_path):
    """Answers with float32 products, which no journal writes down, can be resumed."""
    rounded = HEADER | {"matmul_precision": "bfloat16"}
    for before, now in ((HEADER, rounded), (rounded, HEADER)):
        path = tmp_path / str(len(before))
        assert read_journal(path, before) == read_journal(path, before) == {}
        content = path.read_bytes()
        with pytest.raises(
            InputError, match="these answers are of other matmul precision; pass another --out"
        ):
            read_journal(path, now)
        assert path.read_bytes() == content


def test_images_of_one_name_are_told_apart_and_divided(scans, monkeypatch):
    names = [f"{number:02}/rgb.png" for number in range(12)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for image, query, queries in (
        (scans, None, scans / "data.json"),
        (scans / "*" / "rgb.png", "the mug", None),
    ):
        tasks = find_tasks(str(image), query, queries and str(queries)).images
        assert [task.name for task in tasks] == names
        assert 2 < sum(is_mine(task.name) for task in tasks) < 10
