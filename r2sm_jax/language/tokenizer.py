"""From sentences to token ids: what of a sentence the language model reads, and where it is cut.

Also whether model and tokenizer are those of training. It loads no JAX.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from tokenizers import Encoding, Tokenizer

from r2sm_jax.errors import InputError
from r2sm_jax.language.target import target_words
from r2sm_jax.models.hub import TOKENIZER, VOCABULARIES, in_short

POLITE_WORDS = re.compile(r"(?:(?:please|kindly)\b[,:]?\s+)*", re.IGNORECASE)
"""Polite words at the start of a sentence. They do not change what it asks for."""
NO_TOKEN = -1
"""Takes the place of padding among token ids: 0 is a word of some language models."""
SENTENCES_AT_ONCE = 10_000
"""An encoding of the tokenizer takes 2.6 kB, of which little is needed."""
PROBE = (
    "Only what's VISIBLE of the naïve café's mug-like cups: (12.5 %), half-hidden behind the "
    "\u6771\u4eac sign?"
)
"""A sentence that tokenizers with different rules split differently."""


def read_part(sentence: str) -> str:
    """Returns the part of a sentence that the language model reads.

    Polite words at the start and full stops at the end are left out, since either could flip the
    decision about the mask type. If nothing would be left, the whole sentence is read.
    """
    polite = POLITE_WORDS.match(sentence)
    start = polite.end() if polite else 0
    return sentence[start:].rstrip(". ") or sentence


def write_tokenizer(source: Path, target: Path) -> None:
    """Writes a copy of a tokenizer.json that does not pad.

    Published ones may pad to 128 tokens, and other programs would take the padding for words.
    """
    values = json.loads(source.read_text("utf-8"))
    values["padding"] = None
    target.write_text(json.dumps(values, ensure_ascii=False), "utf-8")


class QueryTokenizer:
    """Turns sentences into token ids, up to a limit.

    Attributes:
        max_tokens: The limit; what is longer is cut at its end.
        sha256: Hash of what the tokenizer does, see `hash_tokenizer`.
    """

    def __init__(
        self, folder: Path, *, vocab_size: int, max_tokens: int, expected_sha256: str | None = None
    ):
        """Opens the tokenizer of a model folder.

        Args:
            folder: the folder.
            expected_sha256: of the tokenizer that a run was trained with. If the file
                tokenizer.json alone gives that one, `transformers` is not imported, which takes two
                seconds.

        Raises InputError if the tokenizer is missing or does not belong to the model.
        """
        tokenizer = read_tokenizer_file(folder, expected_sha256)
        if tokenizer is None:
            tokenizer = load_tokenizer(folder, vocab_size)
        self.sha256 = hash_tokenizer(tokenizer)
        tokenizer.enable_truncation(max_tokens)
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens

    def __call__(self, sentences: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each sentence."""
        ids: list[list[int]] = []
        for start in range(0, len(sentences), SENTENCES_AT_ONCE):
            part = sentences[start : start + SENTENCES_AT_ONCE]
            ids += [encoding.ids for encoding in self._encode(part)]
        return ids

    def count(self, sentences: Sequence[str]) -> list[int]:
        """The numbers of tokens of sentences, up to the limit."""
        return [len(ids) for ids in self(sentences)]

    def spans(self, sentence: str) -> list[tuple[int, int]]:
        """Returns where each token lies in a sentence: its first character and the one after its
        last; (0, 0) for the tokens that mark its start and end."""
        (encoding,) = self._encode([sentence])
        # As in `cut_off`, the last place of the part that is read is the right one.
        shift = sentence.rfind(read_part(sentence))
        return [(a + shift, b + shift) if a < b else (0, 0) for a, b in encoding.offsets]

    def target(self, sentence: str, logits: Float[np.ndarray, " t"]) -> str | None:
        """Returns the words that name what is meant, by a logit of each token; None if none do."""
        return target_words(sentence, self.spans(sentence), logits)

    def cut_off(self, sentence: str) -> str:
        """Returns the words at the end of a sentence that are beyond the limit; the first may be a
        part."""
        (encoding,) = self._encode([sentence])
        starts = []
        for part in encoding.overflowing:
            # Special tokens have the empty span (0, 0).
            starts += [start for start, end in part.offsets if start < end]
        if not starts:
            return ""

        # Offsets count from the start of the part that is read. What is left out at the end never
        # repeats that part, so its last place in the sentence is the right one: of "please please"
        # the second word is read.
        start = sentence.rfind(read_part(sentence)) + starts[0]
        if sentence[start] == " ":  # some tokens begin with the space before the word
            start += 1
        return sentence[sentence.rfind(" ", 0, start) + 1 :]

    def _encode(self, sentences: Sequence[str]) -> Sequence[Encoding]:
        """Encodings up to the limit; the rest of a longer sentence is in `overflowing`."""
        return self._tokenizer.encode_batch([read_part(sentence) for sentence in sentences])


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """Hashes what a tokenizer does: its vocabulary, and the ids of one hard sentence."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return sha256(json.dumps((vocabulary, tokenizer.encode(PROBE).ids)).encode()).hexdigest()


def read_tokenizer_file(folder: Path, expected_sha256: str | None) -> Tokenizer | None:
    """Reads the tokenizer.json of a folder; None if it has another hash."""
    if expected_sha256 is None or not (folder / TOKENIZER).is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception:  # `load_tokenizer` says what is wrong with the file
        return None
    _remove_limits(tokenizer)
    return tokenizer if hash_tokenizer(tokenizer) == expected_sha256 else None


def _remove_limits(tokenizer: Tokenizer) -> None:
    """Removes the limit and the padding that a file may ask for."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Reads the tokenizer of a model folder with `transformers`.

    Raises InputError if it is missing or unreadable, or has ids that the model has no embedding
    for.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in VOCABULARIES):
        raise InputError(f"{folder}: tokenizer.json is missing; a language-model folder needs it")
    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the many tokenizers raise all kinds of errors on a damaged file
        raise InputError(f"{folder}: its tokenizer cannot be read ({in_short(error)})") from None

    tokenizer = loaded.backend_tokenizer
    _remove_limits(tokenizer)
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise InputError(
            f"{folder}: its tokenizer has ids up to {largest}, the model {vocab_size} embeddings; "
            "take the tokenizer that belongs to it"
        )
    return tokenizer


def pad_ids(
    token_ids: Sequence[Sequence[int]], rows: int, length: int
) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Pads token ids with 0. Returns them, and which of them are real.

    Any id can be the padding: encoders mask it, and in decoder-only models no real token sees what
    comes after it. A decoder-only model adds no tokens of its own, so a sentence may have none. Its
    first padding token counts as real then, since each sentence needs a state.
    """
    ids = np.zeros((rows, length), np.int32)
    mask = np.zeros((rows, length), bool)
    mask[:, 0] = True
    for row, tokens in enumerate(token_ids):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    return ids, mask


# Identity


def identify(folder: Path, sha256: str, tokenizer_sha256: str) -> dict[str, str | None]:
    """Returns hashes of weights and tokenizer, and the revision of a model of the hub."""
    is_snapshot = folder.parent.name == "snapshots"
    return {
        "revision": folder.name if is_snapshot else None,
        "sha256": sha256,
        "tokenizer_sha256": tokenizer_sha256,
    }


def check_language_model(
    folder: Path, identity: Mapping[str, str | None], trained: Mapping[str, Any], user: str
) -> None:
    """Raises InputError if a language model or its tokenizer is another one than in training.

    Args:
        folder: that of the model, for messages.
        identity: what `identify` says of it.
        trained: the same in training, with its `name`; a hash that is missing is not compared.
        user: the run or the export, for messages.
    """
    # Both count: another tokenizer gives other tokens to the same weights.
    for part, key in (("weights have", "sha256"), ("tokenizer has", "tokenizer_sha256")):
        if trained.get(key, identity[key]) == identity[key]:
            continue
        revision = f", revision {trained['revision']}" if trained.get("revision") else ""
        raise InputError(
            f"{folder}: its {part} sha256 {identity[key]}, but {user} needs {trained[key]}; "
            f"get the {trained['name']} that it was trained with{revision}"
        )
