"""Mask-type heads compared: `python scripts/ablate_heads.py [--text-only] [--heads attention layers] [--seeds 3]`.

`--text-only` trains the heads alone on cached token states, for some seconds each. Without it every cell of the table
is a whole training run with masks (`--config configs/ablation.py`: some minutes each). A finished cell is not run
again. Writes the table as .md, .csv and .png into `--out`. `--leave-one-out family` also trains the first head once
without each family of wordings and tests it on that family. `--leave-one-out author` does so with the authors of the
written sentences, an eighth of them at a time.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, Literal

import head_only
import jax
import numpy as np
from head_only import Padded, Sentences
from head_tables import (
    FORMS,
    Row,
    accuracy,
    as_table,
    changed_decisions,
    differences,
    mean_and_deviation,
    write_tables,
)
from scipy.special import expit as sigmoid
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from r2sm_jax.cli import load_config_file, parse_flags
from r2sm_jax.config import DECODER_HEAD, Config, check_head
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError, cli_main
from r2sm_jax.evaluate import score_source
from r2sm_jax.evaluation.iou import lisa
from r2sm_jax.evaluation.report import (
    REFERENCES,
    collect,
    mask_type_scores,
    with_decision,
    wrong_type_gap,
)
from r2sm_jax.evaluation.scorer import QueryResult
from r2sm_jax.evaluation.tables import table
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import abstract_state, open_run, read_config, resolve, start_folder
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.models.matmul import tune_malloc
from r2sm_jax.query import MaskType, keyword_mask_type
from r2sm_jax.synthetic.queries.sentences import written_sentences
from r2sm_jax.synthetic.scenes.source import SceneSource
from r2sm_jax.train import train
from r2sm_jax.training.calibration import fit_temperature

SPLITS = ("val", "val_phrasing", "val_hard")
SMALLEST = 20
"""Sentences that a family or an author needs to be left out and tested."""
GROUPS = 8
"""Groups of authors, each of which is left out as a whole."""


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    heads: tuple[str, ...] = ()
    """Default: all that learn; with --text-only all that decide from the words alone."""
    seeds: int = 3
    text_only: bool = False
    """Train the heads alone, without images."""
    config: str | None = None
    """Config file of the runs (default: the embedded default); with --text-only its language model is used."""
    out: str = "ablation"
    scenes: int = 1500
    """Scenes whose sentences the heads learn from, with --text-only."""
    text_only_queries: int = 6000
    """Sentences about anything that they also learn from, with --text-only."""
    test_scenes: int = 160
    """Scenes of each validation split, with --text-only."""
    steps: int = 300
    """Training steps of 128 sentences, with --text-only."""
    run: str | None = None
    """Run whose masks the decisions of all heads are also scored on, with --text-only."""
    leave_one_out: Literal["", "family", "author"] = ""
    """Also train without each family of wordings, or without some authors of written sentences, with --text-only."""


def text_only(options: Options, config: Config, folder: Path) -> None:
    """All cells of heads alone, and the table."""
    predictor = open_run(Path(options.run)).predictor if options.run else None
    text = config.model.text
    cache = config.data.cache_dir
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens, cache=cache)
    free = head_only.text_only_queries(options.text_only_queries)
    training = head_only.scene_sentences("train", options.scenes).joined(free)
    tests = {"val_r2sm": head_only.intent_list("val_r2sm")}
    tests |= {split: head_only.scene_sentences(split, options.test_scenes) for split in SPLITS}
    tests |= {
        "hand-written": head_only.intent_list("test"),
        "calibration": head_only.intent_list("calibration"),
    }
    start = time.monotonic()
    groups = head_only.pad(texts, training.texts)
    padded = {name: head_only.pad(texts, sentences.texts) for name, sentences in tests.items()}
    forms = {
        name: head_only.pad(texts, list(map(form, tests["val_r2sm"].texts)))
        for name, form in FORMS.items()
    }
    print(
        f"{len(training.texts)} sentences and their tests encoded in {time.monotonic() - start:.0f} s",
        flush=True,
    )

    sentences = sha256(
        "\n".join([*training.texts, *(t for test in tests.values() for t in test.texts)]).encode()
    )
    settings = {
        "steps": options.steps,
        "sentences": sentences.hexdigest(),
        "model": texts.sha256,
        "layers": list(text.layers),
    }

    def run(seed: int, head: str) -> dict[str, Any]:
        path = folder / f"text_{head}_{seed}.json"
        mine = settings | {"parameters": head_only.count_parameters(head, groups)}
        cell = _finished(path, mine)
        if cell is None:
            cell = {"head": head, "seed": seed, "settings": mine}
            cell |= _text_cell(
                head,
                seed,
                options.steps,
                groups,
                training,
                padded,
                tests["calibration"].amodal,
                forms,
            )
            path.write_text(json.dumps(cell), "utf-8")
        shares = [accuracy(cell["probabilities"][n], s.amodal) for n, s in tests.items()]
        print(
            f"{head} {seed}: {', '.join(f'{n} {a:.3f}' for n, a in zip(tests, shares, strict=True))}",
            flush=True,
        )
        return cell

    start = time.monotonic()
    cells = [run(seed, head) for seed, head in product(range(options.seeds), options.heads)]
    print(f"{len(cells)} cells in {time.monotonic() - start:.0f} s", flush=True)
    rows = [
        _keyword_row(tests),
        _bag_of_words_row(training, tests),
        *(_text_row(head, cells, tests) for head in options.heads),
    ]
    lines = ["# Mask-type heads, trained alone", "", _described(options, training), ""]
    lines += [
        *as_table(rows),
        *differences(options.heads, cells, tests),
        *changed_decisions(options.heads, cells),
    ]
    if predictor is not None:
        lines += _on_masks_of(predictor, options, cells, tests)
    if options.leave_one_out:
        lines += _leave_one_out(options, texts, training)
    write_tables(folder, "text", lines, rows, list(tests))


def _finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """A cell that was run before with the same settings."""
    try:
        cell = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return cell if cell.get("settings") == settings else None


def _text_cell(
    head: str,
    seed: int,
    steps: int,
    groups: Sequence[Padded],
    training: Sentences,
    tests: dict[str, list[Padded]],
    amodal: np.ndarray,
    forms: dict[str, list[Padded]],
) -> dict[str, Any]:
    """Trains one head. `forms` are the sentences of val_r2sm in other forms; `amodal` are the labels of the sentences
    `calibration`, which its temperature is fitted on."""
    start = time.monotonic()
    trained = head_only.train_head(head, groups, training.amodal, steps=steps, seed=seed)
    seconds = time.monotonic() - start
    logits = {name: trained.logits(padded) for name, padded in tests.items()}
    temperature = fit_temperature(logits["calibration"], amodal)
    probabilities = {name: sigmoid(x / temperature).round(6).tolist() for name, x in logits.items()}
    return {
        "seconds": seconds,
        "parameters": trained.parameters,
        "temperature": temperature,
        "probabilities": probabilities,
        "changed": {
            name: float(((trained.logits(padded) > 0) != (logits["val_r2sm"] > 0)).mean())
            for name, padded in forms.items()
        },
    }


def _text_row(head: str, cells: Sequence[dict[str, Any]], tests: dict[str, Sentences]) -> Row:
    """Means and deviations over the seeds of one head."""
    mine = [cell for cell in cells if cell["head"] == head]
    row: Row = {"head": head, "parameters": mine[0]["parameters"]}
    row["seconds"] = float(np.mean([cell["seconds"] for cell in mine]))
    for name, sentences in tests.items():
        scores = [
            mask_type_scores(np.array(c["probabilities"][name]), sentences.amodal) for c in mine
        ]
        for key in ("accuracy", "mcc", "ece"):
            row[f"{name} {key}"] = [score[key] for score in scores]
    return row


def _keyword_row(tests: dict[str, Sentences]) -> Row:
    row: Row = {"head": "keyword (reference)", "parameters": 0, "seconds": 0.0}
    for name, sentences in tests.items():
        said = np.array([keyword_mask_type(text) == "amodal" for text in sentences.texts], float)
        scores = mask_type_scores(said, sentences.amodal)
        row |= {
            f"{name} accuracy": [scores["accuracy"]],
            f"{name} mcc": [scores["mcc"]],
            f"{name} ece": [None],
        }
    return row


def _bag_of_words_row(training: Sentences, tests: dict[str, Sentences]) -> Row:
    """Logistic regression on words and pairs of words, trained on the same sentences."""
    start = time.monotonic()
    count, regression = (
        CountVectorizer(ngram_range=(1, 2), binary=True),
        LogisticRegression(max_iter=1000),
    )
    regression.fit(count.fit_transform(training.texts), training.amodal)
    row: Row = {"head": "bag of words (reference)", "parameters": len(count.vocabulary_) + 1}
    row["seconds"] = time.monotonic() - start
    for name, sentences in tests.items():
        scores = mask_type_scores(
            regression.predict_proba(count.transform(sentences.texts))[:, 1], sentences.amodal
        )
        row |= {f"{name} {key}": [scores[key]] for key in ("accuracy", "mcc", "ece")}
    return row


def _described(options: Options, training: Sentences) -> str:
    return (
        f"{options.seeds} seeds each, {options.steps} steps of {head_only.BATCH} of {len(training.texts):,} sentences. "
        "Percent, mean ± standard deviation over seeds. `val_r2sm` has sentences in the manner of R2SM, `val` the "
        "training wordings, `val_phrasing` and `val_hard` others; `hand-written` and `calibration` follow the rules "
        "alone. `ece`: how far probabilities are from what they say, with the temperature that fits `calibration`."
    )


def _on_masks_of(
    predictor: Predictor,
    options: Options,
    cells: Sequence[dict[str, Any]],
    tests: dict[str, Sentences],
) -> list[str]:
    """gIoU of a run's masks, had each head decided which of them is the answer."""
    rows: dict[str, list[str]] = {
        name: [] for name in ("always_modal", "always_amodal", "keyword", *options.heads)
    }
    rows |= {"oracle_type": [], "wrong-type gap of the run's own head": []}
    for split in SPLITS:
        source = SceneSource(split, options.test_scenes)
        results = score_source(predictor, source).results
        place = {text: n for n, text in enumerate(tests[split].texts)}
        asked = {q.id: place[q.text] for i in range(len(source)) for q in source.queries_at(i)}
        for name, row in rows.items():
            if name in REFERENCES:
                found = [lisa(collect(results, REFERENCES[name]))["giou"]]
            elif name in options.heads:
                mine = [
                    np.array(c["probabilities"][split]) > 0.5 for c in cells if c["head"] == name
                ]
                picks = [with_decision(partial(_decided, asked, said)) for said in mine]
                found = [lisa(collect(results, pick))["giou"] for pick in picks]
            else:
                found = [wrong_type_gap(results)]
            row.append(mean_and_deviation(found))
    title = f"## gIoU of the masks of {options.run} with each head's decisions"
    named = [[name.replace("_", " "), *row] for name, row in rows.items()]
    return ["", title, "", *table(["decision", *SPLITS], named)]


def _decided(asked: dict[int, int], amodal: np.ndarray, result: QueryResult) -> MaskType:
    return "amodal" if amodal[asked[result.query_id]] else "modal"


def _leave_one_out(options: Options, texts: TextStates, training: Sentences) -> list[str]:
    """Accuracy on each family of wordings, or on each author's sentences, by a head that never saw them."""
    written = head_only.listed(written_sentences())
    by_author = options.leave_one_out == "author"
    found, counts = np.unique((written if by_author else training).families, return_counts=True)
    names, weights = found[counts >= SMALLEST].tolist(), counts[counts >= SMALLEST]
    if not names:
        raise InputError(
            f"--leave-one-out: no family of wordings has {SMALLEST} sentences; raise --scenes"
        )
    shares: dict[str, list[float]] = {name: [] for name in names}  # one for each seed
    scenes = head_only.scene_sentences("train", options.scenes)
    count = min(GROUPS, len(names)) if by_author else len(names)
    for group in (names[start::count] for start in range(count)):
        rest = training.without(group)
        if by_author:
            rest = scenes.joined(
                head_only.text_only_queries(options.text_only_queries, without=group)
            )
        groups = head_only.pad(texts, rest.texts)
        only = {name: (written if by_author else training).only(name) for name in group}
        padded = {name: head_only.pad(texts, sentences.texts) for name, sentences in only.items()}
        for seed in range(options.seeds):
            trained = head_only.train_head(
                options.heads[0], groups, rest.amodal, steps=options.steps, seed=seed
            )
            for name, sentences in only.items():
                shares[name].append(
                    accuracy(sigmoid(trained.logits(padded[name])).tolist(), sentences.amodal)
                )
        print(
            "".join(f"without {name}: {mean_and_deviation(shares[name])}\n" for name in group),
            end="",
            flush=True,
        )
    rows = [
        [n, f"{count}", mean_and_deviation(shares[n])]
        for n, count in zip(names, weights, strict=True)
    ]
    every = np.array(list(shares.values()))
    rows.append(["mean over these", "", mean_and_deviation(every.mean(0).tolist())])
    over_sentences = np.average(every, axis=0, weights=weights)
    rows.append(
        ["mean over sentences", f"{sum(weights)}", mean_and_deviation(over_sentences.tolist())]
    )
    title = f"## Accuracy of `{options.heads[0]}` on what it did not see"
    return [title, "", *table([options.leave_one_out, "sentences", "accuracy"], rows)]


def whole_runs(options: Options, config: Config, folder: Path) -> None:
    """A training run for every cell, and the table of their reports."""
    reports: dict[str, list[dict[str, Any]]] = {}
    for seed, head in product(range(options.seeds), options.heads):
        run = folder / f"run_{head}_{seed}"
        cell = replace(config, run=str(run), resume=(run / "config.json").is_file())
        cell = replace(
            cell, model=replace(config.model, head=head), train=replace(config.train, seed=seed)
        )
        if (run / "report.json").is_file():
            with ExitStack() as locks:
                start_folder(resolve(cell), locks)  # refuses one of other settings
        else:
            train(cell)
        reports.setdefault(head, []).append(json.loads((run / "report.json").read_text("utf-8")))
    rows = []
    for head, found in reports.items():
        row: Row = {"head": head, "parameters": _parameters(folder / f"run_{head}_0")}
        row["seconds"] = 60 * float(np.mean([report["meta"]["minutes"] for report in found]))
        for name in found[0]["splits"]:
            splits = [report["splits"][name] for report in found]
            row[f"{name} gIoU"] = [s["all"]["giou"] for s in splits]
            row[f"{name} gIoU, oracle type"] = [
                s["references"]["oracle_type"]["giou"] for s in splits
            ]
            row[f"{name} wrong-type gap"] = [s["all"]["wrong_type_gap"] for s in splits]
            for key in ("accuracy", "mcc", "ece"):
                row[f"{name} {key}"] = [s["mask_type"][key] for s in splits]
        rows.append(row)
    lines = [
        "# Mask-type heads, whole runs",
        "",
        f"{options.seeds} seeds; percent, mean ± standard deviation.",
        "",
    ]
    write_tables(
        folder,
        "runs",
        lines + as_table(rows),
        rows,
        list(next(iter(reports.values()))[0]["splits"]),
    )


def _parameters(run: Path) -> int:
    """Of a run's mask-type head."""
    params = abstract_state(read_config(run))[1].params
    return sum(
        leaf.size
        for part in ("head", "decoder_head")
        for leaf in jax.tree.leaves(params.get(part, {}))
    )


def main() -> None:
    """Command line."""
    tune_malloc()
    options = parse_flags(Options, sys.argv[1:], prog="python scripts/ablate_heads.py")
    if not options.heads:
        options = replace(
            options, heads=(*LEARNED,) if options.text_only else (*LEARNED, DECODER_HEAD)
        )
    for head in options.heads:
        check_head(head)
        if options.text_only and head not in LEARNED:
            raise InputError(
                f"--heads {head}: nothing of it is learned; with --text-only use {', '.join(LEARNED)}"
            )
    if options.seeds < 1 or options.steps < 1:
        raise InputError("--seeds and --steps must be at least 1")
    for flag, given in (("--leave-one-out", options.leave_one_out), ("--run", options.run)):
        if given and not options.text_only:
            raise InputError(f"{flag} is for heads that are trained alone; add --text-only")
    config = load_config_file(Path(options.config)) if options.config else Config()
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {folder}: cannot be made ({error.strerror}); pass another folder"
        ) from None
    (text_only if options.text_only else whole_runs)(options, config, folder)


if __name__ == "__main__":
    cli_main(main)
