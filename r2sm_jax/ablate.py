"""`python -m r2sm_jax.ablate [--quick]`: trains every mask-type head on sentences alone and
compares them.

Prints one table and writes it to a folder, with a figure and the numbers of every seed. No image is
used.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import AblateConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(AblateConfig)

import jax
import numpy as np
from scipy.special import expit

from r2sm_jax.config import DataConfig, OptimizerConfig
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.ablation import HeadScores, ablation_table, write_ablation
from r2sm_jax.evaluation.fit_calibration import fit_temperature
from r2sm_jax.inference.load import enable_compilation_cache
from r2sm_jax.language.states import TextStates
from r2sm_jax.markdown import print_markdown, to_markdown
from r2sm_jax.query import Sentence, keyword_mask_type
from r2sm_jax.sources import open_split
from r2sm_jax.synthetic.queries.plain import plain_sentences
from r2sm_jax.synthetic.queries.sentences import intent_sentences, write_text_only_queries
from r2sm_jax.training.head import PaddedSentences, pad_sentences, train_head
from r2sm_jax.training.optimizer import make_optimizer


@dataclass(frozen=True)
class Sizes:
    """How much a head is trained and tested on."""

    num_steps: int
    num_scenes: int
    """Training scenes whose queries are learned from."""
    num_text_only: int
    """Sentences without a scene that are learned from as well."""
    num_test_scenes: int
    """Scenes of each validation split."""
    every_plain: int = 1
    """Of the table of plain wordings and nouns, every so manieth sentence is decided."""


FULL = Sizes(num_steps=2000, num_scenes=1000, num_text_only=28_000, num_test_scenes=160)
QUICK = Sizes(num_steps=60, num_scenes=60, num_text_only=1200, num_test_scenes=30, every_plain=20)
QUICK_NOTE = "`--quick`: few sentences and steps, which show that all runs, and compare nothing."


def main() -> None:
    """Command line."""
    args = read_flags(AblateConfig)
    sizes = QUICK if args.quick else FULL
    if args.steps is not None:
        sizes = replace(sizes, num_steps=args.steps)
    num_seeds = (2 if args.quick else 3) if args.seeds is None else args.seeds
    if num_seeds < 1:
        raise InputError(f"--seeds {num_seeds}: give 1 or more")
    enable_compilation_cache()
    text = args.text
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    results = compare_heads(args.heads, texts, sizes, num_seeds)
    notes = [QUICK_NOTE] if args.quick else []
    print_markdown(to_markdown("Mask-type heads", notes, [ablation_table(results)]))
    folder = Path(args.out)
    write_ablation(results, notes, folder)
    print(f"wrote {folder / 'heads.md'}, heads.png and heads.json")


def compare_heads(
    heads: Sequence[str], texts: TextStates, sizes: Sizes, num_seeds: int
) -> list[HeadScores]:
    """Trains every head with every seed on the same sentences and tests it. The keyword rule comes
    first."""
    learned = scene_sentences("train", sizes.num_scenes)
    learned += write_text_only_queries(sizes.num_text_only, seed=0)
    # `val_r2sm` and `written` are lists written by others (docs/intent.md), the rest are queries
    # about scenes.
    tests: dict[str, Sequence[Sentence]] = {"val_r2sm": intent_sentences("val_r2sm")}
    for name in ("val", "val_phrasing", "val_hard"):
        tests[name] = scene_sentences(name, sizes.num_test_scenes)
    tests["written"] = intent_sentences("test")
    tests["plain"] = plain_sentences()[:: sizes.every_plain]
    calibration = intent_sentences("calibration")

    def encode(sentences: Sequence[Sentence]) -> list[PaddedSentences]:
        return pad_sentences(texts, [sentence.text for sentence in sentences])

    encoded = encode(learned)
    encoded_tests = {name: encode(sentences) for name, sentences in tests.items()}
    encoded_calibration = encode(calibration)
    optimizer = make_optimizer(OptimizerConfig(), sizes.num_steps)
    rule = HeadScores("keyword rule")
    for name, sentences in tests.items():
        decisions = [keyword_mask_type(sentence.text) == "amodal" for sentence in sentences]
        no_probability = np.full(len(sentences), np.nan)
        rule.add(name, sentences, no_probability, np.array(decisions, bool))
    results = [rule]
    for name in heads:
        result = HeadScores(name)
        for seed in range(num_seeds):
            start = time.monotonic()
            head = train_head(
                name,
                encoded,
                is_amodal(learned),
                optimizer,
                num_steps=sizes.num_steps,
                seed=seed,
            )
            result.seconds.append(time.monotonic() - start)
            result.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(head.params))
            # As in training, the temperature is fitted on sentences that nothing learns from.
            logits = head.amodal_logits(encoded_calibration)
            temperature = fit_temperature(logits, is_amodal(calibration))
            for test_set, groups in encoded_tests.items():
                probability = expit(head.amodal_logits(groups) / temperature)
                result.add(test_set, tests[test_set], probability)
            print(f"{name}, seed {seed}: {result.seconds[-1]:.0f} s", flush=True)
        results.append(result)
    return results


def scene_sentences(split: str, num_scenes: int) -> list[Sentence]:
    """Collects the different queries about the first drawn scenes of a split, as sentences without
    an image."""
    source = open_split(DataConfig(), split, count=num_scenes)
    sentences: dict[str, Sentence] = {}
    for index in range(num_scenes):
        for query in source.queries_at(index):
            family = f"{query.mask_type}: {query.kind['wording']}"
            sentences[query.text] = Sentence(query.text, query.mask_type, family)
    return list(sentences.values())


def is_amodal(sentences: Sequence[Sentence]) -> np.ndarray:
    """Tells which sentences ask for the amodal mask."""
    return np.array([sentence.mask_type == "amodal" for sentence in sentences], bool)


if __name__ == "__main__":
    cli_main(main)
