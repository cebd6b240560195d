"""What must not change by accident: the training scenes, their queries, sentences about anything,
the first losses."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from made_pictures import digest as digest_of_sample, write_cutouts, write_photos

from r2sm_jax.config import Config
from r2sm_jax.data.sources import open_source
from r2sm_jax.synthetic.queries.sentences import write_text_only_queries
from r2sm_jax.train import train

SCENES = "f1bb79f74f09cbb9"
QUERIES = {
    "train": "24bab8f798d0de60",
    "val": "dc2cb81a21f01c0b",
    "val_phrasing": "5c1eb08311d0c7d6",
    "val_hard": "65f9d48ffe86cc2f",
}
COMPOSED = {
    "train": "7061489130c5ba41",
    "dev": "a18fddb7c8732dfe",
    "val_absent": "dbd92a3b313913e3",
}
CUTOUTS = "bb68d18ebf12f682"
TEXT_ONLY_QUERIES = "2fd82685f4a17e3e"
LOSSES = {
    "loss": [94.91586303710938, 94.08084106445312, 70.49918365478516],
    "modal": [6.181299686431885, 6.197121620178223, 5.967044353485107],
    "amodal": [6.327526092529297, 6.336023807525635, 5.920035362243652],
    "type": [0.7821589708328247, 0.7889713644981384, 0.7261288166046143],
    "instance": [11.61513900756836, 11.659957885742188, 11.309118270874023],
    "slots": [11.736391067504883, 11.994641304016113, 11.951064109802246],
}


def digest(*parts: object) -> str:
    """A hash of arrays and of values with a stable `repr`."""
    total = hashlib.sha256()
    for part in parts:
        content = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        total.update(content + b"\0")
    return total.hexdigest()[:16]


def test_the_first_training_scenes_are_the_same_byte_for_byte():
    source = open_source("scenes", "train", count=200)
    parts: list[object] = []
    for sample in map(source.__getitem__, range(200)):
        parts += [sample.image_id, sample.file_name, sample.image]
        for i in sample.instances:
            parts += [
                i.id,
                i.category,
                sorted(i.attributes.items()),
                np.packbits(i.modal),
                np.packbits(i.amodal),
            ]
    assert digest(*parts) == SCENES


@pytest.mark.parametrize("split", COMPOSED)
def test_the_first_composed_photographs_are_the_same_byte_for_byte(split, tmp_path):
    """With objects of a folder as well, over photos that are made here."""
    path = write_photos(tmp_path / "photos", 30)
    cutouts = write_cutouts(tmp_path / "cutouts")
    source = open_source(f"compose:{path}", split, count=40, seed=1, size=96, cutouts=cutouts)
    assert digest(*(digest_of_sample(source[index]) for index in range(12))) == COMPOSED[split]


def test_the_first_scenes_of_cutouts_are_the_same_byte_for_byte(tmp_path):
    folder = write_cutouts(tmp_path / "cutouts")
    source = open_source(f"cutouts:{folder}", "train", count=40, seed=1, size=96)
    assert digest(*(digest_of_sample(source[index]) for index in range(12))) == CUTOUTS


@pytest.mark.parametrize("split", QUERIES)
def test_the_first_queries_are_the_same(split):
    count = 200 if split == "train" else 50
    source = open_source("scenes", split, count=count)
    queries = [query for index in range(count) for query in source.queries_at(index)]
    actual = [
        (q.id, q.text, q.mask_type, tuple(q.instance_ids), sorted(q.kind.items())) for q in queries
    ]
    assert digest(*actual) == QUERIES[split]


def test_sentences_about_anything_are_the_same():
    sentences = write_text_only_queries(6000, seed=0)
    assert digest(*((s.text, s.mask_type, s.family) for s in sentences)) == TEXT_ONLY_QUERIES


@pytest.mark.usefixtures("steps_alone")
def test_the_first_losses_of_the_default_are_the_same(bert_folder, tmp_path):
    """Muon, two halves a batch, float32 products: the default but for the language model, which is
    tiny."""
    default = Config()
    text = replace(default.model.text, name=str(bert_folder), layers=(1, 2), dim=32)
    config = replace(
        default,
        run=str(tmp_path / "run"),
        model=replace(default.model, text=text),
        data=replace(default.data, scenes=32, text_only_queries=64),
        train=replace(
            default.train,
            steps=3,
            log_every=1,
            evaluate_samples=1,
            report_samples=1,
            matmul_precision="float32",
        ),
    )
    folder = train(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name, expected in LOSSES.items():
        actual = [line[f"train/{name}"] for line in lines if "train/loss" in line]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, err_msg=name)
