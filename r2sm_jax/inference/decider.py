"""The decision alone: which mask sentences ask for, and which words name it, without an image.

Of a model only the mask-type head, the target head, the calibration and the language model are
read. BERT and most heads are computed in NumPy (language/numpy_bert.py), so that nothing waits for
JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float16

from r2sm_jax.cli import from_json
from r2sm_jax.config import LEARNED_HEADS, ModelConfig, TextConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import (
    Decision,
    check_abstain,
    check_query,
    decide,
    warn_of_unread,
)
from r2sm_jax.inference.model_folder import (
    CONFIG,
    WEIGHTS,
    find_folder,
    language_model_of,
    read_stored,
)
from r2sm_jax.language.numpy_bert import HEADS, NumpyBert, Params, reads_bert, target_head
from r2sm_jax.language.tokenizer import QueryTokenizer, check_language_model, identify, pad_ids
from r2sm_jax.models.hub import find_model, read_tensors, weights_sha256
from r2sm_jax.query import REFERENCES

BATCH_SENTENCES = 8
"""Sentences that are computed at once, of similar length, so that little padding is computed. More
are no faster: what is between matrix products no longer fits the cache."""
HEAD = "head."
"""How the names of the head's weights begin."""
TARGET_HEAD = "target_head."
"""How those of the head begin that marks the words of the target."""

Head = Callable[[Float[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]], Float[np.ndarray, " k"]]
"""Token states, and which tokens are real -> logits."""
TokenHead = Callable[
    [Float[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]], Float[np.ndarray, "k t"]
]
"""The same for a logit of each token."""


class BertStates:
    """Computes the token states of sentences by a BERT in NumPy, as `TextStates` does in JAX."""

    def __init__(self, folder: Path, text: TextConfig, tokenizer_sha256: str | None):
        """Opens a model folder. Raises InputError if it cannot be read."""
        self.layers = text.layers
        self.bert = NumpyBert(folder)
        self.tokenizer = QueryTokenizer(
            folder,
            vocab_size=self.bert.vocab_size,
            max_tokens=text.max_tokens,
            expected_sha256=tokenizer_sha256,
        )

    def __call__(
        self, sentences: Sequence[str]
    ) -> tuple[Float16[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]:
        """Returns the states of sentences, padded to the longest, and which tokens are real."""
        token_ids = self.tokenizer(sentences)
        ids, mask = pad_ids(token_ids, len(token_ids), max(map(len, token_ids)))
        return self.bert(ids, mask, self.layers), mask


class Decider:
    """Decides which mask sentences ask for: `decisions = decider(["...", ...])`.

    Attributes:
        name: That of the head: a learned one, or a rule that reads the sentence.
        head: A learned head.
        texts: The language model of a learned head: `BertStates` or `TextStates`.
        temperature: Divides its logits.
        target_head: Marks the words that name what is meant; None in models that have none.
    """

    def __init__(
        self,
        name: str,
        head: Head | None = None,
        texts: Any = None,
        temperature: float = 1.0,
        target_head: TokenHead | None = None,
    ):
        self.name = name
        self.head = head
        self.texts = texts
        self.temperature = temperature
        self.target_head = target_head

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
        answers = self.read(sentences) if self.texts else [(0.0, None)] * len(sentences)
        return [
            decide(self.name, sentence, logit, abstain=abstain)._replace(target=target_words)
            for sentence, (logit, target_words) in zip(sentences, answers, strict=True)
        ]

    def read(self, sentences: Sequence[str]) -> list[tuple[float, str | None]]:
        """Computes, by a learned head, the calibrated logit of each sentence, which is above 0 if
        it asks for amodal, and the words that name what it means."""
        assert self.head is not None
        for sentence in dict.fromkeys(sentences):
            warn_of_unread(self.texts.tokenizer.cut_off(sentence))
        answers: list[tuple[float, str | None]] = [(0.0, None)] * len(sentences)
        order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
        for start in range(0, len(order), BATCH_SENTENCES):
            rows = order[start : start + BATCH_SENTENCES]
            states, mask = self.texts([sentences[row] for row in rows])
            states = states.astype(np.float32)
            logits = self.head(states, mask) / np.float32(self.temperature)
            named = self.target_head(states, mask) if self.target_head else None
            for i, row in enumerate(rows):
                target_words = None
                if named is not None:
                    target_words = self.texts.tokenizer.target(sentences[row], named[i])
                answers[row] = float(logits[i]), target_words
        return answers


# Loading


def cached_decider(name: str) -> Decider:
    """Loads a `Decider` once, and again when its files change. Raises InputError as
    `load_decider`."""
    # A link such as runs/latest may lead elsewhere tomorrow, and training renews a run.
    folder = find_folder(name).resolve()
    files = [folder / file for file in (CONFIG, WEIGHTS)]
    changed = tuple(file.stat().st_mtime_ns for file in files if file.exists())
    return _load_unchanged(folder, changed)


@lru_cache(maxsize=4)
def _load_unchanged(folder: Path, changed: tuple[int, ...]) -> Decider:
    """Loads a `Decider`. `changed`: when its files did."""
    return load_decider(folder)


def load_decider(name: str | Path) -> Decider:
    """Loads what decides of a run folder, an export, a released model or an export on the hub.

    The weights of an export are not compared with their checksum, since only the head's are read.

    Raises InputError as `load_run` (load.py), or if the head needs the image or decides nothing.
    """
    folder = find_folder(name)
    stored = read_stored(folder)
    config = from_json(ModelConfig, stored["config"]["model"], str(folder / CONFIG))
    if config.head in REFERENCES and config.head != "oracle":
        return Decider(config.head)
    if config.head not in LEARNED_HEADS:
        raise InputError(
            f"{name}: its mask-type head, {config.head}, does not decide by the words alone; give "
            f"a model whose head is one of {', '.join(LEARNED_HEADS)}"
        )
    weights = read_head(folder, HEAD)
    target_weights = read_head(folder, TARGET_HEAD)
    name = language_model_of(folder, stored)
    texts = open_states(config.text, name, stored["language_model"], str(folder))
    temperature = stored.get("calibration", {}).get("type_temperature", 1.0)
    mark = partial(target_head, target_weights) if target_weights else None
    return Decider(config.head, open_head(config, weights), texts, temperature, mark)


def read_head(folder: Path, prefix: str) -> Params:
    """Reads the weights whose names begin like this, in float32; their names go on after it."""
    tensors = read_tensors(folder / WEIGHTS, prefix)
    return {key.removeprefix(prefix): x.astype(np.float32) for key, x in tensors.items()}


def open_head(config: ModelConfig, weights: Params) -> Head:
    """Builds the learned head of a model: in NumPy where it is known there, else in JAX.

    Args:
        weights: in float32, by their names in the head.
    """
    if config.head in HEADS:
        return partial(HEADS[config.head], weights)

    # Imported here, since they load JAX.
    import jax.numpy as jnp
    from flax import nnx

    from r2sm_jax.models.layers import build_abstract
    from r2sm_jax.models.mask_type_heads import LEARNED
    from r2sm_jax.models.matching import put_weights

    make, text = LEARNED[config.head], config.text
    graphdef, shapes = nnx.split(build_abstract(partial(make, text.dim, len(text.layers))))
    model = nnx.merge(graphdef, put_weights(shapes, weights))
    return lambda states, mask: np.asarray(
        model(jnp.asarray(states)[None], jnp.asarray(mask)[None])[0]
    )


def open_states(text: TextConfig, name: str, trained: Mapping[str, Any], user: str) -> Any:
    """Opens a language model: a BERT in NumPy, others in JAX. Arguments and errors are those of
    `open_language_model`."""
    folder = find_model(name, "--model.text.name")
    if not reads_bert(folder):
        # Imported here, since it loads JAX.
        from r2sm_jax.language.states import open_language_model

        return open_language_model(text, name, trained, user)
    texts = BertStates(folder, text, trained.get("tokenizer_sha256"))
    identity = identify(folder, weights_sha256(folder), texts.tokenizer.sha256)
    check_language_model(folder, identity, trained, user)
    return texts
