"""A new picture at every visit, worker processes, and averaged weights."""

import json
import multiprocessing
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from made_pictures import digest, write_photos
from test_batches import same, states
from test_train import arrays, assert_bit_identical, at_step, losses

import r2sm_jax.train as train_module
from r2sm_jax.config import Config, DataConfig, LoopConfig, check_config
from r2sm_jax.data.batches import ExampleBuilder, TokenIds, training_batches
from r2sm_jax.data.dataset import Dataset
from r2sm_jax.data.prepare import PreparedSource
from r2sm_jax.data.shared_records import SharedRecords
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.inference.run import restore_weights
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.sources import open_source
from r2sm_jax.training.checkpoints import Checkpoints, flatten
from r2sm_jax.training.step import update_average

SIZE = 48


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", 30)


def batches(source: PreparedSource, text_states=states, **options):
    builder = ExampleBuilder(text_states, 12, queries=3, instances=4, slots=2, mirror=True)
    return training_batches(source, builder, batch_size=2, seed=0, **options)


# New pictures.


def test_a_visit_makes_the_pictures_of_a_larger_source(file):
    few = ComposeSource(file, "train", None, size=SIZE)
    count = len(few)
    assert count == len(few.photo_indices)
    more = ComposeSource(file, "train", 3 * count, size=SIZE)
    for index, visit in ((0, 0), (3, 1), (count - 1, 2)):
        assert digest(few.at_visit(index, visit)) == digest(more[visit * count + index])
    assert digest(few.at_visit(3, 0)) == digest(few[3]) != digest(few.at_visit(3, 1))

    scenes = open_source("scenes", "train", count=4, size=SIZE)
    assert digest(scenes.at_visit(1, 2)) == digest(
        open_source("scenes", "train", count=12, size=SIZE)[9]
    )


def test_no_picture_comes_twice_and_resuming_is_exact():
    source = PreparedSource(open_source("scenes", "train", count=4, size=32), 32, 16, fresh=True)
    assert not source.cache()
    one = batches(source)
    images = [image.tobytes() for _ in range(8) for image in next(one)["image"]]
    assert len(set(images)) == len(images) == 16

    one = batches(source)
    for _ in range(3):
        next(one)
    state = one.get_state()
    rest = [next(one) for _ in range(3)]
    again = batches(source)
    again.set_state(state)
    assert all(same(batch, next(again)) for batch in rest)


def test_worker_processes_make_the_same_batches(file, bert_folder):
    texts = TextStates(str(bert_folder), layers=(1, 2), max_tokens=64)
    token_ids = TokenIds(texts.tokenizer)
    source = PreparedSource(ComposeSource(file, "train", None, size=SIZE), SIZE, 24, fresh=True)
    here = batches(source, token_ids)
    expected = [next(here) for _ in range(5)]
    workers = batches(source, token_ids, workers=2)
    assert workers.get_state() == {"next_index": 0}
    assert all(same(batch, next(workers)) for batch in expected[:3])
    # A run may go on with another number of workers.
    assert workers.get_state() == {"next_index": 3}
    one = batches(source, token_ids, workers=1)
    one.set_state(workers.get_state())
    workers.close()
    assert same(expected[3], next(one))

    for path in (file.parent / "images").iterdir():
        path.rename(path.with_suffix(".gone"))
    try:
        with pytest.raises(InputError, match=r"is not in .*--data\.images"):
            for _ in range(40):
                next(one)
    finally:
        one.close()
        for path in (file.parent / "images").iterdir():
            path.rename(path.with_suffix(".jpg"))


def test_a_worker_process_that_is_killed_is_one_sentence(bert_folder):
    texts = TextStates(str(bert_folder), layers=(1, 2), max_tokens=64)
    source = PreparedSource(open_source("scenes", "train", count=4, size=32), 32, 16, fresh=True)
    others = set(multiprocessing.active_children())
    one = batches(source, TokenIds(texts.tokenizer), workers=1)
    next(one)
    (worker,) = set(multiprocessing.active_children()) - others
    worker.kill()
    with pytest.raises(InputError, match=r"--data\.workers 1: a worker process was killed"):
        for _ in range(20):
            next(one)
    one.close()


def test_token_ids_give_the_states_of_the_sentences(bert_folder):
    texts = TextStates(str(bert_folder), layers=(1, 2), max_tokens=64)
    sentences = ["the red mug", "", "the whole cup that the book hides, please"]
    expected, mask = texts(sentences, 12)
    ids, found_mask = TokenIds(texts.tokenizer)(sentences, 12)
    assert (mask == found_mask).all()
    found = texts.encoder.states_of_ids(texts.weights, jnp.array(ids)[None], "float32")[0]
    np.testing.assert_allclose(
        np.where(mask[..., None, None], found, 0).astype(np.float32),
        expected.astype(np.float32),
        rtol=2e-3,
        atol=2e-3,
    )


def test_images_of_a_file_are_not_fresh(tiny_config, tmp_path):
    data = replace(tiny_config.data, source="json:none.json", fresh=True)
    source = open_source("scenes", "train", count=2, size=SIZE)
    source.is_procedural = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "open_data", lambda *_: source)
        patch.setattr(train_module, "check_teaches", lambda *_: "")
        with pytest.raises(InputError, match=r"--data\.fresh: the images"):
            train_module.prepare_images(replace(tiny_config, data=data), print)


def test_copies_of_a_dataset_read_its_records_from_disk(file):
    source = ComposeSource(file, "train", None, size=SIZE)
    sample = digest(source[3])
    content = pickle.dumps(source)
    assert b"segmentation" not in content and b"segmentation" in file.read_bytes()
    copied = pickle.loads(content)
    assert digest(copied[3]) == digest(source[3]) == sample
    again = pickle.loads(pickle.dumps(copied))
    dataset = source.photos.files[0].dataset
    del source, copied
    assert digest(again[3]) == sample

    part = dataset.subset([5, 2])
    assert [part.truth_at(index).image_id for index in range(2)] == [6, 3]


def test_threads_that_copy_a_dataset_at_once_share_one_file(file):
    dataset = Dataset(file, json.loads(file.read_text()) | {"queries": []})
    truth = dataset.truth_at(4)
    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(lambda _: pickle.dumps(dataset), range(8)))
    assert all(pickle.loads(content).truth_at(4) == truth for content in contents)


def test_shared_records_are_those_of_the_groups():
    groups = {7: [{"id": 1, "text": "a"}], 3: [], 40: [{"id": 2}, {"id": 3}]}
    shared = SharedRecords(groups)
    assert {key: shared[key] for key in groups} == groups
    for missing in (0, 8, 41):
        with pytest.raises(KeyError):
            shared[missing]


# A run.


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
def test_a_run_with_all_of_it_resumes_exactly(tiny_config, tmp_path, monkeypatch):
    data = replace(tiny_config.data, fresh=True)
    loop = replace(tiny_config.train, ema=0.9, steps=3)
    config = replace(tiny_config, data=data, train=loop)
    whole, parts = (replace(config, run=str(tmp_path / name)) for name in ("whole", "parts"))
    train_module.train(whole)
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train_module.train(parts)
    stopped_at = Checkpoints(tmp_path / "parts").steps[-1]
    assert stopped_at < 3
    train_module.train(replace(parts, resume=True))
    assert_bit_identical(tmp_path / "whole", tmp_path / "parts", 3)

    # The average is what is evaluated and exported.
    saved = arrays(tmp_path / "whole", 3)
    used = flatten(restore_weights(tmp_path / "whole", checkpoint="3").params)
    for name, leaf in used.items():
        assert np.array_equal(leaf, saved[f".state.average{name}"])
    assert any(not np.array_equal(leaf, saved[f".state.params{n}"]) for n, leaf in used.items())
    assert all(np.isfinite(values["train/loss"]) for values in losses(tmp_path / "whole").values())


def test_the_average_follows_the_weights():
    params = nnx.State({"w": jnp.array([4.0])})
    average = nnx.State({"w": jnp.array([0.0])})
    # In the first step 1/10 of the old average stays, after 1000 steps 0.9 of it.
    assert update_average(average, params, jnp.array(0), 0.9)["w"][0] == pytest.approx(3.6)
    assert update_average(average, params, jnp.array(1000), 0.9)["w"][0] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (Config(data=DataConfig(workers=-1)), "--data.workers"),
        (Config(train=LoopConfig(ema=1.0)), "--train.ema"),
    ],
)
def test_values_that_cannot_be_are_refused(config, flag):
    with pytest.raises(InputError, match=flag):
        check_config(config)
