"""Token states of the frozen language model, computed once for each sentence.

`TextStates` is what training and the predictor call. It sends new sentences through three stages:

QueryTokenizer      sentence -> token ids (tokenizer.py)
FrozenTextEncoder   token ids -> token states, compiled for a few shapes
TextStateCache      sentence -> token states, in memory or in files (text_cache.py)
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float16, Float32, Int

from r2sm_jax.config import MatmulPrecision, TextConfig
from r2sm_jax.data.cache import digest
from r2sm_jax.data.language_model import check_language_model, identify
from r2sm_jax.data.text_cache import TextStateCache
from r2sm_jax.data.tokenizer import NO_TOKEN, QueryTokenizer, pad_ids
from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import find_model, weights_sha256
from r2sm_jax.models.matmul import JAX_PRECISION, set_matmul_precision
from r2sm_jax.models.text_encoder import TextEncoder, load_text_encoder
from r2sm_jax.progress import show_progress

T = TypeVar("T", bound=Hashable)

NAME_FLAG = "--model.text.name"
BATCH_TOKENS = 512
"""How many tokens are encoded at once, padding included. A few training batches have some hundred
new sentences of each length; with more at once, more rows would be empty."""
LENGTH_STEP = 4
"""In training, sentences of similar length are encoded together, padded to a multiple of this: few
shapes are compiled and little padding is computed."""
PADDED_STEP = 32
"""States of a call are padded to a multiple of this, so that the mask-type head compiles for few
shapes."""
REQUEST_ROWS = (1, 8, 64)
"""How many sentences a batch of a request has: the smallest of these that holds them."""
REQUEST_LENGTHS = (16, 32)
"""How many tokens they are padded to: one of these, or the token limit."""
MAX_REQUEST_SENTENCES = 1024
"""Sentences of requests that stay in memory, so that the memory of a server does not grow."""


class FrozenTextEncoder:
    """Computes the token states of some hidden layers. Its weights are never trained.

    Attributes:
        sizes: Sizes of the language model.
        layers: The hidden layers whose states are returned; 0 = the embeddings.
        weights: The weights, in the type of the file.
        sha256: Hash of the file of the weights.
        compute_states: The compiled function from weights, ids `[k t]`, mask `[k t]` and a
            precision to states `[k t l e]`.
    """

    def __init__(self, encoder: TextEncoder, sha256: str, *, layers: tuple[int, ...]):
        """`sha256` is that of the encoder's weights."""
        self.sizes = encoder.sizes
        self.layers = layers
        self.sha256 = sha256
        graphdef, self.weights = nnx.split(encoder)

        # The precision is an argument, and not JAX's setting at the time of the first call, so that
        # each has a compiled function of its own.
        @partial(jax.jit, static_argnames="precision")
        def compute_states(
            weights: nnx.State, ids: jax.Array, mask: jax.Array, precision: MatmulPrecision
        ) -> jax.Array:
            with jax.default_matmul_precision(JAX_PRECISION[precision]):
                encoder = nnx.merge(graphdef, weights)
                set_matmul_precision(encoder, precision)
                return encoder.float16_states(ids, mask, layers)

        self.compute_states = compute_states

    def states_of_ids(
        self, weights: nnx.State, ids: jax.Array, precision: MatmulPrecision
    ) -> jax.Array:
        """States `[b k t l e]` of token ids `[b k t]`, on the devices of `weights`.

        `NO_TOKEN` is in place of padding.
        """
        rows = ids.reshape(-1, ids.shape[-1])
        # The first token counts as real even in a sentence without tokens, as in `pad_ids`.
        mask = (rows != NO_TOKEN).at[:, 0].set(True)
        states = self.compute_states(weights, rows.clip(0), mask, precision)
        return states.reshape(*ids.shape, *states.shape[2:])

    def __call__(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        rows: int,
        length: int,
        precision: MatmulPrecision = "float32",
    ) -> list[Float16[np.ndarray, "_t l e"]]:
        """Returns the states of each sentence, without padding.

        The batch is padded to `rows` x `length`, for which it is compiled once.
        """
        ids, mask = pad_ids(token_ids, rows, length)
        states = np.asarray(self.compute_states(self.weights, ids, mask, precision))
        # A sentence without tokens has the state of one padding token, see `pad_ids`.
        counts = [max(len(tokens), 1) for tokens in token_ids]
        return [states[row, :count].copy() for row, count in enumerate(counts)]

    def encode_by_length(
        self,
        token_ids: Mapping[T, list[int]],
        *,
        precision: MatmulPrecision = "float32",
        advance: Callable[[int], None] = lambda count: None,
    ) -> Iterator[tuple[T, Float16[np.ndarray, "_t l e"]]]:
        """Yields the states of sentences, those of equal padded length after one another.

        The states of a sentence do not depend on those that it is encoded with, to the bit: its
        padded length alone says which program computes them, and a program computes all of its rows
        alike. So a run that goes on has the states of the run that it continues.

        Args:
            token_ids: Of the sentences, by a name for each.
            precision: How dense layers multiply.
            advance: Is told how many are done.
        """

        def padded_length(name: T) -> int:
            return round_up(max(len(token_ids[name]), 1), LENGTH_STEP)

        for length, group in groupby(sorted(token_ids, key=padded_length), key=padded_length):
            names = list(group)
            rows = max(1, BATCH_TOKENS // length)
            for start in range(0, len(names), rows):
                batch = names[start : start + rows]
                ids = [token_ids[name] for name in batch]
                states = self(ids, rows=rows, length=length, precision=precision)
                yield from zip(batch, states, strict=True)
                advance(len(batch))


class TextStates:
    """Encodes new sentences and looks up others: `states, mask = texts(["...", ...])`.

    States are float16 `[t l e]`, without padding. Where hidden layers are sums over the residual
    blocks (decoder-only models), each token state is divided by its root mean square: some sums are
    in the thousands, too large for float16 and for the heads. Threads may share it.

    Attributes:
        folder: The folder of the language model.
        tokenizer: Sentences -> token ids.
        encoder: Token ids -> token states.
        cache: The states of all sentences so far.
        dim: Width of the states.
    """

    def __init__(
        self,
        name: str,
        *,
        layers: tuple[int, ...],
        max_tokens: int,
        cache_dir: str | None = None,
        tokenizer_sha256: str | None = None,
    ):
        """Opens a language model by its name on the hub, or its folder.

        `max_tokens` is the limit of a sentence. `cache_dir` is a folder of states that earlier runs
        computed; new ones are added. `tokenizer_sha256` is that of a run, which makes opening its
        tokenizer faster. Raises InputError if the model cannot be had or read, or does not have
        these layers or so many tokens.
        """
        self.folder = find_model(name, NAME_FLAG)
        encoder = load_text_encoder(self.folder)
        sizes = encoder.sizes
        if not all(0 <= layer <= sizes.depth for layer in layers):
            raise InputError(
                f"--model.text.layers {layers}: {name} has the layers 0 to {sizes.depth}"
            )
        if max_tokens > sizes.max_tokens:
            raise InputError(
                f"--model.text.max-tokens {max_tokens}: {name} reads at most {sizes.max_tokens} "
                "tokens"
            )
        self.tokenizer = QueryTokenizer(
            self.folder,
            vocab_size=sizes.vocab_size,
            max_tokens=max_tokens,
            expected_sha256=tokenizer_sha256,
        )
        self.encoder = FrozenTextEncoder(encoder, weights_sha256(self.folder), layers=layers)
        # What the states of given token ids depend on. The tokenizer is not part of it.
        model = digest("text", self.sha256, layers)
        self.cache = TextStateCache(Path(cache_dir) if cache_dir else None, model)

        self.max_tokens = max_tokens
        self.dim = sizes.dim
        self.layers = layers
        self._request_lengths = [n for n in REQUEST_LENGTHS if n < max_tokens]
        self._request_lengths.append(max_tokens)
        # Sentences of requests, the oldest first.
        self._requested: list[str] = []
        # One thread encodes at a time. `for_request` calls the object itself while it has the lock.
        self._lock = threading.RLock()

    @property
    def weights(self) -> nnx.State:
        """The weights of the language model."""
        return self.encoder.weights

    @property
    def sha256(self) -> str:
        """Hash of the weights of the language model."""
        return self.encoder.sha256

    @property
    def truncated(self) -> set[str]:
        """The sentences that were longer than the limit when they were encoded.

        `Predictor` reads it to warn of them. `for_request` removes those that leave the memory.
        """
        return self.tokenizer.truncated

    @property
    def identity(self) -> dict[str, str | None]:
        """Hashes of weights and tokenizer, and the revision of a model of the Hugging Face hub."""
        return identify(self.folder, self.sha256, self.tokenizer.sha256)

    def __call__(
        self, sentences: Sequence[str], tokens: int | None = None
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """Returns the states of sentences, and which tokens are real.

        They are padded, and cut, to `tokens`; without it padded to a multiple of `PADDED_STEP`. New
        sentences are encoded.
        """
        with self._lock:
            self.encode(sentences)
            states_of = [self.cache[sentence] for sentence in sentences]
        if tokens is None:
            tokens = round_up(max(map(len, states_of)), PADDED_STEP)
            tokens = min(tokens, self.max_tokens)

        # [k t l e]
        states = np.zeros((len(sentences), tokens, len(self.layers), self.dim), np.float16)
        mask = np.zeros((len(sentences), tokens), bool)
        for row, state in enumerate(states_of):
            states[row, : len(state)] = state[:tokens]
            mask[row, : len(state)] = True
        return states, mask

    def states_of(self, sentence: str) -> Float16[np.ndarray, "t l e"]:
        """The states of a sentence that was encoded."""
        return self.cache[sentence]

    def count_tokens(self, sentence: str) -> int:
        """The number of tokens of a sentence that was encoded."""
        return self.cache.num_tokens(sentence)

    def encode(self, sentences: Iterable[str]) -> int:
        """Encodes the sentences that are new; returns how many these were."""
        with self._lock:
            token_ids = self._find_unencoded(sentences)
            if not token_ids:
                return 0
            with show_progress("encoding sentences", len(token_ids)) as advance:
                states = self.encoder.encode_by_length(token_ids, advance=advance)
                self.cache.add(states, token_ids)
            self.cache.save()
            return len(token_ids)

    def for_request(
        self, sentences: Sequence[str]
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """Returns the states of the few sentences of one request, and which tokens are real.

        They are encoded in batches of few shapes and padded to the token limit, so that nothing
        compiles anew. The latest `MAX_REQUEST_SENTENCES` stay in memory.
        """
        with self._lock:
            token_ids = self._find_unencoded(sentences)
            names = list(token_ids)
            for start in range(0, len(names), REQUEST_ROWS[-1]):
                batch = names[start : start + REQUEST_ROWS[-1]]
                ids = [token_ids[sentence] for sentence in batch]
                rows = next(n for n in REQUEST_ROWS if n >= len(batch))
                length = next(n for n in self._request_lengths if n >= max(map(len, ids)))
                states = self.encoder(ids, rows=rows, length=length)
                self.cache.add_request(dict(zip(batch, states, strict=True)))

            # All sentences have states now, so this call only looks them up and pads them. It comes
            # before the oldest sentences go, since a large request may have more than stay.
            result = self(sentences, self.max_tokens)
            self._requested += names
            for oldest in self._requested[:-MAX_REQUEST_SENTENCES]:
                self.cache.forget(oldest)
                self.truncated.discard(oldest)
            self._requested = self._requested[-MAX_REQUEST_SENTENCES:]
            return result

    def warm_up(self) -> None:
        """Compiles all that `for_request` needs."""
        for rows in REQUEST_ROWS:
            for length in self._request_lengths:
                self.encoder([], rows=rows, length=length)

    def tokens(
        self, sentences: Sequence[str]
    ) -> tuple[Int[np.ndarray, "k t"], Bool[np.ndarray, "k t"]]:
        """Returns token ids and which of them are real, as the language model takes them."""
        ids = self.tokenizer(sentences)
        return pad_ids(ids, len(ids), max(1, *map(len, ids)))

    def cut_off(self, sentence: str) -> str:
        """The words at the end of a sentence that are beyond the limit."""
        return self.tokenizer.cut_off(sentence)

    def token_quantile(self, sentences: Iterable[str], share: float = 1.0) -> int:
        """The number of tokens that this share of the encoded sentences does not exceed."""
        return quantile([self.count_tokens(sentence) for sentence in sentences], share)

    def embeddings(self, names: tuple[str, ...]) -> Float32[np.ndarray, "v e"]:
        """One vector for each name from the last of the layers, centred and with unit variance.

        The vector is the mean over the tokens, or the last token where only that one has read the
        whole name. The states of a language model share a large common part; without it names
        differ from the first training steps on.
        """
        self.encode(names)
        vectors = []
        for name in names:
            states = self.states_of(name)[:, -1].astype(np.float32)
            vectors.append(states.mean(0) if self.encoder.sizes.pool == "mean" else states[-1])

        pooled = np.stack(vectors)
        centred = pooled - pooled.mean(0)
        return centred / max(float(centred.std()), 1e-6)

    def truncation_summary(self) -> str:
        """One line on how many sentences were cut."""
        total = len(self.cache)
        cut = len(self.truncated)
        share = cut / max(1, total)
        return f"{total} unique sentences, {cut} cut at {self.max_tokens} tokens ({share:.2%})"

    def _find_unencoded(self, sentences: Iterable[str]) -> dict[str, list[int]]:
        """The sentences whose states must be computed, with their token ids.

        Tokenizing them adds those beyond the limit to `truncated`. Where earlier runs stored the
        states of a sentence, the cache finds them on disk, and it is left out.
        """
        new = [sentence for sentence in dict.fromkeys(sentences) if sentence not in self.cache]
        if not new:
            return {}
        token_ids = dict(zip(new, self.tokenizer(new), strict=True))
        loaded = self.cache.load(token_ids)
        return {sentence: ids for sentence, ids in token_ids.items() if sentence not in loaded}


def open_language_model(
    text: TextConfig, name: str, trained: Mapping[str, Any], user: str
) -> TextStates:
    """Opens the language model of a run or an export.

    Args:
        name: that of the model, or its folder.
        trained, user: as in `check_language_model`.

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


def quantile(counts: Sequence[int], share: float) -> int:
    """The number that this share of the counts does not exceed; 1 if there are none."""
    return int(np.quantile(counts, share, method="higher")) if counts else 1


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step
