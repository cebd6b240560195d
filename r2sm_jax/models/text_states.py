"""Token states of the frozen language model, computed once per unique sentence and kept in host memory."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float16, Float32, Int
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from r2sm_jax.config import Products
from r2sm_jax.cpu import products
from r2sm_jax.errors import InputError
from r2sm_jax.models.feature_cache import FeatureCache, digest
from r2sm_jax.models.text import load_text_encoder
from r2sm_jax.models.text_encoder import TextEncoder
from r2sm_jax.models.weights import find_language_model, weights_sha256

BATCH_TOKENS = 2048
LENGTH_STEP = 4
"""Sentences are encoded in batches of equal padded length, a multiple of this: few shapes, little padding."""
PADDED_STEP = 32
REQUEST_ROWS = (1, 8, 64)
REQUEST_LENGTHS = (16, 32)
"""Sentences that somebody waits for are padded to one of these, or to the token limit."""
REQUEST_KEPT = 1024
"""How many of them are remembered, so that a server's memory does not grow."""
VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)

Batch = tuple[list[tuple[str, list[int]]], jax.Array]
"""Sentences with their tokens, and their states [b t l e] as they will be."""


class TextStates:
    """`states, mask = texts(["...", ...])`; new sentences are encoded, known ones looked up.

    States are float16 [t l e], stored without padding. Where hidden layers are raw residual sums (CLIP, SigLIP,
    decoder-only), each token state is divided by its root mean square: some are in the thousands, which neither
    float16 nor the heads could take beside the others.

    The tokenizer needs no padding token: what pads a batch is masked, or comes after everything that is read. Only
    SigLIP was trained to read its padding; its states are those of the sentence and, behind it, that of the last
    padding token, which is the one that it pools.

    Threads may share it.
    """

    def __init__(self, name: str, *, layers: tuple[int, ...], max_tokens: int, cache: str | None = None):
        """`cache`: folder of states that an earlier run computed (data/feature_cache.py), which new ones are added to.

        Raises:
            InputError: the model cannot be had or read, or has not these layers or so many tokens.
        """
        folder = find_language_model(name)
        self.folder: Path = folder
        encoder = load_text_encoder(folder)
        self.sha256 = weights_sha256(folder)
        self.tokenizer = load_tokenizer(folder, encoder)
        if not all(0 <= layer <= encoder.depth for layer in layers):
            raise InputError(f"--model.text.layers {layers}: {name} has the layers 0 to {encoder.depth}")
        if max_tokens > encoder.max_tokens:
            raise InputError(f"--model.text.max-tokens {max_tokens}: {name} reads at most {encoder.max_tokens} tokens")
        self.layers, self.dim, self.pool = layers, encoder.dim, encoder.POOL
        self.max_tokens = max_tokens
        self._ending = ending(self.tokenizer)
        self._whole: int = encoder.max_tokens if encoder.reads_padding else 0
        self._words = max_tokens - len(self._ending) - encoder.reads_padding
        graphdef, self.weights = nnx.split(encoder)

        @partial(jax.jit, static_argnames="kind")
        def encode(weights: nnx.State, ids: jax.Array, mask: jax.Array, kind: Products) -> jax.Array:
            with products(kind):
                return nnx.merge(graphdef, weights).kept_states(ids, mask, layers)

        self._encoder = encode
        self._cache = FeatureCache(Path(cache), digest("text", self.sha256, layers)) if cache else None
        self._states: dict[str, np.ndarray] = {}
        self._requested: deque[str] = deque()
        self._lock = threading.RLock()
        self.truncated: set[str] = set()

    def __len__(self) -> int:
        return len(self._states)

    def states_of(self, sentence: str) -> Float16[np.ndarray, "t l e"]:
        """The states of a sentence that was added."""
        return self._states[sentence]

    def encode(self, sentences: Iterable[str], *, kind: Products = "float32") -> int:
        """Encodes the sentences that are not known yet, here or in the cache; returns how many there were.

        `kind`: how dense layers multiply (cpu.py).
        """
        with self._lock:
            new = self._uncached(self._new(sentences))
            by_length: dict[int, list[tuple[str, list[int]]]] = {}
            for sentence, ids in new:
                by_length.setdefault(-(-max(len(ids), 1) // LENGTH_STEP) * LENGTH_STEP, []).append((sentence, ids))
            before: Batch | None = None
            for length, group in sorted(by_length.items()):
                rows = max(1, BATCH_TOKENS // length)
                for start in range(0, len(group), rows):
                    batch = self._encode_batch(group[start : start + rows], rows, length, kind)
                    self._keep(before)  # while this batch is being computed
                    before = batch
            self._keep(before)
            if self._cache is not None and new:
                self._cache.add((_key(ids), (self._states[sentence],)) for sentence, ids in new)
            return len(new)

    def for_request(self, sentences: Sequence[str]) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """As a call, for a few sentences that somebody waits for: small batches of few shapes, padded to the token
        limit. The latest `REQUEST_KEPT` new ones are remembered."""
        with self._lock:
            new = self._new(sentences)
            for start in range(0, len(new), REQUEST_ROWS[-1]):
                group = new[start : start + REQUEST_ROWS[-1]]
                longest = max(len(ids) for _, ids in group)
                length = next((n for n in REQUEST_LENGTHS if longest <= n < self.max_tokens), self.max_tokens)
                rows = next(n for n in REQUEST_ROWS if n >= len(group))
                self._keep(self._encode_batch(group, rows, length))
            found = self(list(sentences), self.max_tokens)
            self._requested += [sentence for sentence, _ in new]
            while len(self._requested) > REQUEST_KEPT:
                oldest = self._requested.popleft()
                self._states.pop(oldest, None)
                self.truncated.discard(oldest)
            return found

    def warm_up(self) -> None:
        """Compiles all that `for_request` needs."""
        for rows, length in product(
            REQUEST_ROWS, (*(n for n in REQUEST_LENGTHS if n < self.max_tokens), self.max_tokens)
        ):
            self._encode_batch([], rows, length)

    def tokens(self, sentences: Sequence[str]) -> tuple[Int[np.ndarray, "k t"], Bool[np.ndarray, "k t"]]:
        """Ids up to the limit and which of them are real, as the language model takes them."""
        with self._lock:
            cut = self._cut(list(sentences))
        return self._padded(cut, len(cut), max(1, *map(len, cut)))

    def _new(self, sentences: Iterable[str]) -> list[tuple[str, list[int]]]:
        """Those that are not known, with their tokens up to the limit."""
        new = [s for s in dict.fromkeys(sentences) if s not in self._states]
        if not new:
            return []
        return list(zip(new, self._cut(new), strict=True))

    def _uncached(self, new: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        """Those that the cache lacks, which it gets room for; the others are known from here on."""
        if self._cache is None:
            return new
        lacking = []
        for sentence, ids in new:
            if (key := _key(ids)) in self._cache:
                (self._states[sentence],) = self._cache[key]
            else:
                lacking.append((sentence, ids))
        tokens = sum(max(len(ids), 1) + bool(self._whole) for _, ids in lacking)
        self._cache.make_room("sentences", len(lacking), 2 * tokens * len(self.layers) * self.dim)
        return lacking

    def _cut(self, sentences: list[str]) -> list[list[int]]:
        encoded = self.tokenizer(sentences, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
        limit = self._words + len(self._ending)
        self.truncated |= {s for s, ids in zip(sentences, encoded, strict=True) if len(ids) > limit}
        return [ids if len(ids) <= limit else [*ids[: self._words], *self._ending] for ids in encoded]

    def _encode_batch(
        self, group: list[tuple[str, list[int]]], rows: int, length: int, kind: Products = "float32"
    ) -> Batch:
        ids, mask = self._padded([tokens for _, tokens in group], rows, length)
        return group, self._encoder(self.weights, ids, mask, kind)

    def _padded(
        self, group: Sequence[Sequence[int]], rows: int, length: int
    ) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
        length = self._whole or length
        ids = np.full((rows, length), self.tokenizer.pad_token_id or 0, np.int32)
        mask = np.full((rows, length), bool(self._whole))
        mask[:, 0] = True
        for row, tokens in enumerate(group):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
        return ids, mask

    def _keep(self, batch: Batch | None) -> None:
        if batch is not None:
            group, states = batch[0], np.asarray(batch[1])
            for row, (sentence, tokens) in enumerate(group):
                # A sentence without tokens (decoder-only models add none) is its first padding token.
                kept = states[row, : max(len(tokens), 1)]
                self._states[sentence] = np.concatenate([kept, states[row, -1:]]) if self._whole else kept.copy()

    def __call__(
        self, sentences: list[str], tokens: int | None = None
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """States of known or new sentences, and which tokens are real.

        Padded to `tokens`; without it to a multiple of `PADDED_STEP`, so that few shapes occur.
        """
        with self._lock:
            if any(s not in self._states for s in sentences):
                self.encode(sentences)
            known = [self._states[s] for s in sentences]
        padded = tokens or min(self.max_tokens, -(-max(map(len, known)) // PADDED_STEP) * PADDED_STEP)
        states = np.zeros((len(sentences), padded, len(self.layers), self.dim), np.float16)
        mask = np.zeros((len(sentences), padded), bool)
        for row, state in enumerate(known):
            states[row, : len(state)], mask[row, : len(state)] = state[:padded], True
        return states, mask

    def token_quantile(self, sentences: Iterable[str], share: float = 1.0) -> int:
        """The number of tokens that this share of the sentences, which were added, does not exceed."""
        counts = [len(self._states[sentence]) for sentence in sentences]
        return int(np.quantile(counts, share, method="higher")) if counts else 1

    def embeddings(self, names: tuple[str, ...]) -> Float32[np.ndarray, "v e"]:
        """One last-layer state of each name, relative to the others: centred, unit variance.

        It is the mean over the tokens, or the last token's where only that has read the whole name. A language
        model's states share a large common part; without it names are told apart from the first steps.
        """
        self.encode(names)
        states = [self._states[name][:, -1].astype(np.float32) for name in names]
        pooled = np.stack([state.mean(0) if self.pool == "mean" else state[-1] for state in states])
        centred = pooled - pooled.mean(0)
        return centred / max(float(centred.std()), 1e-6)

    def word_of_tokens(self, sentence: str, words: Sequence[Sequence[int]]) -> Int[np.ndarray, " t"]:
        """For each token that is read, the word whose characters `start, end` hold its middle; -1 for special ones."""
        with self._lock:
            spans = self.tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"] or [(0, 0)]
        if len(spans) > self._words + len(self._ending):
            spans = [*spans[: self._words], *[(0, 0)] * len(self._ending)]
        if self._whole:
            spans = [*spans, (0, 0)]
        found = np.full(len(spans), -1)
        for row, (start, end) in enumerate(spans):
            for word, (first, last) in enumerate(words):
                if start < end and first <= (start + end) / 2 <= last:
                    found[row] = word
        return found

    def cut_off(self, sentence: str) -> str:
        """The words at the end of a sentence that lie beyond the token limit, the first of them maybe in part."""
        with self._lock:
            spans = self.tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
        if len(spans) <= self._words + len(self._ending):
            return ""
        start = spans[self._words][0]
        start += sentence[start] == " "  # some tokens begin with the space before the word
        return sentence[sentence.rfind(" ", 0, start) + 1 :]

    def truncation_summary(self) -> str:
        """One line on how many sentences were cut."""
        share = len(self.truncated) / max(1, len(self._states))
        return (
            f"{len(self._states)} unique sentences, {len(self.truncated)} cut at {self.max_tokens} tokens ({share:.2%})"
        )


def _key(ids: list[int]) -> str:
    return digest(np.asarray(ids, np.int32))


def load_tokenizer(folder: Path, encoder: TextEncoder) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        InputError: it is missing or unreadable, has no padding token where the model reads one, or has ids that the
            model has no embedding of.
    """
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise InputError(f"{folder}: tokenizer.json is missing; a language-model folder needs it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the many tokenizers raise on a damaged file
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{folder}: its tokenizer cannot be read ({line})") from None
    if not tokenizer.is_fast:
        raise InputError(f"{folder}: its tokenizer has no tokenizer.json and cannot be converted to one; add the file")
    if encoder.reads_padding and tokenizer.pad_token_id is None:
        raise InputError(f"{folder}: its tokenizer has no padding token, which this model reads; restore pad_token")
    largest = max(tokenizer.get_vocab().values())
    if largest >= encoder.vocab_size:
        raise InputError(
            f"{folder}: its tokenizer has ids up to {largest}, the model {encoder.vocab_size} embeddings; "
            "take the tokenizer that belongs to the model"
        )
    return tokenizer


def ending(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that are put behind every sentence, cut ones too; none in most decoder-only models."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    return whole[starts[-1] + len(bare) :] if starts else []
