"""What `predict --abstain` leaves undecided: `python scripts/abstaining.py RUN [RUN ...]`.

For each margin, the share of sentences whose probability lies nearer to one half, and how many decisions about the
others are right. `val_r2sm` and `test` are lists of real queries. The rest are texts from which nobody can tell which
mask is wanted; nothing was trained on them.
"""

import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from scipy.special import expit

from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.metrics.pages import percent, table
from r2sm_jax.predictor import Predictor
from r2sm_jax.queries.sentences import SentenceList, intent_sentences
from r2sm_jax.runs import open_run

MARGINS = (0.1, 0.2, 0.3, 0.4)
LISTS: tuple[SentenceList, ...] = ("val_r2sm", "test")
UNCLEAR = {
    "punctuation": ["???", "...", "!", "?!?!", "---", "#@%&", "()", ",,,,", "'", "42", "1-2-3", ":-)", "//", "***"],
    "another language": [
        "den ganzen Becher, auch was verdeckt ist", "die rote Tasse", "la taza roja", "la forme complète de la voiture",
        "le chat noir", "o carro atrás da casa", "el perro entero", "la sedia dietro al tavolo", "röd bil",
        "красная чашка", "赤いカップ", "杯子", "كوب أحمر", "de hele hond, ook wat achter de stoel zit",
        "czerwony kubek", "cały samochód", "kırmızı bardak",
    ],
    "nothing is named": [
        "hello", "asdf qwer", "segment", "please", "it", "this", "what?", "thank you very much", "I do not know", "the",
        "lorem ipsum dolor sit amet", "nice weather today", "ok", "yes", "help me", "who are you?", "xyzzy",
        "good morning", "a sentence", "something",
    ],
}  # fmt: skip


def probabilities(predictor: Predictor, texts: list[str]) -> np.ndarray:
    """That each text asks for the complete shape."""
    parts = [predictor.texts.for_request(texts[start : start + 64]) for start in range(0, len(texts), 64)]
    return np.concatenate([expit(predictor.type_logits(*part)) for part in parts])


def main() -> None:
    """Command line."""
    if not (folders := sys.argv[1:]):
        raise InputError("give at least one run folder")
    predictors = [open_run(Path(folder)).predictor for folder in folders]
    rows = []
    for name in (*LISTS, *UNCLEAR):
        known = intent_sentences(name) if name in LISTS else ()
        texts = [sentence.text for sentence in known] or UNCLEAR[name]
        found = np.stack([probabilities(predictor, texts) for predictor in predictors])
        right = (found > 0.5) == [sentence.mask_type == "amodal" for sentence in known] if known else None
        for margin in (0.0, *MARGINS):
            decided = abs(found - 0.5) >= margin
            share = "" if right is None else percent(float(right[decided].mean()))
            rows.append([name, f"{margin}", percent(float(1 - decided.mean())), share])
    lines = table(["texts", "--abstain", "undecided", "right where decided"], rows)
    Console(width=None if sys.stdout.isatty() else 120).print(Markdown("\n".join(lines)))


if __name__ == "__main__":
    exit_cleanly(main)
