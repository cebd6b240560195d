"""Token states of the frozen language model, computed once per unique sentence and kept (feature_cache.py)."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float16, Float32, Int
from tokenizers import Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from r2sm_jax.config import MatmulPrecision
from r2sm_jax.data.cache import FeatureCache, Place, digest, to_float16
from r2sm_jax.errors import InputError, refuse
from r2sm_jax.models.hub import VOCABULARIES, find_model, weights_sha256
from r2sm_jax.models.matmul import products
from r2sm_jax.models.text_encoder import TextSizes, load_text_encoder
from r2sm_jax.training.sharding import allgather, shard_locally

BATCH_TOKENS = 2048
SHARED = 1 << 14
"""Sentences that a process encodes before it shares their states."""
LENGTH_STEP = 4
"""Sentences are encoded in batches of equal padded length, a multiple of this: few shapes, little padding."""
PADDED_STEP = 32
REQUEST_ROWS = (1, 8, 64)
REQUEST_LENGTHS = (16, 32)
"""Sentences of a request are padded to one of these, or to the token limit."""
REQUEST_KEPT = 1024
"""Sentences of requests that are kept, so that a server's memory does not grow."""
KEPT_BYTES = 128 << 20
"""Of states in memory; others are in files."""
POLITE = re.compile(r"(?:(?:please|kindly)\b[,:]?\s+)*", re.IGNORECASE)
"""What is not read at the start of a sentence; nor are full stops at its end. Decisions changed with either."""
PROBE = "Only what's VISIBLE of the naïve café's mug-like cups: (12.5 %), half-hidden behind the \u6771\u4eac sign?"


class TextStates:
    """`states, mask = texts(["...", ...])`: new sentences are encoded, known ones looked up. Threads may share it.

    States are float16 [t l e], kept without padding. Where hidden layers are raw residual sums (CLIP, SigLIP,
    decoder-only), each token state is divided by its root mean square: some are in the thousands, too large for float16
    and for the heads.

    The tokenizer needs no padding token, since padding is masked or comes after all that is read. Only SigLIP reads its
    padding. We keep its states of the sentence and behind them that of the last padding token, which it pools.
    """

    def __init__(
        self,
        name: str,
        *,
        layers: tuple[int, ...],
        max_tokens: int,
        cache: str | None = None,
        fsdp: int = 1,
    ):
        """`cache`: folder of states that earlier runs computed (feature_cache.py); new ones are added. `fsdp`: devices
        of this machine that share the model's weights. Raises InputError if the model cannot be had or read, or does
        not have these layers or so many tokens."""
        self.folder: Path = find_model(name, "--model.text.name")
        encoder = load_text_encoder(self.folder)
        sizes = encoder.sizes
        self.sha256 = weights_sha256(self.folder)
        self.tokenizer = load_tokenizer(self.folder, sizes)
        if not all(0 <= layer <= sizes.depth for layer in layers):
            raise InputError(
                f"--model.text.layers {layers}: {name} has the layers 0 to {sizes.depth}"
            )
        if max_tokens > sizes.max_tokens:
            raise InputError(
                f"--model.text.max-tokens {max_tokens}: {name} reads at most {sizes.max_tokens} tokens"
            )
        self.layers, self.dim, self.pool, self.max_tokens = (
            layers,
            sizes.dim,
            sizes.pool,
            max_tokens,
        )
        graphdef, weights = nnx.split(encoder)
        self.weights = shard_locally(fsdp, weights)
        self._encoder = _compiled(graphdef, layers)
        self._cache = (
            FeatureCache(Path(cache), digest("text", self.sha256, layers)) if cache else None
        )
        self._states: dict[str, np.ndarray | Place] = {}
        self._room = KEPT_BYTES
        self._requested: list[str] = []
        self._lock = threading.RLock()
        self.truncated: set[str] = set()

    @property
    def identity(self) -> dict[str, str | None]:
        """Hashes of weights and tokenizer, and the revision where they come from the Hugging Face hub."""
        revision = self.folder.name if self.folder.parent.name == "snapshots" else None
        return {
            "revision": revision,
            "sha256": self.sha256,
            "tokenizer_sha256": tokenizer_sha256(self.tokenizer),
        }

    def __call__(
        self, sentences: Sequence[str], tokens: int | None = None
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """States of known or new sentences, and which tokens are real.

        Padded to `tokens`; without it to a multiple of `PADDED_STEP`, so that few shapes occur.
        """
        with self._lock:
            if any(sentence not in self._states for sentence in sentences):
                self.encode(sentences)
            known = [self.states_of(sentence) for sentence in sentences]
        length = tokens or min(self.max_tokens, _round_up(max(map(len, known)), PADDED_STEP))
        states = np.zeros((len(sentences), length, len(self.layers), self.dim), np.float16)
        mask = np.zeros((len(sentences), length), bool)
        for row, state in enumerate(known):
            states[row, : len(state)], mask[row, : len(state)] = state[:length], True
        return states, mask

    def states_of(self, sentence: str) -> Float16[np.ndarray, "t l e"]:
        """The states of a sentence that was encoded."""
        kept = self._states[sentence]
        return kept.read() if isinstance(kept, Place) else kept

    def count_tokens(self, sentence: str) -> int:
        """Of a sentence that was encoded."""
        return self._states[sentence].shape[0]

    def encode(self, sentences: Iterable[str], *, kind: MatmulPrecision = "float32") -> int:
        """Encodes and keeps the sentences that neither memory nor files have; returns how many those were.

        `kind`: how dense layers multiply (cpu.py).
        """
        with self._lock:
            new = self._not_known(sentences)
            size = 2 * len(self.layers) * self.dim * sum(max(len(x), 1) for x in new.values())
            states = self._encoded(new, kind)
            if self._cache is not None:
                self._cache.make_room("sentences", len(new), size)
                self._cache.add(
                    (_key(new[sentence]), (to_float16(array),)) for sentence, array in states
                )
                self._states |= {
                    sentence: self._cache.place(_key(ids)) for sentence, ids in new.items()
                }
            else:
                self._keep(states, size)
            return len(new)

    def _encoded(
        self, new: dict[str, list[int]], kind: MatmulPrecision
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The states of sentences of equal padded length after one another."""

        def padded_length(sentence: str) -> int:
            return _round_up(max(len(new[sentence]), 1), LENGTH_STEP)

        for length, group in groupby(sorted(new, key=padded_length), key=padded_length):
            group, rows = list(group), max(1, BATCH_TOKENS // length)
            for start in range(0, len(group), rows):
                batch = {sentence: new[sentence] for sentence in group[start : start + rows]}
                yield from self._encode_batch(batch, rows, length, kind)

    def _keep(self, states: Iterable[tuple[str, np.ndarray]], size: int) -> None:
        """Keeps so many bytes of states in memory, if there is room, else in files that end with this process."""
        if size <= self._room:
            self._states |= states
            self._room -= size
            return
        # Its files stay readable while they are open; Windows does not delete them then.
        with TemporaryDirectory(prefix="r2sm_jax_", ignore_cleanup_errors=True) as folder:
            files, numbers = FeatureCache(Path(folder), "states"), dict[str, str]()
            files.add(
                (numbers.setdefault(sentence, str(len(numbers))), (array,))
                for sentence, array in states
            )
            self._states |= {sentence: files.place(number) for sentence, number in numbers.items()}

    def encode_together(
        self, sentences: Iterable[str], *, kind: MatmulPrecision = "float32"
    ) -> None:
        """As `encode`, by all processes: each encodes its share of the same sentences and gives its states to all."""
        sentences, processes = list(dict.fromkeys(sentences)), jax.process_count()
        for start in range(0, len(sentences), SHARED * processes):
            mine = sentences[start + jax.process_index() : start + SHARED * processes : processes]
            self.encode(mine, kind=kind)
            given = {name: self.states_of(name) for name in mine if processes > 1}
            for states, truncated in allgather((given, self.truncated)):
                new = {name: state for name, state in states.items() if name not in self._states}
                self._keep(new.items(), sum(state.nbytes for state in new.values()))
                self.truncated |= truncated

    def for_request(
        self, sentences: Sequence[str]
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """As a call, for the few sentences of one request: batches of few shapes, padded to the token limit. The latest
        `REQUEST_KEPT` new sentences are kept."""
        with self._lock:
            new = list(self._not_known(sentences).items())
            for start in range(0, len(new), REQUEST_ROWS[-1]):
                batch = dict(new[start : start + REQUEST_ROWS[-1]])
                longest = max(map(len, batch.values()))
                rows = next(n for n in REQUEST_ROWS if n >= len(batch))
                length = next(n for n in self._request_lengths() if n >= longest)
                self._states |= self._encode_batch(batch, rows, length)
            found = self(sentences, self.max_tokens)
            self._requested += [sentence for sentence, _ in new]
            for oldest in self._requested[:-REQUEST_KEPT]:
                self._states.pop(oldest, None)
                self.truncated.discard(oldest)
            self._requested = self._requested[-REQUEST_KEPT:]
            return found

    def warm_up(self) -> None:
        """Compiles all that `for_request` needs."""
        for rows, length in product(REQUEST_ROWS, self._request_lengths()):
            list(self._encode_batch({}, rows, length))

    def _request_lengths(self) -> list[int]:
        return [*(n for n in REQUEST_LENGTHS if n < self.max_tokens), self.max_tokens]

    def tokens(
        self, sentences: Sequence[str]
    ) -> tuple[Int[np.ndarray, "k t"], Bool[np.ndarray, "k t"]]:
        """Ids up to the limit and which of them are real, as the language model takes them."""
        with self._lock:
            ids = self._tokenize(sentences)
        return self._pad(ids, len(ids), max(1, *map(len, ids)))

    def token_quantile(self, sentences: Iterable[str], share: float = 1.0) -> int:
        """The number of tokens that this share of the encoded sentences does not exceed."""
        counts = [self.count_tokens(sentence) for sentence in sentences]
        return int(np.quantile(counts, share, method="higher")) if counts else 1

    def embeddings(self, names: tuple[str, ...]) -> Float32[np.ndarray, "v e"]:
        """One last-layer state for each name, centred and with unit variance.

        It is the mean over the tokens, or the state of the last token where only that has read the whole name. The
        states of a language model share a large common part; without it names differ from the first steps on.
        """
        self.encode(names)
        states = [self.states_of(name)[:, -1].astype(np.float32) for name in names]
        pooled = np.stack([state.mean(0) if self.pool == "mean" else state[-1] for state in states])
        centred = pooled - pooled.mean(0)
        return centred / max(float(centred.std()), 1e-6)

    def word_of_tokens(
        self, sentence: str, words: Sequence[Sequence[int]]
    ) -> Int[np.ndarray, " t"]:
        """For each token that is read, the word whose characters `start, end` hold its middle; -1 for special ones."""
        spans = np.array(self._spans(sentence)[: self.max_tokens] or [(0, 0)])
        middles = np.where(spans[:, 0] < spans[:, 1], spans.mean(1), -1)
        found = np.full(len(spans), -1)
        for word, (first, last) in enumerate(words):
            found[(first <= middles) & (middles <= last)] = word
        return found

    def cut_off(self, sentence: str) -> str:
        """The words at the end of a sentence that are beyond the token limit, the first of them maybe in part."""
        cut = [start for start, end in self._spans(sentence)[self.max_tokens :] if start < end]
        if not cut:
            return ""
        start = cut[0] + (
            sentence[cut[0]] == " "
        )  # some tokens begin with the space before the word
        return sentence[sentence.rfind(" ", 0, start) + 1 :]

    def truncation_summary(self) -> str:
        """One line on how many sentences were cut."""
        share = len(self.truncated) / max(1, len(self._states))
        return f"{len(self._states)} unique sentences, {len(self.truncated)} cut at {self.max_tokens} tokens ({share:.2%})"

    def _spans(self, sentence: str) -> list[tuple[int, int]]:
        """First and last character of every token, (0, 0) of special ones: of those up to the limit, then of others."""
        skipped = sentence.rfind(read_part(sentence))  # "please" of "please please" is the second
        with self._lock:
            (read,) = self._encodings([sentence])
        spans = [span for part in (read, *read.overflowing) for span in part.offsets]
        return [(start + skipped, end + skipped) if start < end else (0, 0) for start, end in spans]

    def _tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        """Ids up to the limit."""
        encodings = self._encodings(sentences)
        self.truncated |= {
            s for s, encoding in zip(sentences, encodings, strict=True) if encoding.overflowing
        }
        return [encoding.ids for encoding in encodings]

    def _encodings(self, sentences: Sequence[str]) -> Sequence[Encoding]:
        """What is longer than the limit is cut before the tokens that end every sentence, and in `overflowing`."""
        read = [read_part(sentence) for sentence in sentences]
        return self.tokenizer(read, truncation=True, max_length=self.max_tokens).encodings or []

    def _not_known(self, sentences: Iterable[str]) -> dict[str, list[int]]:
        """Ids of the sentences that neither memory nor files have."""
        names = [sentence for sentence in dict.fromkeys(sentences) if sentence not in self._states]
        new = dict(zip(names, self._tokenize(names), strict=True)) if names else {}
        if self._cache is None:
            return new
        for sentence, key in {sentence: _key(ids) for sentence, ids in new.items()}.items():
            if key in self._cache:
                self._states[sentence] = self._cache.place(key)
                del new[sentence]
        return new

    def _encode_batch(
        self, batch: dict[str, list[int]], rows: int, length: int, kind: MatmulPrecision = "float32"
    ) -> Iterator[tuple[str, Float16[np.ndarray, "t l e"]]]:
        """Encodes a batch that is padded to `rows` sentences of `length` tokens."""
        ids, mask = self._pad(list(batch.values()), rows, length)
        states = np.asarray(self._encoder(self.weights, ids, mask, kind))
        for row, (sentence, ids) in enumerate(batch.items()):
            yield sentence, states[row, : max(len(ids), 1)].copy()

    def _pad(
        self, sentences: Sequence[Sequence[int]], rows: int, length: int
    ) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
        ids = np.full((rows, length), self.tokenizer.pad_token_id or 0, np.int32)
        mask = np.zeros((rows, length), bool)
        mask[:, 0] = (
            True  # a sentence without tokens (decoder-only models add none) is its first padding token
        )
        for row, tokens in enumerate(sentences):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
        return ids, mask


def read_part(sentence: str) -> str:
    """What the language model gets of a sentence: all but polite words at its start and full stops at its end. The
    sentence itself where nothing would be left."""
    polite = POLITE.match(sentence)
    return sentence[polite.end() if polite else 0 :].rstrip(". ") or sentence


@lru_cache(maxsize=8)
def _compiled(graphdef: nnx.GraphDef, layers: tuple[int, ...]) -> Callable[..., jax.Array]:
    """The language model, shared by all `TextStates` of equal models."""

    @partial(jax.jit, static_argnames="kind")
    def states(
        weights: nnx.State, ids: jax.Array, mask: jax.Array, kind: MatmulPrecision
    ) -> jax.Array:
        with products(kind):
            return nnx.merge(graphdef, weights).float16_states(ids, mask, layers)

    return states


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _key(ids: list[int]) -> str:
    return digest(np.asarray(ids, np.int32))


def load_tokenizer(folder: Path, sizes: TextSizes) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises InputError if it is missing or unreadable, or has
    ids that the model has no embedding for."""
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise InputError(f"{folder}: tokenizer.json is missing; a language-model folder needs it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever the many tokenizers raise on a damaged file
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{folder}: its tokenizer cannot be read ({line})") from None
    tokenizer.truncation_side = "right"
    largest = max(tokenizer.get_vocab().values())
    problems = {
        "has no tokenizer.json and cannot be converted to one; add the file": not tokenizer.is_fast,
        f"has ids up to {largest}, the model {sizes.vocab_size} embeddings; take the tokenizer that belongs to it": largest
        >= sizes.vocab_size,
    }
    refuse({f"{folder}: its tokenizer {problem}": found for problem, found in problems.items()})
    return tokenizer


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what a tokenizer does, whatever files it comes in: its tokens with their ids, and the ids of `PROBE`."""
    known = sorted(tokenizer.get_vocab().items()), tokenizer(PROBE)["input_ids"]
    return sha256(json.dumps(known).encode()).hexdigest()
