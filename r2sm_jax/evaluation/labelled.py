"""Scores the decisions of any system about labelled sentences, without images (docs/intent.md)."""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from r2sm_jax.errors import InputError, parse_json, read_bytes
from r2sm_jax.evaluation.report import sentence_figures
from r2sm_jax.evaluation.tables import DECISIONS, Table, cells
from r2sm_jax.query import MASK_TYPES, Sentence
from r2sm_jax.synthetic.queries.sentences import SentenceList, intent_sentences

LISTS: tuple[str, ...] = get_args(SentenceList)
EXAMPLE = '{"query": "the whole mug", "mask_type": "amodal", "amodal_probability": 0.98}'


def score_decisions(path: Path, labelled: str) -> dict[str, Any]:
    """Scores a file of decisions.

    Returns the figures of `sentence_figures`, the name of the labelled sentences, and hashes.
    Decisions about other sentences do not count.

    Args:
        path: JSON Lines, or one JSON list, of objects as `EXAMPLE`. The probability may be left out
            of all.
        labelled: one of `LISTS`, or a file as those.

    Raises InputError if a file cannot be read, or a labelled sentence has no decision, or two.
    """
    sentences = read_labelled(labelled)
    decisions = read_decisions(path)
    missing = [s.text for s in sentences if s.text not in decisions]
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(sentences)} sentences of {labelled} have no decision "
            f"(the first: {missing[0]!r}); give one for each, with the same text"
        )

    of_sentences = [decisions[sentence.text] for sentence in sentences]
    predicted = np.array([mask_type == "amodal" for mask_type, _ in of_sentences], bool)
    probabilities = [probability for _, probability in of_sentences]
    calibrated = all(probability is not None for probability in probabilities)
    probability = np.array(probabilities, float) if calibrated else predicted.astype(float)
    text = "\n".join(f"{sentence.mask_type}\t{sentence.text}" for sentence in sentences)
    return {
        "sentences": labelled if labelled in LISTS else Path(labelled).name,
        "sentences_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "decisions": path.name,
        "decisions_sha256": hashlib.sha256(read_bytes(path)).hexdigest(),
        "ignored": len(decisions.keys() - {sentence.text for sentence in sentences}),
        **sentence_figures(sentences, probability, predicted, calibrated=calibrated),
    }


def decision_table(figures: Mapping[str, Any]) -> Table:
    """Makes the table of the figures of `score_decisions`."""
    row = [figures["sentences"], str(figures["queries"]), *cells(figures, DECISIONS)]
    return Table("Mask type", ["", "sentences", *DECISIONS], [row])


def read_labelled(labelled: str) -> Sequence[Sentence]:
    """Reads labelled sentences: one of `LISTS`, or a file with tab-separated columns, mask_type and
    text among them. Lines that begin with # are comments.

    Raises InputError if the file has no such columns, or a line no mask type or text.
    """
    if labelled in LISTS:
        return intent_sentences(labelled)  # pyright: ignore[reportArgumentType]
    path = Path(labelled)
    if not path.exists():
        raise InputError(
            f"--sentences {labelled}: neither a list ({', '.join(LISTS)}) nor a file; check the "
            "name"
        )
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: this is no text in UTF-8 ({error}); save it as such") from None
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    if not {"mask_type", "text"} <= set(rows.fieldnames or ()):
        raise InputError(
            f"{path}: the first line must name the columns mask_type and text, separated by tabs"
        )

    sentences: dict[str, Sentence] = {}
    for number, row in enumerate(rows, start=1):
        mask_type = row["mask_type"]
        sentence = (row["text"] or "").strip()
        if mask_type not in MASK_TYPES or not sentence:
            raise InputError(
                f"{path}: sentence {number} needs a text, and modal or amodal as its mask_type, "
                f"not {mask_type!r}"
            )
        if sentence in sentences:
            raise InputError(f"{path}: {sentence!r} is there twice; keep one of the two")
        sentences[sentence] = Sentence(sentence, mask_type, row.get("family") or "")
    if not sentences:
        raise InputError(f"{path}: there is no sentence; write some below the names of the columns")
    return list(sentences.values())


def read_decisions(path: Path) -> dict[str, tuple[str, float | None]]:
    """Reads mask type and probability of amodal, if there is one, by the text of the sentence.

    Raises InputError, which names the entry, for a bad value, and for a sentence with two different
    decisions.
    """
    content = read_bytes(path)
    if content.lstrip().startswith(b"["):
        entries = parse_json(content, str(path), "a list of decisions")
    else:
        entries = []
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                entries.append(parse_json(line, f"{path}: line {number}", EXAMPLE))

    decisions: dict[str, tuple[str, float | None]] = {}
    for number, entry in enumerate(entries, start=1):
        where = f"{path}: entry {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("query"), str):
            raise InputError(f"{where} has no query; write {EXAMPLE}")
        decision = _read_decision(entry, where)
        text = entry["query"].strip()
        if decisions.setdefault(text, decision) != decision:
            raise InputError(f"{where}: there is another decision about {text!r}; keep one of them")
    if not decisions:
        raise InputError(f"{path}: there is no decision; write lines like {EXAMPLE}")

    num_probabilities = sum(probability is not None for _, probability in decisions.values())
    if 0 < num_probabilities < len(decisions):
        raise InputError(
            f"{path}: {len(decisions) - num_probabilities} of {len(decisions)} decisions have no "
            "amodal_probability; give it for every decision or for none"
        )
    return decisions


def _read_decision(entry: Mapping[str, Any], where: str) -> tuple[str, float | None]:
    """Mask type and probability of an entry; the probability decides where no type is given."""
    probability = entry.get("amodal_probability")
    if probability is not None:
        is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
        if not is_number or not 0 <= probability <= 1:
            raise InputError(
                f"{where}: amodal_probability {json.dumps(probability)} is no number between 0 and "
                "1; mend it"
            )
    mask_type = entry.get("mask_type")
    if mask_type is None and probability is not None:
        mask_type = "amodal" if probability > 0.5 else "modal"
    if mask_type not in MASK_TYPES:
        raise InputError(f"{where}: mask_type {mask_type!r} is unknown; write modal or amodal")
    return mask_type, probability
