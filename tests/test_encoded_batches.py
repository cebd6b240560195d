"""Batches are encoded ahead of their use: which sentences, once, and the same after a resume."""

from pathlib import Path

import grain
import numpy as np
import pytest
from tiny_models import WIDTH

from r2sm_jax.data.batches import ExampleBuilder, TokenIds, training_batches
from r2sm_jax.data.encoded_batches import AHEAD, GROUP, BatchEncoder, encode_ahead
from r2sm_jax.data.prepare import PreparedSource
from r2sm_jax.data.text_states import FrozenTextEncoder, TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.queries.sentences import write_text_only_queries
from r2sm_jax.synthetic.sources import open_source

TOKENS = 24
NUM_TEXT_ONLY = 2000
BATCH_SIZE = 2


@pytest.fixture(scope="module")
def source() -> PreparedSource:
    source = PreparedSource(open_source("scenes", "train", count=12, size=32), 32, 16)
    source.cache()
    return source


@pytest.fixture
def open_texts(bert_folder):
    def open_texts(cache_dir: Path | None = None) -> TextStates:
        folder = None if cache_dir is None else str(cache_dir)
        return TextStates(str(bert_folder), layers=(1, 2), max_tokens=TOKENS, cache_dir=folder)

    return open_texts


def id_batches(source: PreparedSource, texts: TextStates, **options) -> grain.DatasetIterator:
    """Batches with token ids."""
    builder = ExampleBuilder(
        TokenIds(texts.tokenizer, {}),
        TOKENS,
        queries=3,
        instances=4,
        slots=2,
        mirror=True,
        **options,
    )
    return training_batches(source, builder, batch_size=BATCH_SIZE, seed=0)


def encoded(source: PreparedSource, texts: TextStates, *, in_thread: bool = True, **options):
    encoder = BatchEncoder(texts, "float32")
    return encode_ahead(id_batches(source, texts, **options), encoder, in_thread=in_thread)


@pytest.fixture
def num_encoded(monkeypatch) -> list[int]:
    """How many sentences each call encodes."""
    counts: list[int] = []
    encode = FrozenTextEncoder.encode_by_length

    def count(self, token_ids, **options):
        counts.append(len(token_ids))
        return encode(self, token_ids, **options)

    monkeypatch.setattr(FrozenTextEncoder, "encode_by_length", count)
    return counts


def test_the_states_are_those_of_the_sentences(source, open_texts):
    texts = open_texts()
    with_ids, batches = id_batches(source, texts), encoded(source, texts)
    for _ in range(GROUP + 1):
        ids, batch = next(with_ids)["text"], next(batches)
        assert batch["text"].dtype == np.float16
        rows = ids.reshape(-1, TOKENS)
        states_of_rows = batch["text"].reshape(-1, TOKENS, 2, WIDTH)
        assert len({row.tobytes() for row in rows}) > 2
        for row, states in zip(rows, states_of_rows, strict=True):
            count = (row >= 0).sum()
            token_ids = {0: row[:count].tolist()}
            ((_, expected),) = texts.encoder.encode_by_length(token_ids)
            assert states[:count].tobytes() == expected.tobytes() and not states[count:].any()
    batches.close()


def test_each_sentence_is_encoded_once_and_none_long_before_its_use(
    source, open_texts, num_encoded
):
    text_only = write_text_only_queries(NUM_TEXT_ONLY, seed=0)
    batches = encoded(source, open_texts(), has_text_head=True, text_only=text_only)
    next(batches)
    batches.close()
    per_batch = 12 * BATCH_SIZE
    assert 0 < sum(num_encoded) <= per_batch * GROUP * (AHEAD // GROUP + 2)

    num_encoded.clear()
    batches = encoded(source, open_texts(), in_thread=False)
    num_visits = BATCH_SIZE * sum(1 for _ in zip(range(12 * GROUP), batches, strict=False))
    num_sentences = sum(len(source[index]["texts"]) for index in range(len(source)))
    # And the empty one, which is padding.
    assert sum(num_encoded) <= num_sentences + 1 < 3 * num_visits


@pytest.mark.parametrize("in_thread", [True, False])
def test_an_iterator_goes_on_with_the_same_batches(in_thread, source, open_texts):
    first = encoded(source, open_texts())
    batches = [next(first) for _ in range(7)]
    first.close()

    one = encoded(source, open_texts(), in_thread=in_thread)
    for _ in range(3):
        next(one)
    state = one.get_state()
    next(one)  # what is made ahead of the state is made again
    one.close()
    again = encoded(source, open_texts(), in_thread=in_thread)
    again.set_state(state)
    for expected in batches[3:]:
        batch = next(again)
        assert batch["text"].tobytes() == expected["text"].tobytes()
        assert np.array_equal(batch["image"], expected["image"])
    again.close()


def test_states_do_not_depend_on_what_is_evaluated(source, open_texts):
    """Evaluations encode in another precision."""
    expected = next(encoded(source, open_texts()))["text"]
    texts = open_texts()
    sentences = [text for index in range(len(source)) for text in source[index]["texts"]]
    texts.encode(sentences)
    texts.cache._states = {name: 0 * texts.states_of(name) for name in sentences}
    assert next(encoded(source, texts))["text"].tobytes() == expected.tobytes()


def test_states_on_disk_are_read(source, open_texts, tmp_path, num_encoded):
    first = encoded(source, open_texts(tmp_path), in_thread=False)
    expected = next(first)
    first.close()
    assert num_encoded.pop() > 0
    again = encoded(source, open_texts(tmp_path), in_thread=False)
    assert next(again)["text"].tobytes() == expected["text"].tobytes()
    assert num_encoded.pop() == 0


def test_what_goes_wrong_in_the_thread_is_raised(source, open_texts, monkeypatch):
    def refuse(self, batches):
        raise InputError("the disk is full")

    monkeypatch.setattr(BatchEncoder, "encode", refuse)
    batches = encoded(source, open_texts())
    with pytest.raises(InputError, match="the disk is full"):
        next(batches)
    batches.close()
