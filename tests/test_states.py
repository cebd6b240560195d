"""Token states by layout: what is padded, cut, pooled and refused."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import LAYERS, WIDTH

from r2sm_jax.language import states as text_states, tokenizer as tokenizer_module
from r2sm_jax.language.encoder import load_text_encoder
from r2sm_jax.language.states import TextStates
from r2sm_jax.language.tokenizer import NO_TOKEN, QueryTokenizer, read_part
from r2sm_jax.synthetic.queries.sentences import intent_sentences

SENTENCES = [
    "the red mug",
    "what holds coffee, including its hidden part?",
    "mug",
    "the red mug behind the book",
]


@pytest.fixture(scope="module")
def folders(bert_folder, llama_folder) -> dict[str, Path]:
    return {"bert": bert_folder, "llama": llama_folder}


def tokens_of(texts: TextStates, sentence: str) -> list[int]:
    return texts.tokenizer([sentence])[0]


def states_of(texts: TextStates, sentence: str) -> np.ndarray:
    states, mask = texts([sentence])
    return states[0][mask[0]]


def fill(texts: TextStates, sentences: list[str], precision: str = "float32") -> np.ndarray:
    """The states [k t l e] of sentences in a training batch."""
    ids = np.full((1, len(sentences), texts.max_tokens), NO_TOKEN, np.int32)
    for row, of_sentence in enumerate(texts.tokenizer(sentences)):
        ids[0, row, : len(of_sentence)] = of_sentence
    (states,) = texts.of_ids(ids, precision=precision)
    return states[0]


@pytest.fixture(scope="module")
def texts(bert_folder) -> TextStates:
    return TextStates(str(bert_folder), layers=(1, 2), max_tokens=16)


def test_states_are_padded_and_masked(texts):
    states, mask = texts(["the red mug", ""], 16)
    assert states.shape == (2, 16, 2, WIDTH) and states.dtype == np.float16 and mask.dtype == bool
    assert mask.sum(1).tolist() == [5, 2]  # with the two special tokens
    assert not states[~mask].any() and states[mask].any()


def test_states_stay_in_memory_while_there_is_room(bert_folder, monkeypatch):
    texts = TextStates(str(bert_folder), layers=(1,), max_tokens=16)
    counts = []
    encode = TextStates._encode

    def count(self, token_ids, *options):
        counts.append(len(token_ids))
        return encode(self, token_ids, *options)

    monkeypatch.setattr(TextStates, "_encode", count)
    texts(["seen before", "seen before", "mug"])
    assert sum(counts) == 2
    texts(["mug", "seen before"])
    assert sum(counts) == 2

    monkeypatch.setattr(text_states, "MAX_BYTES", 3 * texts._num_bytes // 2)
    states, _ = texts(["the red mug", "the book", "the red mug"])
    assert sum(counts) == 4 and len(texts._states) < 4 and np.array_equal(states[0], states[2])
    assert texts._num_bytes == sum(of.nbytes for of in texts._states.values())


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_states_do_not_depend_on_what_pads_them(kind, folders):
    """Without a padding token (llama) as with one."""
    texts = TextStates(str(folders[kind]), layers=(0, 1, LAYERS), max_tokens=20)
    together, mask = texts(SENTENCES)
    in_batch = fill(texts, SENTENCES)
    for row, sentence in enumerate(SENTENCES):
        alone = TextStates(str(folders[kind]), layers=(0, 1, LAYERS), max_tokens=20)
        expected = states_of(alone, sentence)
        np.testing.assert_allclose(together[row][mask[row]], expected, atol=2e-3)
        count = len(tokens_of(alone, sentence))
        np.testing.assert_allclose(in_batch[row, :count], expected, atol=2e-3)
        assert not in_batch[row, count:].any()


@pytest.mark.parametrize(("kind", "size"), [("bert", None), ("llama", 1.0)])
def test_states_are_the_encoders_at_unit_size_where_it_does_not_norm_them(kind, size, folders):
    texts = TextStates(str(folders[kind]), layers=(1,), max_tokens=20)
    ids = np.array([tokens_of(texts, SENTENCES[1])])
    mask = np.ones(ids.shape, bool)
    encoder = load_text_encoder(folders[kind])
    direct = np.asarray(encoder.hidden_states(jnp.asarray(ids), jnp.asarray(mask))[1])[0]
    if size is not None:
        direct = direct / np.sqrt((direct**2).mean(-1, keepdims=True))
    actual = states_of(texts, SENTENCES[1])[:, 0]
    np.testing.assert_allclose(actual, direct, atol=5e-3)


def test_one_vector_is_the_mean_or_the_last_token(folders):
    names = ("red mug", "book", "what holds coffee")
    for kind, pick in (
        ("bert", lambda s: s.mean(0)),
        ("llama", lambda s: s[-1]),
    ):
        texts = TextStates(str(folders[kind]), layers=(1, 2), max_tokens=20)
        vectors = texts.embeddings(names)
        states = np.stack(
            [pick(states_of(texts, name)[:, -1].astype(np.float32)) for name in names]
        )
        centred = states - states.mean(0)
        np.testing.assert_allclose(vectors, centred / centred.std(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_long_sentences_are_cut_and_what_is_left_fits(kind, folders):
    long = "the red mug behind the book " * 4 + "including the hidden part"
    texts = TextStates(str(folders[kind]), layers=(1,), max_tokens=12)
    states, mask = texts([long])
    assert mask.sum() == 12 and np.isfinite(states).all()
    cut = texts.cut_off(long)
    assert long.endswith(cut) and cut and texts.cut_off(long.removesuffix(cut).strip()) == ""
    assert texts.cut_off(long.removesuffix(cut) + cut.split()[0]) != ""


def test_a_sentence_without_tokens_is_one_token(folders, tmp_path):
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "bare"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    texts = TextStates(str(folder), layers=(1, 2), max_tokens=8)
    assert tokens_of(texts, "") == []
    states, mask = texts(["", "the red mug"])
    assert mask.sum(1).tolist() == [1, 3] and np.isfinite(states).all()
    long = "the red mug behind the book and the other red mug"
    assert len(TextStates(str(folder), layers=(1,), max_tokens=4)([long])[1][0].nonzero()[0]) == 4


def test_a_token_that_is_all_in_one_channel_stays_finite(folders, tmp_path):
    """Decoder-only models keep sums in the ten thousands, beyond float16, at the first token."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "large"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 3] = 3e5
    save_file(tensors, folder / "model.safetensors")
    states, mask = TextStates(str(folder), layers=(0, 1, 2), max_tokens=8)(["the red mug"])
    assert np.isfinite(states).all() and np.abs(states[mask]).max() <= WIDTH**0.5 + 1e-2


def test_products_are_part_of_what_is_compiled(folders):
    """States that training encodes in bfloat16 differ, and do not change what is encoded after
    them."""
    texts = TextStates(str(folders["bert"]), layers=(LAYERS,), max_tokens=20)
    exact = fill(texts, SENTENCES)
    assert 0 < np.abs(fill(texts, SENTENCES, "bfloat16") - exact).max() < 0.1
    texts._states.clear()
    np.testing.assert_array_equal(fill(texts, SENTENCES), exact)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_states_do_not_depend_on_what_is_encoded_with_them(kind, precision, folders):
    """To the bit: a run that goes on encodes other sentences together than the one before, and what
    was asked or evaluated before changes nothing."""
    texts = TextStates(str(folders[kind]), layers=(0, 1, LAYERS), max_tokens=40)
    words = "the red mug behind a book and what holds coffee".split()
    rng = np.random.default_rng(0)
    sentences = [" ".join(rng.choice(words, size)) for size in range(1, 36) for _ in range(8)]
    together = fill(texts, sentences, precision)
    texts._states.clear()
    texts(sentences[::3])
    for part in np.array_split(rng.permutation(len(sentences)), 11):
        states = fill(texts, [sentences[row] for row in part], precision)
        assert states.tobytes() == together[part].tobytes()


@pytest.fixture(scope="module")
def bert(folders) -> TextStates:
    return TextStates(str(folders["bert"]), layers=(1,), max_tokens=24)


@settings(max_examples=60, deadline=None)
@given(
    sentence=st.sampled_from(
        [s.text for s in (*intent_sentences("val_r2sm"), *intent_sentences("test"))]
    ),
    opening=st.sampled_from(["", "Please ", "please, ", "Kindly ", "Please, kindly "]),
    stop=st.sampled_from(["", ".", " .", "..."]),
    capitals=st.booleans(),
)
def test_a_polite_opening_a_full_stop_and_capitals_are_not_read(
    bert, sentence, opening, stop, capitals
):
    changed = opening + sentence.rstrip(". ") + stop
    changed = changed.upper() if capitals else changed
    assert tokens_of(bert, changed) == tokens_of(bert, sentence)


@pytest.mark.parametrize(
    ("sentence", "read"),
    [
        *[
            ("Please ...", "Please ..."),
            ("...", "..."),
            ("please kindly", "kindly"),
            ("Please.", "Please"),
        ],
        ("please please.", "please"),
    ],
)
def test_something_is_read_of_every_sentence(sentence, read):
    assert read_part(sentence) == read


def test_sentences_are_tokenized_some_at_a_time(bert_folder, monkeypatch):
    sentences = ["the mug", "the red mug on the old table", "", "the cat", "the mug"]
    tokenizer = QueryTokenizer(bert_folder, vocab_size=10**6, max_tokens=4)
    expected = tokenizer(sentences)
    other = QueryTokenizer(bert_folder, vocab_size=10**6, max_tokens=4)
    monkeypatch.setattr(tokenizer_module, "SENTENCES_AT_ONCE", 2)
    assert other(sentences) == expected and len(expected) == len(sentences)
    assert [bool(other.cut_off(sentence)) for sentence in sentences] == [
        False,
        True,
        False,
        False,
        False,
    ]
