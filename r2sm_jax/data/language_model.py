"""Whether a language model is the one that a run was trained with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r2sm_jax.errors import InputError


def identify(folder: Path, sha256: str, tokenizer_sha256: str) -> dict[str, str | None]:
    """Hashes of weights and tokenizer, and the revision of a model of the Hugging Face hub."""
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
