"""The tables and pictures of ablate_heads.py: rows of figures over seeds, differences with their intervals."""

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from head_only import Sentences
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown

from r2sm_jax.evaluation.iou import interval
from r2sm_jax.evaluation.tables import percent, table

FORMS: dict[str, Callable[[str], str]] = {
    "a polite opening": lambda text: f"Please, {text[0].lower()}{text[1:]}",
    "a full stop more or less": lambda text: (
        text.removesuffix(".") if text.endswith(".") else f"{text}."
    ),
    "capital letters": str.upper,
}
"""Changes of a sentence that should not change a decision."""

Row = dict[str, Any]


def accuracy(probabilities: Sequence[float], amodal: np.ndarray) -> float:
    """Share of decisions that are right."""
    return float(((np.asarray(probabilities) > 0.5) == amodal).mean())


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Mean and standard deviation of shares over seeds, in percent."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return percent(float(np.mean(known))) + (
        f" ± {100 * np.std(known, ddof=1):.2f}" if len(known) > 1 else ""
    )


def as_table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table, one row a head."""
    columns = [key for key in rows[-1] if isinstance(rows[-1][key], list)]
    header = ["head", *columns, "parameters", "seconds"]
    cells = [
        [
            row["head"],
            *(mean_and_deviation(row[c]) for c in columns),
            f"{row['parameters']:,}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    return table(header, cells)


def differences(
    heads: Sequence[str], cells: Sequence[dict[str, Any]], tests: dict[str, Sentences]
) -> list[str]:
    """Differences from the last head in the share of seeds that get a sentence right, bootstrapped over sentences."""
    if len(heads) < 2:
        return []

    def right(head: str, name: str) -> np.ndarray:
        mine = [np.array(c["probabilities"][name]) for c in cells if c["head"] == head]
        return np.mean([(p > 0.5) == tests[name].amodal for p in mine], axis=0)

    rows = []
    for head in heads[:-1]:
        row = [f"{head} - {heads[-1]}"]
        for name in tests:
            one, other = right(head, name), right(heads[-1], name)
            ones = np.ones(len(one))
            bounds = interval(np.arange(len(one)), (one, ones), minus=(other, ones))
            value = 100 * float((one - other).mean())
            row.append(
                f"{value:+.2f}"
                + (f" ({100 * bounds[0]:+.2f} to {100 * bounds[1]:+.2f})" if bounds else "")
            )
        rows.append(row)
    return [
        "## Differences in accuracy, 95 % intervals of a paired bootstrap",
        "",
        *table(["", *tests], rows),
    ]


def changed_decisions(heads: Sequence[str], cells: Sequence[dict[str, Any]]) -> list[str]:
    """How many decisions about val_r2sm change with the form of the sentence."""
    rows = [
        [
            h,
            *(
                mean_and_deviation([c["changed"][f] for c in cells if c["head"] == h])
                for f in FORMS
            ),
        ]
        for h in heads
    ]
    return [
        "## Decisions about val_r2sm that change, in percent, with",
        "",
        *table(["", *FORMS], rows),
    ]


def write_tables(
    folder: Path, name: str, lines: Sequence[str], rows: Sequence[Row], tests: Sequence[str]
) -> None:
    """Prints the lines and writes them as NAME.md, the rows as NAME.csv, and accuracies on `tests` as NAME.png."""
    (folder / f"{name}.md").write_text("\n".join(lines), "utf-8")
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(list(rows[-1]))
        for row in rows:
            means = [
                np.mean(v) if isinstance(v, list) and None not in v else v for v in row.values()
            ]
            writer.writerow(["" if isinstance(v, list) else v for v in means])
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(rows)
    for place, row in enumerate(rows):
        values = [row[f"{test} accuracy"] for test in tests]
        x = np.arange(len(tests)) + (place - (len(rows) - 1) / 2) * width
        deviations = [float(np.std(v, ddof=1)) if len(v) > 1 else 0 for v in values]
        axes.bar(
            x,
            [float(np.mean(v)) for v in values],
            width * 0.92,
            yerr=deviations,
            label=row["head"],
            capsize=2,
        )
    axes.set(xticks=np.arange(len(tests)), ylim=(0, 1.02), ylabel="mask type right")
    axes.set_xticklabels(tests)
    axes.legend(ncols=3, fontsize=8, loc="lower right")
    figure.savefig(folder / f"{name}.png", dpi=150)
    Console(width=None if sys.stdout.isatty() else 170).print(Markdown("\n".join(lines)))
    print(f"wrote {folder / name}.md, .csv and .png")
