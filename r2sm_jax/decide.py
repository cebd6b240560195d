"""`python -m r2sm_jax.decide "SENTENCE" ...`: which mask sentences ask for, and which words name
what is meant, without an image.

In Python, `r2sm_jax.decide(["..."])` does the same.
"""

import csv
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import r2sm_jax
from r2sm_jax.cli import cli_main
from r2sm_jax.flags import DecideConfig, check_flags, read_flags

if __name__ == "__main__":
    # The threads of a BLAS wait for each other: beside other work they are up to 60 times slower
    # than one, and alone hardly faster. NumPy reads this when it is imported.
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(DecideConfig)

from r2sm_jax.errors import InputError
from r2sm_jax.inference.decider import load_decider
from r2sm_jax.inference.decision import Decision, check_abstain, check_query
from r2sm_jax.inference.query_lines import read_query_lines, read_sentence

_decide = r2sm_jax.decide


class _CallableModule(ModuleType):
    """Importing this module puts it in the place of the function `r2sm_jax.decide`. So it can be
    called as that function can."""

    def __call__(self, *args: Any, **options: Any) -> list[Decision]:
        return _decide(*args, **options)


sys.modules[__name__].__class__ = _CallableModule


def collect_sentences(args: DecideConfig) -> list[str]:
    """Returns the sentences of the command line, then those of the file. Raises InputError if there
    is none, or one has no words."""
    for sentence in args.sentences:
        check_query(sentence)
    sentences = list(args.sentences)
    if args.file is not None:
        sentences += read_sentences(Path(args.file))
    if not sentences:
        raise InputError(
            "there is no sentence; give some, such as 'the whole red mug', or --file FILE"
        )
    return sentences


def read_sentences(path: Path) -> list[str]:
    """Reads a text file with one sentence a line, or the column `text` of a .tsv or .csv.

    Raises InputError, which names the line, if one is no sentence, and for an empty file.
    """
    lines = list(read_query_lines(path))
    suffix = path.suffix.lower()
    if suffix in (".tsv", ".csv"):
        rows = [line for _, line in lines if not line.startswith("#")]
        # As `evaluate --sentences` reads labelled sentences: no quotes around what tabs separate.
        tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        table = csv.DictReader(rows, **(tabs if suffix == ".tsv" else {}))
        if "text" not in (table.fieldnames or ()):
            raise InputError(f"{path}: it has no column `text`; give one sentence a line as .txt")
        lines = [(f"{path}: row {n}", row["text"] or "") for n, row in enumerate(table, start=1)]
    sentences = [read_sentence(where, line) for where, line in lines]
    if not sentences:
        raise InputError(f"{path}: the file is empty; write one sentence a line")
    return sentences


def decision_line(sentence: str, decision: Decision) -> str:
    """Writes a line with type, probability of amodal, whether it is undecided, the words that name
    what is meant, and the sentence."""
    decided = f"{decision.mask_type:<8}{decision.amodal_probability:<8.3f}"
    undecided = "undecided" if decision.undecided else ""
    return f"{decided}{undecided:<11}{decision.target or '':<18}  {sentence}"


def main() -> None:
    """Command line."""
    args = read_flags(DecideConfig)
    check_abstain(args.abstain)
    sentences = collect_sentences(args)
    decider = load_decider(args.model)
    decisions = decider(sentences, abstain=args.abstain)
    for sentence, decision in zip(sentences, decisions, strict=True):
        if args.json:
            print(json.dumps({"query": sentence, **decision._asdict()}))
        else:
            print(decision_line(sentence, decision))


if __name__ == "__main__":
    cli_main(main)
