"""Compares mask-type heads on sentences alone: a row for each head, one table and one figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.figure import Figure

from r2sm_jax.errors import atomic_write, write_json
from r2sm_jax.evaluation.decisions import mask_type_scores
from r2sm_jax.evaluation.wordings import TITLE, score_wordings
from r2sm_jax.markdown import Table, to_markdown
from r2sm_jax.query import Sentence


@dataclass
class HeadScores:
    """One row of the table: a head on every test set, one number a seed."""

    head: str
    num_parameters: int = 0
    accuracy: dict[str, list[float]] = field(default_factory=dict)
    """Test set -> share of right decisions."""
    ece: dict[str, list[float]] = field(default_factory=dict)
    """Test set -> calibration error; missing where a rule gives no probability."""
    wordings: dict[str, list[float]] = field(default_factory=dict)
    """Plain wording -> share of right decisions over its nouns."""
    seconds: list[float] = field(default_factory=list)

    def add(
        self,
        test_set: str,
        sentences: Sequence[Sentence],
        probability: Float[np.ndarray, " n"],
        predicted: Bool[np.ndarray, " n"] | None = None,
    ) -> None:
        """Scores the answers of one seed to one test set, as `mask_type_scores`."""
        is_amodal = np.array([sentence.mask_type == "amodal" for sentence in sentences], bool)
        scores = mask_type_scores(probability, is_amodal, predicted)
        self.accuracy.setdefault(test_set, []).append(scores["accuracy"])
        if scores["ece"] is not None:
            self.ece.setdefault(test_set, []).append(scores["ece"])
        said_amodal = probability > 0.5 if predicted is None else predicted
        is_right = said_amodal == is_amodal
        for wording, figures in score_wordings(sentences, is_right).items():
            self.wordings.setdefault(wording, []).append(figures["accuracy"])


def deviation(values: Sequence[float]) -> float:
    """Computes the standard deviation over seeds; 0 of one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def percent_over_seeds(values: Sequence[float]) -> str:
    """Formats mean and standard deviation in percent; the deviation needs two seeds."""
    text = f"{100 * np.mean(values):.1f}" if values else ""
    return f"{text}±{100 * deviation(values):.1f}" if len(values) > 1 else text


def ablation_table(results: Sequence[HeadScores]) -> Table:
    """Makes the table of all heads, in percent. The calibration error is that of `val_r2sm`."""
    test_sets = list(results[0].accuracy)
    names = [name.removeprefix("val_") for name in test_sets]
    rows = []
    for result in results:
        row = [result.head, *(percent_over_seeds(result.accuracy[name]) for name in test_sets)]
        row.append(percent_over_seeds(result.ece.get("val_r2sm", [])))
        row.append(f"{result.num_parameters:,}" if result.num_parameters else "")
        row.append(f"{np.mean(result.seconds):.0f}" if result.seconds else "")
        rows.append(row)
    title = "Mask type right, percent, mean±deviation over seeds"
    return Table(title, ["head", *names, "ECE r2sm", "parameters", "s"], rows)


def wordings_of_heads(results: Sequence[HeadScores]) -> Table:
    """Makes the table of plain wordings: a column for each head, the worst wordings first."""
    means = {
        wording: [float(np.mean(result.wordings[wording])) for result in results]
        for wording in results[-1].wordings
    }
    ordered = sorted(means.items(), key=lambda item: item[1][-1])
    rows = [[wording, *(f"{100 * mean:.1f}" for mean in of_heads)] for wording, of_heads in ordered]
    return Table(f"{TITLE}; right, percent", ["", *(result.head for result in results)], rows)


def make_figure(results: Sequence[HeadScores]) -> Figure:
    """Draws bars of accuracy by test set, with deviations over seeds."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    test_sets = [name.removeprefix("val_") for name in results[0].accuracy]
    positions = np.arange(len(test_sets))
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        means = [np.mean(values) for values in result.accuracy.values()]
        deviations = [deviation(values) for values in result.accuracy.values()]
        offset = (i - (len(results) - 1) / 2) * width
        axes.bar(positions + offset, means, 0.92 * width, yerr=deviations, label=result.head)
    axes.set(xticks=positions, xticklabels=test_sets, ylim=(0, 1.02), ylabel="mask type right")
    figure.legend(ncols=len(results), fontsize=8, loc="outside upper center")
    return figure


def write_ablation(results: Sequence[HeadScores], notes: Sequence[str], folder: Path) -> None:
    """Writes `heads.json` (every seed), `heads.md` with notes, and `heads.png`. Raises InputError
    if it cannot."""
    write_json(folder / "heads.json", [asdict(result) for result in results])
    tables = [ablation_table(results), wordings_of_heads(results)]
    with atomic_write(folder / "heads.md") as part:
        part.write_text(to_markdown("Mask-type heads", notes, tables), "utf-8")
        make_figure(results).savefig(folder / "heads.png", dpi=150)
