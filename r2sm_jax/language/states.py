"""Token states of the frozen language model: `states, mask = texts(["...", ...])`.

A sentence is encoded when a batch or a question needs it, and its states stay in memory as long as
there is room for them.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Bool, Float16, Float32, Int32

from r2sm_jax.config import MatmulPrecision, TextConfig
from r2sm_jax.errors import InputError
from r2sm_jax.language.encoder import TextEncoder, load_text_encoder
from r2sm_jax.language.tokenizer import (
    NO_TOKEN,
    QueryTokenizer,
    check_language_model,
    identify,
    pad_ids,
)
from r2sm_jax.models.hub import find_model, weights_sha256
from r2sm_jax.models.matmul import compiled

LENGTHS = (16, 32)
"""Sentences are padded to the first of these numbers of tokens that holds them, or to the limit."""
TOKENS_AT_ONCE = 256
"""So many tokens are encoded at once, padding included. More are a little faster, and slower where
few sentences are new."""
MAX_BYTES = 1 << 30
"""So many bytes of states stay in memory; then the oldest go."""

Key = tuple[bytes, MatmulPrecision]
"""The token ids of a sentence, and how dense layers multiplied where it was encoded."""


class TextStates:
    """Looks up the states of sentences, and encodes those that it does not have.

    States are float16 `[t l e]`: the tokens of the sentence, `layers`, channels. Where hidden
    layers are sums over the residual blocks (decoder-only models), each token state is divided by
    its root mean square: some sums are in the thousands, too large for float16 and for the heads.
    Threads may share it.

    Attributes:
        folder: The folder of the language model.
        tokenizer: Sentences -> token ids.
        weights: Never trained, in the type of their file.
        sha256: Hash of the file of the weights.
        sizes: Sizes of the language model.
        layers: The hidden layers whose states are returned; 0 = the embeddings.
        max_tokens: The limit of a sentence.
    """

    def __init__(
        self,
        name: str,
        *,
        layers: tuple[int, ...],
        max_tokens: int,
        tokenizer_sha256: str | None = None,
    ):
        """Opens a language model by its name on the hub, or its folder.

        `tokenizer_sha256` is that of a run, which makes opening its tokenizer faster. Raises
        InputError if the model cannot be had or read, or does not have these layers or so many
        tokens.
        """
        self.folder: Path = find_model(name, "--model.text.name")
        encoder = load_text_encoder(self.folder)
        self.sizes = encoder.sizes
        self.layers = layers
        self.max_tokens = max_tokens
        if not all(0 <= layer <= self.sizes.depth for layer in layers):
            raise InputError(
                f"--model.text.layers {layers}: {name} has the layers 0 to {self.sizes.depth}"
            )
        if max_tokens > self.sizes.max_tokens:
            raise InputError(
                f"--model.text.max-tokens {max_tokens}: {name} reads at most "
                f"{self.sizes.max_tokens} tokens"
            )
        self.tokenizer = QueryTokenizer(
            self.folder,
            vocab_size=self.sizes.vocab_size,
            max_tokens=max_tokens,
            expected_sha256=tokenizer_sha256,
        )
        self.sha256 = weights_sha256(self.folder)
        self._lengths = (*(n for n in LENGTHS if n < max_tokens), max_tokens)
        self._states: dict[Key, np.ndarray] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()  # one thread encodes at a time

        self._graphdef, self.weights = nnx.split(encoder)

    @property
    def identity(self) -> dict[str, str | None]:
        """Hashes of weights and tokenizer, and the revision of a model of the Hugging Face hub."""
        return identify(self.folder, self.sha256, self.tokenizer.sha256)

    def __call__(
        self, sentences: Sequence[str], length: int | None = None
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """Returns the states of sentences, and which tokens are real.

        They are padded, and cut, to `length` tokens; without it to the longest sentence.
        """
        token_ids = [np.asarray(ids, np.int32).tobytes() for ids in self.tokenizer(sentences)]
        states = self._look_up(token_ids, "float32")
        return self._pad(states, length or max(map(len, states), default=1))

    def of_ids(
        self, *ids: Int32[np.ndarray, "b _k _t"], precision: MatmulPrecision = "float32"
    ) -> list[Float16[np.ndarray, "b _k _t l e"]]:
        """Returns the states of the sentences of a training batch: an array for each array of token
        ids, which have `NO_TOKEN` on padding.

        The states of a sentence are the same to the bit whatever it is encoded with: its length
        alone says which program computes them, and a program computes all of its rows alike. So a
        resumed run has the states of the run that it continues.
        """
        rows = [row for array in ids for row in array.reshape(-1, array.shape[-1])]
        token_ids = [row[row != NO_TOKEN].tobytes() for row in rows]
        found = iter(self._look_up(token_ids, precision))
        arrays = []
        for b, k, t in (array.shape for array in ids):
            states, _ = self._pad([next(found) for _ in range(b * k)], t)
            arrays.append(states.reshape(b, k, *states.shape[1:]))
        return arrays

    def embeddings(self, words: Sequence[str]) -> Float32[np.ndarray, "v e"]:
        """One vector for each word from the last of the layers, centred and with unit variance.

        The vector is the mean over the tokens, or the last token where only that one has read the
        whole name. The states of a language model share a large common part; without it names
        differ from the first training steps on.
        """
        states, mask = self(words)
        vectors = []
        for of_word, is_real in zip(states[:, :, -1].astype(np.float32), mask, strict=True):
            tokens = of_word[is_real]
            vectors.append(tokens.mean(0) if self.sizes.pool == "mean" else tokens[-1])
        pooled = np.stack(vectors)
        centred = pooled - pooled.mean(0)
        return centred / max(float(centred.std()), 1e-6)

    def cut_off(self, sentence: str) -> str:
        """The words at the end of a sentence that are beyond the limit; "" where there are none."""
        return self.tokenizer.cut_off(sentence)

    def warm_up(self) -> None:
        """Compiles what a question needs."""
        for length in self._lengths:
            # A generator: a sentence without tokens makes it compute.
            list(self._encode([b""], length, "float32"))

    def _pad(
        self, states: Sequence[np.ndarray], length: int
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """The states of sentences with padding to `length` tokens, and which tokens are real."""
        padded = np.zeros((len(states), length, len(self.layers), self.sizes.dim), np.float16)
        mask = np.zeros((len(states), length), bool)
        for row, of_sentence in enumerate(states):
            padded[row, : len(of_sentence)] = of_sentence[:length]
            mask[row, : len(of_sentence)] = True
        return padded, mask

    def _look_up(
        self, token_ids: Sequence[bytes], precision: MatmulPrecision
    ) -> list[Float16[np.ndarray, "_t l e"]]:
        """The states of sentences, of which the new ones are encoded."""
        with self._lock:
            keys: list[Key] = [(ids, precision) for ids in token_ids]
            found = {key: self._states[key] for key in keys if key in self._states}
            new = {ids for ids, _ in keys if (ids, precision) not in found}
            by_length = sorted(new, key=lambda ids: (self._padded_length(ids), ids))
            for length, group in groupby(by_length, key=self._padded_length):
                for ids, states in self._encode(list(group), length, precision):
                    found[ids, precision] = states
                    self._keep((ids, precision), states)
        return [found[key] for key in keys]

    def _encode(
        self, token_ids: Sequence[bytes], length: int, precision: MatmulPrecision
    ) -> Iterator[tuple[bytes, Float16[np.ndarray, "_t l e"]]]:
        """Yields the states of sentences of one padded length."""
        rows = max(1, TOKENS_AT_ONCE // length)
        compute = compiled(self._graphdef, TextEncoder.float16_states, precision, self.layers)
        for start in range(0, len(token_ids), rows):
            part = token_ids[start : start + rows]
            ids = [np.frombuffer(of_sentence, np.int32).tolist() for of_sentence in part]
            states = np.asarray(compute(self.weights, *pad_ids(ids, rows, length)))
            for row, of_sentence in enumerate(ids):
                # A sentence without tokens has the state of one padding token, see `pad_ids`.
                yield part[row], states[row, : max(1, len(of_sentence))].copy()

    def _keep(self, key: Key, states: np.ndarray) -> None:
        """Adds states to the memory, and drops the oldest where they are too many."""
        self._states[key] = states
        self._num_bytes += states.nbytes
        while self._num_bytes > MAX_BYTES:
            oldest = self._states.pop(next(iter(self._states)))
            self._num_bytes -= oldest.nbytes

    def _padded_length(self, token_ids: bytes) -> int:
        """The number of tokens that a sentence is padded to."""
        num_tokens = len(token_ids) // np.dtype(np.int32).itemsize
        return next(length for length in self._lengths if length >= num_tokens)


def open_language_model(
    text: TextConfig, name: str, trained: Mapping[str, Any], user: str
) -> TextStates:
    """Opens the language model of a run or an export.

    Args:
        text: Its layers and the limit of a sentence.
        name: That of the model, or its folder.
        trained: As in `check_language_model`.
        user: As in `check_language_model`.

    Raises InputError if it cannot be had, or is another one than in training.
    """
    texts = TextStates(
        name,
        layers=text.layers,
        max_tokens=text.max_tokens,
        tokenizer_sha256=trained.get("tokenizer_sha256"),
    )
    check_language_model(texts.folder, texts.identity, trained, user)
    return texts
