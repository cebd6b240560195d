"""Token states of the frozen language model, computed once for each sentence.

QueryTokenizer      sentence -> token ids, and the end of a sentence that is cut off
FrozenTextEncoder   token ids -> token states, compiled for a few shapes
TextStateCache      sentence -> token states, in memory or in files
TextStates          the three together: what training and the predictor call
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float16, Float32, Int
from tokenizers import Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from r2sm_jax.config import MatmulPrecision
from r2sm_jax.data.cache import FeatureCache, StoredArray, digest, to_float16
from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import VOCABULARIES, find_model, weights_sha256
from r2sm_jax.models.matmul import JAX_PRECISION, set_matmul_precision
from r2sm_jax.models.text_encoder import load_text_encoder

BATCH_TOKENS = 2048
"""Tokens that are encoded at once, padding included."""
LENGTH_STEP = 4
"""Sentences of similar length are encoded together, padded to a multiple of this: few shapes are
compiled and little padding is computed."""
PADDED_STEP = 32
"""States of a call are padded to a multiple of this, so that the mask-type head compiles for few
shapes."""
REQUEST_ROWS = (1, 8, 64)
REQUEST_LENGTHS = (16, 32)
"""The sentences of a request are padded to one of these sizes, or to the token limit."""
MAX_REQUEST_SENTENCES = 1024
"""Sentences of requests that stay in memory, so that the memory of a server does not grow."""
MAX_MEMORY_BYTES = 128 << 20
"""States in memory. The 93,000 sentences of a default run have 3 GB of states."""
NO_TOKEN = -1
"""Takes the place of padding among token ids: 0 is a word of some language models."""
POLITE_WORDS = re.compile(r"(?:(?:please|kindly)\b[,:]?\s+)*", re.IGNORECASE)
PROBE = (
    "Only what's VISIBLE of the naïve café's mug-like cups: (12.5 %), half-hidden behind the "
    "\u6771\u4eac sign?"
)
"""A sentence that tokenizers with different rules split differently."""


def read_part(sentence: str) -> str:
    """The part of a sentence that the language model reads.

    Polite words at the start and full stops at the end are left out, since either could flip the
    mask type. If nothing would be left, the whole sentence is read.
    """
    polite = POLITE_WORDS.match(sentence)
    start = polite.end() if polite else 0
    return sentence[start:].rstrip(". ") or sentence


class QueryTokenizer:
    """Sentences -> token ids up to a limit.

    Attributes:
        tokenizer: The tokenizer of the language model.
        max_tokens: The limit; what is longer is cut at its end.
        truncated: The sentences that were cut.
    """

    def __init__(self, folder: Path, *, vocab_size: int, max_tokens: int):
        """Raises InputError if the tokenizer is missing or does not belong to the model."""
        self.tokenizer = load_tokenizer(folder, vocab_size)
        self.max_tokens = max_tokens
        self.truncated: set[str] = set()
        # The library's tokenizers keep the settings of a call, so threads take turns.
        self._lock = threading.Lock()

    @property
    def sha256(self) -> str:
        """Hash of what the tokenizer does: its vocabulary, and the ids of one hard sentence."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        ids = self.tokenizer(PROBE)["input_ids"]
        return sha256(json.dumps((vocabulary, ids)).encode()).hexdigest()

    def __call__(self, sentences: Sequence[str]) -> list[list[int]]:
        """The token ids of each sentence."""
        encodings = self._encode(sentences)
        for sentence, encoding in zip(sentences, encodings, strict=True):
            if encoding.overflowing:
                self.truncated.add(sentence)
        return [encoding.ids for encoding in encodings]

    def count(self, sentence: str) -> int:
        """The number of tokens of a sentence, up to the limit."""
        return len(self._encode([sentence])[0].ids)

    def padded(self, sentences: Sequence[str], length: int) -> Int[np.ndarray, "k t"]:
        """Token ids, cut or filled up to `length`; `NO_TOKEN` is in place of padding."""
        ids = np.full((len(sentences), length), NO_TOKEN, np.int32)
        for row, tokens in enumerate(self(sentences)):
            ids[row, : len(tokens)] = tokens[:length]
        return ids

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has a lock of its own."""
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    def cut_off(self, sentence: str) -> str:
        """The words at the end of a sentence that are beyond the limit; the first may be a part."""
        (encoding,) = self._encode([sentence])
        starts = []
        for part in encoding.overflowing:
            # Special tokens have the empty span (0, 0).
            starts += [start for start, end in part.offsets if start < end]
        if not starts:
            return ""

        # Offsets count from where reading starts: "please" of "please please" is the second one.
        start = sentence.rfind(read_part(sentence)) + starts[0]
        if sentence[start] == " ":  # some tokens begin with the space before the word
            start += 1
        return sentence[sentence.rfind(" ", 0, start) + 1 :]

    def _encode(self, sentences: Sequence[str]) -> Sequence[Encoding]:
        """Encodings up to the limit; the rest of a longer sentence is in `overflowing`."""
        texts = [read_part(sentence) for sentence in sentences]
        with self._lock:
            encoded = self.tokenizer(texts, truncation=True, max_length=self.max_tokens)
        return encoded.encodings or []


class FrozenTextEncoder:
    """Token ids -> token states of some hidden layers. Its weights are never trained.

    Attributes:
        sizes: Sizes of the language model.
        layers: The hidden layers whose states are given; 0 = the embeddings.
        weights: The weights, in the type of the file.
        sha256: Hash of the file of the weights.
        compute_states: The compiled function from weights, ids `[k t]`, mask `[k t]` and a
            precision to states `[k t l e]`.
    """

    def __init__(self, folder: Path, *, layers: tuple[int, ...]):
        """Raises InputError if the model cannot be read or does not have these layers."""
        encoder = load_text_encoder(folder)
        self.sizes = encoder.sizes
        self.layers = layers
        self.sha256 = weights_sha256(folder)
        if not all(0 <= layer <= self.sizes.depth for layer in layers):
            raise InputError(
                f"--model.text.layers {layers}: {folder} has the layers 0 to {self.sizes.depth}"
            )

        graphdef, self.weights = nnx.split(encoder)

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
        """States `[b k t l e]` of token ids `[b k t]` with `NO_TOKEN` in place of padding, on the
        devices of `weights`."""
        rows = ids.reshape(-1, ids.shape[-1])
        mask = (rows != NO_TOKEN).at[:, 0].set(True)  # a sentence without tokens, as in `pad_ids`
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
        """The states of each sentence, without padding; the batch is padded to `rows` x
        `length`."""
        ids, mask = pad_ids(token_ids, rows, length)
        states = np.asarray(self.compute_states(self.weights, ids, mask, precision))
        counts = [max(len(tokens), 1) for tokens in token_ids]
        return [states[row, :count].copy() for row, count in enumerate(counts)]


def pad_ids(
    token_ids: Sequence[Sequence[int]], rows: int, length: int
) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Ids padded with 0, and which of them are real.

    The padding id does not matter: padding is masked, or comes after all that is read. A sentence
    without tokens (decoder-only models add none of their own) is its first padding token.
    """
    ids = np.zeros((rows, length), np.int32)
    mask = np.zeros((rows, length), bool)
    mask[:, 0] = True
    for row, tokens in enumerate(token_ids):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    return ids, mask


class TextStateCache:
    """Token states by sentence: in memory as long as they are few, else in files.

    With a folder all states are in its files, where later runs find them by their token ids.
    Without one, the files are temporary.
    """

    def __init__(self, folder: Path | None, model: str):
        """`model`: hash of the language model and its layers."""
        self._files = None if folder is None else FeatureCache(folder, model)
        self._states: dict[str, np.ndarray | StoredArray] = {}
        self._memory_left = MAX_MEMORY_BYTES

    def __contains__(self, sentence: str) -> bool:
        return sentence in self._states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, sentence: str) -> Float16[np.ndarray, "t l e"]:
        states = self._states[sentence]
        return states.read() if isinstance(states, StoredArray) else states

    def num_tokens(self, sentence: str) -> int:
        """The number of tokens of a sentence, without reading its states."""
        return self._states[sentence].shape[0]

    def load(self, token_ids: Mapping[str, list[int]]) -> set[str]:
        """Takes the sentences that earlier runs encoded from the folder; returns which these
        are."""
        loaded = set()
        if self._files is not None:
            for sentence, ids in token_ids.items():
                key = key_of_ids(ids)
                if key in self._files:
                    self._states[sentence] = self._files.stored(key)
                    loaded.add(sentence)
        return loaded

    def add(
        self,
        states: Iterable[tuple[str, np.ndarray]],
        token_ids: Mapping[str, list[int]],
        num_bytes: int,
    ) -> None:
        """Adds the states of new sentences as they are computed, `num_bytes` in all.

        Raises InputError if the folder of the cache has no room for them.
        """
        if self._files is not None:
            self._files.make_room("sentences", len(token_ids), num_bytes)
            self._write(self._files, states, token_ids)
        elif num_bytes <= self._memory_left:
            self._states |= dict(states)
            self._memory_left -= num_bytes
        else:
            # Open files stay readable when their folder is gone, so that a process that is killed
            # leaves nothing behind. Windows keeps the folder.
            with TemporaryDirectory(prefix="r2sm_jax_", ignore_cleanup_errors=True) as folder:
                self._write(FeatureCache(Path(folder), "states"), states, token_ids)

    def add_request(self, states: Mapping[str, np.ndarray]) -> None:
        """Adds the states of a request in memory."""
        self._states |= states

    def forget(self, sentence: str) -> None:
        """Drops a sentence from memory."""
        self._states.pop(sentence, None)

    def _write(
        self,
        files: FeatureCache,
        states: Iterable[tuple[str, np.ndarray]],
        token_ids: Mapping[str, list[int]],
    ) -> None:
        files.add(
            (key_of_ids(token_ids[sentence]), (to_float16(array),)) for sentence, array in states
        )
        self._states |= {
            sentence: files.stored(key_of_ids(ids)) for sentence, ids in token_ids.items()
        }


def key_of_ids(ids: list[int]) -> str:
    """The key of a sentence in files: a hash of its token ids."""
    return digest(np.asarray(ids, np.int32))


class TextStates:
    """`states, mask = texts(["...", ...])`: new sentences are encoded, others are looked up.

    States are float16 `[t l e]`, without padding. Where hidden layers are sums over the residual
    blocks (decoder-only models), each token state is divided by its root mean square: some sums are
    in the thousands, too large for float16 and for the heads. Threads may share it.

    Attributes:
        folder: The folder of the language model.
        tokenizer: Sentences -> token ids.
        encoder: Token ids -> token states.
        cache: The states of all sentences so far.
    """

    def __init__(
        self, name: str, *, layers: tuple[int, ...], max_tokens: int, cache_dir: str | None = None
    ):
        """`cache_dir`: folder of states that earlier runs computed; new ones are added.

        Raises InputError if the model cannot be had or read, or does not have these layers or so
        many tokens.
        """
        self.folder: Path = find_model(name, "--model.text.name")
        self.encoder = FrozenTextEncoder(self.folder, layers=layers)
        sizes = self.encoder.sizes
        if max_tokens > sizes.max_tokens:
            raise InputError(
                f"--model.text.max-tokens {max_tokens}: {name} reads at most {sizes.max_tokens} "
                "tokens"
            )
        self.tokenizer = QueryTokenizer(
            self.folder, vocab_size=sizes.vocab_size, max_tokens=max_tokens
        )
        model = digest("text", self.encoder.sha256, layers)
        self.cache = TextStateCache(Path(cache_dir) if cache_dir else None, model)

        self.max_tokens = max_tokens
        self.dim = sizes.dim
        self.layers = layers
        self._request_lengths = [n for n in REQUEST_LENGTHS if n < max_tokens]
        self._request_lengths.append(max_tokens)
        self._requested: list[str] = []
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
        """The sentences that were longer than the limit."""
        return self.tokenizer.truncated

    @property
    def identity(self) -> dict[str, str | None]:
        """Hashes of weights and tokenizer, and the revision of a model of the Hugging Face hub."""
        is_snapshot = self.folder.parent.name == "snapshots"
        return {
            "revision": self.folder.name if is_snapshot else None,
            "sha256": self.sha256,
            "tokenizer_sha256": self.tokenizer.sha256,
        }

    def __call__(
        self, sentences: Sequence[str], tokens: int | None = None
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """States of sentences, new ones too, and which tokens are real.

        They are padded, and cut, to `tokens`; without it padded to a multiple of `PADDED_STEP`.
        """
        with self._lock:
            self.encode(sentences)
            states_of = [self.cache[sentence] for sentence in sentences]
        if tokens is None:
            tokens = round_up(max(map(len, states_of)), PADDED_STEP)
            tokens = min(tokens, self.max_tokens)

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

    def encode(self, sentences: Iterable[str], *, precision: MatmulPrecision = "float32") -> int:
        """Encodes the sentences that are new; returns how many these were.

        `precision`: how dense layers multiply.
        """
        with self._lock:
            token_ids = self._new_sentences(sentences)
            num_tokens = sum(max(len(ids), 1) for ids in token_ids.values())
            num_bytes = 2 * num_tokens * len(self.layers) * self.dim
            states = self._encode_by_length(token_ids, precision)
            self.cache.add(states, token_ids, num_bytes)
            return len(token_ids)

    def for_request(
        self, sentences: Sequence[str]
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """As a call, for the few sentences of one request.

        They are encoded in batches of few shapes and padded to the token limit, so that nothing
        compiles anew. The latest `MAX_REQUEST_SENTENCES` stay in memory.
        """
        with self._lock:
            token_ids = self._new_sentences(sentences)
            names = list(token_ids)
            for start in range(0, len(names), REQUEST_ROWS[-1]):
                batch = names[start : start + REQUEST_ROWS[-1]]
                ids = [token_ids[sentence] for sentence in batch]
                rows = next(n for n in REQUEST_ROWS if n >= len(batch))
                length = next(n for n in self._request_lengths if n >= max(map(len, ids)))
                states = self.encoder(ids, rows=rows, length=length)
                self.cache.add_request(dict(zip(batch, states, strict=True)))

            # All states are in the cache now, where the oldest requests make room for new ones.
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
        """Token ids and which of them are real, as the language model takes them."""
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

    def _new_sentences(self, sentences: Iterable[str]) -> dict[str, list[int]]:
        """The sentences that the cache does not have, with their token ids."""
        new = [sentence for sentence in dict.fromkeys(sentences) if sentence not in self.cache]
        if not new:
            return {}
        token_ids = dict(zip(new, self.tokenizer(new), strict=True))
        loaded = self.cache.load(token_ids)
        return {sentence: ids for sentence, ids in token_ids.items() if sentence not in loaded}

    def _encode_by_length(
        self, token_ids: Mapping[str, list[int]], precision: MatmulPrecision
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The states of all sentences, those of equal padded length after one another."""

        def padded_length(sentence: str) -> int:
            return round_up(max(len(token_ids[sentence]), 1), LENGTH_STEP)

        for length, group in groupby(sorted(token_ids, key=padded_length), key=padded_length):
            names = list(group)
            rows = max(1, BATCH_TOKENS // length)
            for start in range(0, len(names), rows):
                batch = names[start : start + rows]
                ids = [token_ids[sentence] for sentence in batch]
                states = self.encoder(ids, rows=rows, length=length, precision=precision)
                yield from zip(batch, states, strict=True)


def quantile(counts: Sequence[int], share: float) -> int:
    """The number that this share of the counts does not exceed; 1 where there are none."""
    return int(np.quantile(counts, share, method="higher")) if counts else 1


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises InputError if it is missing or unreadable, or has ids that the model has no embedding
    for.
    """
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise InputError(f"{folder}: tokenizer.json is missing; a language-model folder needs it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the many tokenizers raise all kinds of errors on a damaged file
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{folder}: its tokenizer cannot be read ({lines[0]})") from None

    if not tokenizer.is_fast:
        raise InputError(
            f"{folder}: its tokenizer has no tokenizer.json and cannot be converted to one; add "
            "the "
            "file"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise InputError(
            f"{folder}: its tokenizer has ids up to {largest}, the model {vocab_size} embeddings; "
            "take the tokenizer that belongs to it"
        )
    tokenizer.truncation_side = "right"
    return tokenizer
