"""The decision alone: which mask sentences ask for, without an image.

Of an export only the mask-type head, the calibration and the language model are read, and BERT and
the heads are computed in NumPy (models/numpy_text.py). No part of the image model is built.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float16

from r2sm_jax.cli import from_json
from r2sm_jax.config import LEARNED_HEADS, ModelConfig, TextConfig
from r2sm_jax.data.language_model import check_language_model, identify
from r2sm_jax.data.tokenizer import QueryTokenizer, pad_ids
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import (
    Decision,
    TruncatedQuery,
    check_abstain,
    check_query,
    decide,
)
from r2sm_jax.inference.export_folder import (
    CONFIG,
    LANGUAGE_MODEL,
    WEIGHTS,
    check_version,
    find_folder,
    is_export,
    read_export_config,
)
from r2sm_jax.models.hub import find_model, read_tensors, weights_sha256
from r2sm_jax.models.numpy_text import HEADS, NumpyBert, Params, reads_bert
from r2sm_jax.query import REFERENCES

BATCH_SENTENCES = 8
"""Sentences that are computed at once, of similar length, so that little padding is computed. More
are no faster: matrix products have rows enough, and what is between them no longer fits the cache.
"""
HEAD = "head."
"""How the names of the head's weights begin."""


@runtime_checkable
class SentenceStates(Protocol):
    """What a `Decider` needs of a language model; `TextStates` is another one."""

    max_tokens: int

    def __call__(
        self, sentences: Sequence[str]
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]: ...

    def cut_off(self, sentence: str) -> str: ...


class BertStates:
    """The token states of sentences by a BERT in NumPy."""

    def __init__(self, folder: Path, text: TextConfig, tokenizer_sha256: str | None):
        """Opens a model folder. Raises InputError if it cannot be read."""
        self.folder = folder
        self.layers = text.layers
        self.max_tokens = text.max_tokens
        self.bert = NumpyBert(folder)
        self.tokenizer = QueryTokenizer(
            folder,
            vocab_size=self.bert.vocab_size,
            max_tokens=text.max_tokens,
            expected_sha256=tokenizer_sha256,
        )

    def cut_off(self, sentence: str) -> str:
        """The words at the end of a sentence that are beyond the limit."""
        return self.tokenizer.cut_off(sentence)

    def __call__(
        self, sentences: Sequence[str]
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """Returns the states of sentences, and which tokens are real. They are padded to the
        longest."""
        token_ids = self.tokenizer(sentences)
        ids, mask = pad_ids(token_ids, len(token_ids), max(map(len, token_ids)))
        return self.bert(ids, mask, self.layers), mask


class Decider:
    """Decides which mask sentences ask for: `decisions = decider(["...", ...])`."""

    def __init__(
        self,
        head: str,
        weights: Params | None = None,
        texts: SentenceStates | None = None,
        temperature: float = 1.0,
    ):
        """Takes the parts of a segmenter that read sentences.

        Args:
            head: `ModelConfig.head`: a learned head, or a reference that reads the sentence.
            weights: those of a learned head, in float32.
            texts: the language model of a learned head.
            temperature: divides its logits.
        """
        self.head = head
        self.weights = weights
        self.texts = texts
        self.temperature = temperature

    def __call__(self, sentences: Sequence[str], *, abstain: float = 0.0) -> list[Decision]:
        """Returns one decision for each sentence.

        Warns of sentences that are longer than the language model's limit (`TruncatedQuery`).

        Args:
            sentences: a single one may be given as a string.
            abstain: a probability that is nearer than this to 0.5 makes a decision undecided.

        Raises InputError for a sentence without words, or a margin beyond 0.5.
        """
        check_abstain(abstain)
        sentences = [sentences] if isinstance(sentences, str) else list(sentences)
        for sentence in sentences:
            check_query(sentence)
        if self.texts is None:
            logits = np.zeros(len(sentences))
        else:
            logits = self.logits(sentences)
            self._warn_of_truncated(sentences)
        decisions = []
        for sentence, logit in zip(sentences, logits, strict=True):
            decisions.append(decide(self.head, sentence, float(logit), abstain=abstain))
        return decisions

    def logits(self, sentences: Sequence[str]) -> Float[np.ndarray, " k"]:
        """Returns calibrated logits of a learned head: above 0, a sentence asks for amodal."""
        assert self.texts is not None and self.weights is not None
        logits = np.zeros(len(sentences), np.float32)
        order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
        for start in range(0, len(order), BATCH_SENTENCES):
            rows = order[start : start + BATCH_SENTENCES]
            states, mask = self.texts([sentences[row] for row in rows])
            logits[rows] = HEADS[self.head](self.weights, states.astype(np.float32), mask)
        return logits / np.float32(self.temperature)

    def _warn_of_truncated(self, sentences: Sequence[str]) -> None:
        assert self.texts is not None
        for sentence in dict.fromkeys(sentences):
            unread = self.texts.cut_off(sentence)
            if unread:
                warnings.warn(
                    f"a sentence is longer than {self.texts.max_tokens} tokens; this was not "
                    f"read: {unread[:200]!r}",
                    TruncatedQuery,
                    stacklevel=3,
                )


@lru_cache(maxsize=4)
def cached_decider(name: str) -> Decider:
    """A `Decider` that is loaded once. Raises InputError as `load_decider`."""
    return load_decider(name)


def load_decider(name: str | Path, *, checkpoint: str = "best") -> Decider:
    """Loads what decides of a run folder, an export, a released model or an export on the hub.

    The weights of an export are not compared with their checksum, since only the head's are read.

    Args:
        checkpoint: best, latest or a step of a run.

    Raises InputError as `inference.run.load`, or if the head needs the image or decides nothing.
    """
    folder = find_folder(name)
    if not is_export(folder):
        return _decider_of_run(folder, checkpoint)
    if checkpoint != "best":
        raise InputError(
            f"--checkpoint {checkpoint}: the export {folder} holds one only; leave the flag out"
        )
    check_version(folder)
    stored = read_export_config(folder)
    config = from_json(ModelConfig, stored["config"]["model"], str(folder / CONFIG))
    check_head(config.head, str(name))
    if config.head in REFERENCES:
        return Decider(config.head)

    language_model = stored["language_model"]
    text_name = str(folder / LANGUAGE_MODEL) if language_model["embedded"] else config.text.name
    texts = open_states(config.text, text_name, language_model, "this export")
    weights = {}
    for key, value in read_tensors(folder / WEIGHTS, HEAD).items():
        weights[key.removeprefix(HEAD)] = value.astype(np.float32)
    return Decider(config.head, weights, texts, stored["calibration"]["type_temperature"])


def _decider_of_run(folder: Path, checkpoint: str) -> Decider:
    """Loads what decides of a run. Its checkpoint is verified, and so read, as a whole."""
    # Imported here, since checkpoints need JAX, and exports do not.
    from r2sm_jax.inference.export_weights import flat_weights
    from r2sm_jax.inference.run import restore_weights
    from r2sm_jax.training.run_folder import read_config, read_inputs

    config = read_config(folder).model
    check_head(config.head, str(folder))
    if config.head in REFERENCES:
        return Decider(config.head)
    stored = restore_weights(folder, checkpoint=checkpoint)
    inputs = read_inputs(folder)
    language_model = inputs.get("language_model", {})
    text = config.text
    texts = open_states(text, text.name, language_model, f"the run {folder}")
    weights = {}
    for key, value in flat_weights(stored.params["head"]).items():
        weights[key] = np.asarray(value, np.float32)
    return Decider(config.head, weights, texts, float(stored.calibration.type_temperature))


def open_states(text: TextConfig, name: str, trained: dict[str, Any], user: str) -> SentenceStates:
    """Opens a language model: a BERT in NumPy, others in JAX. Arguments and errors are those of
    `open_language_model`."""
    folder = find_model(name, "--model.text.name")
    if not reads_bert(folder):
        # Imported here, since it loads JAX.
        from r2sm_jax.data.text_states import open_language_model

        return open_language_model(text, name, trained, user)
    texts = BertStates(folder, text, trained.get("tokenizer_sha256"))
    identity = identify(folder, weights_sha256(folder), texts.tokenizer.sha256)
    check_language_model(folder, identity, trained, user)
    return texts


def check_head(head: str, name: str) -> None:
    """Raises InputError for a head that cannot decide by the words of a sentence alone.

    Args:
        name: that of the run or the export, for messages.
    """
    if head in LEARNED_HEADS or (head in REFERENCES and head != "oracle"):
        return
    reasons = {
        "decoder": "looks at the image, too; ask about an image with python -m r2sm_jax.predict",
        "oracle": "is told the truth and reads no sentence",
        "none": "decides nothing",
    }
    raise InputError(
        f"{name}: its mask-type head, {head}, {reasons[head]}; or give a model whose head is one "
        f"of {', '.join(LEARNED_HEADS)}"
    )
