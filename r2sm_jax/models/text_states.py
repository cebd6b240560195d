"""Token states of the frozen language model, computed once per unique sentence and kept in host memory."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float16, Float32, Int
from transformers import AutoTokenizer

from r2sm_jax.errors import InputError
from r2sm_jax.models.text import load_text_encoder
from r2sm_jax.models.weights import find_language_model, weights_sha256

BATCH_TOKENS = 2048
LENGTH_STEP = 4
"""Sentences are encoded in batches of equal padded length, a multiple of this: few shapes, little padding."""
PADDED_STEP = 32
NOW_ROWS = (1, 8)
NOW_LENGTHS = (16, 32)
"""Sentences that somebody waits for are padded to one of these, or to the token limit."""
NOW_KEPT = 1024
"""How many of them are remembered, so that a server's memory does not grow."""

Batch = tuple[list[tuple[str, list[int]]], jax.Array]
"""Sentences with their tokens, and their states [b t l e] as they will be."""


class TextStates:
    """`states, mask = texts(["...", ...])`; new sentences are encoded, known ones looked up.

    States are float16 [t l e], stored without padding. Threads may share it.
    """

    def __init__(self, name: str, *, layers: tuple[int, ...], max_tokens: int):
        folder = find_language_model(name)
        self.folder: Path = folder
        encoder = load_text_encoder(folder)
        config = encoder.config
        self.sha256 = weights_sha256(folder)
        if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.txt")):
            raise InputError(f"{folder}: tokenizer.json is missing; a language-model folder needs it")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{folder}: its tokenizer cannot be read ({str(error).splitlines()[0]})") from None
        if not all(0 <= layer <= config.num_hidden_layers for layer in layers):
            raise InputError(f"--model.text.layers {layers}: {name} has the layers 0 to {config.num_hidden_layers}")
        self.layers, self.dim = layers, config.hidden_size
        self.max_tokens = max_tokens
        graphdef, self.weights = nnx.split(encoder)

        @jax.jit
        def encode(weights: nnx.State, ids: jax.Array, mask: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, weights)(ids, mask, layers).astype(jnp.float16)

        self._encode = encode
        self._states: dict[str, np.ndarray] = {}
        self._passing: deque[str] = deque()
        self._lock = threading.RLock()
        self.truncated: set[str] = set()

    def __len__(self) -> int:
        return len(self._states)

    def known(self, sentence: str) -> Float16[np.ndarray, "t l e"]:
        """The states of a sentence that was added."""
        return self._states[sentence]

    def add(self, sentences: Iterable[str]) -> int:
        """Encodes the sentences that are not known yet; returns how many there were."""
        with self._lock:
            new = self._new(sentences)
            by_length: dict[int, list[tuple[str, list[int]]]] = {}
            for sentence, ids in new:
                by_length.setdefault(-(-len(ids) // LENGTH_STEP) * LENGTH_STEP, []).append((sentence, ids))
            before: Batch | None = None
            for length, group in sorted(by_length.items()):
                rows = max(1, BATCH_TOKENS // length)
                for start in range(0, len(group), rows):
                    batch = self._encode_batch(group[start : start + rows], rows, length)
                    self._keep(before)  # while this batch is being computed
                    before = batch
            self._keep(before)
            return len(new)

    def now(self, sentences: Sequence[str]) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """As a call, for a few sentences that somebody waits for: small batches of few shapes, padded to the token
        limit. The latest `NOW_KEPT` new ones are remembered."""
        with self._lock:
            new = self._new(sentences)
            for start in range(0, len(new), NOW_ROWS[-1]):
                group = new[start : start + NOW_ROWS[-1]]
                longest = max(len(ids) for _, ids in group)
                length = next((n for n in NOW_LENGTHS if longest <= n < self.max_tokens), self.max_tokens)
                rows = next(n for n in NOW_ROWS if n >= len(group))
                self._keep(self._encode_batch(group, rows, length))
            found = self(list(sentences), self.max_tokens)
            self._passing += [sentence for sentence, _ in new]
            while len(self._passing) > NOW_KEPT:
                oldest = self._passing.popleft()
                self._states.pop(oldest, None)
                self.truncated.discard(oldest)
            return found

    def warm_up(self) -> None:
        """Compiles all that `now` needs."""
        for rows, length in product(NOW_ROWS, (*(n for n in NOW_LENGTHS if n < self.max_tokens), self.max_tokens)):
            self._encode_batch([], rows, length)

    def _new(self, sentences: Iterable[str]) -> list[tuple[str, list[int]]]:
        """Those that are not known, with their tokens up to the limit."""
        new = [s for s in dict.fromkeys(sentences) if s not in self._states]
        if not new:
            return []
        encoded = self.tokenizer(new, add_special_tokens=True)["input_ids"]
        self.truncated |= {s for s, ids in zip(new, encoded, strict=True) if len(ids) > self.max_tokens}
        limit, end = self.max_tokens, self.tokenizer.sep_token_id
        cut = (ids if len(ids) <= limit else [*ids[: limit - 1], end] for ids in encoded)
        return list(zip(new, cut, strict=True))

    def _encode_batch(self, group: list[tuple[str, list[int]]], rows: int, length: int) -> Batch:
        ids = np.zeros((rows, length), np.int32)
        mask = np.zeros((rows, length), bool)
        mask[:, 0] = True
        for row, (_, tokens) in enumerate(group):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
        return group, self._encode(self.weights, ids, mask)

    def _keep(self, batch: Batch | None) -> None:
        if batch is not None:
            group, states = batch[0], np.asarray(batch[1])
            for row, (sentence, tokens) in enumerate(group):
                self._states[sentence] = states[row, : len(tokens)].copy()

    def __call__(
        self, sentences: list[str], tokens: int | None = None
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """States of known or new sentences, and which tokens are real.

        Padded to `tokens`; without it to a multiple of `PADDED_STEP`, so that few shapes occur.
        """
        with self._lock:
            if any(s not in self._states for s in sentences):
                self.add(sentences)
            known = [self._states[s] for s in sentences]
        padded = tokens or min(self.max_tokens, -(-max(map(len, known)) // PADDED_STEP) * PADDED_STEP)
        states = np.zeros((len(sentences), padded, len(self.layers), self.dim), np.float16)
        mask = np.zeros((len(sentences), padded), bool)
        for row, state in enumerate(known):
            states[row, : len(state)], mask[row, : len(state)] = state[:padded], True
        return states, mask

    @property
    def longest(self) -> int:
        """Tokens of the longest sentence so far."""
        return max(map(len, self._states.values()), default=1)

    def embeddings(self, names: tuple[str, ...]) -> Float32[np.ndarray, "v e"]:
        """Mean last-layer state of each name, relative to the others: centred, unit variance.

        A language model's states share a large common part; without it names are told apart from the first steps.
        """
        self.add(names)
        means = np.stack([self._states[name][:, -1].astype(np.float32).mean(0) for name in names])
        centred = means - means.mean(0)
        return centred / max(float(centred.std()), 1e-6)

    def word_of_tokens(self, sentence: str, words: Sequence[Sequence[int]]) -> Int[np.ndarray, " t"]:
        """For each token that is read, the word whose characters `start, end` hold its middle; -1 for special ones."""
        spans = self.tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
        if len(spans) > self.max_tokens:
            spans = [*spans[: self.max_tokens - 1], (0, 0)]
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
        if len(spans) <= self.max_tokens:
            return ""
        start = spans[self.max_tokens - 1][0]
        return sentence[sentence.rfind(" ", 0, start) + 1 :]

    def said_of_truncation(self) -> str:
        """One line on how many sentences were cut."""
        share = len(self.truncated) / max(1, len(self._states))
        return (
            f"{len(self._states)} unique sentences, {len(self.truncated)} cut at {self.max_tokens} tokens ({share:.2%})"
        )
