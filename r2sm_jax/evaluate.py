"""`python -m r2sm_jax.evaluate RUN [--data SPEC] [--split val]`: the figures of a trained
segmenter.

`--predictions FILE --data SPEC` scores the masks of any other system by the same code, without JAX,
and `--compare A B ...` puts reports side by side.
"""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import EvaluateConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(EvaluateConfig)

from r2sm_jax.config import DataConfig
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.evaluation.compare import compare, read_sentences, score_decisions
from r2sm_jax.evaluation.page import render_page, write_report
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import Evaluated, make_report
from r2sm_jax.evaluation.tables import (
    COMPARISON_INTRO,
    COMPARISON_TITLE,
    DECISIONS,
    comparison_tables,
    make_table,
    print_markdown,
    report_markdown,
    to_markdown,
)
from r2sm_jax.synthetic.sources import REPORTED, SourceSpec, open_dataset, split_names


def main() -> None:
    """Command line."""
    args = read_flags(EvaluateConfig)
    tasks = (args.run, args.predictions, args.decisions, args.compare)
    if sum(bool(task) for task in tasks) != 1:
        raise InputError(
            "give one of them: a run folder, --predictions FILE --data SPEC, --decisions FILE, or "
            "--compare REPORT REPORT"
        )
    if args.sentences is not None and args.decisions is None:
        raise InputError("--sentences: they are for --decisions FILE; leave the flag out")
    if args.samples is not None and args.samples < 1:
        raise InputError(f"--samples {args.samples}: give 1 or more, or leave the flag out")
    if args.compare:
        compare_reports(args)
    elif args.decisions:
        evaluate_decisions(args)
    else:
        write_figures(args)


def write_figures(args: EvaluateConfig) -> None:
    """Prints the report of a run or of predictions, and writes it where --out says."""
    if args.data and args.out:
        data = SourceSpec.parse(args.data)
        if data.is_same_data(SourceSpec(data.kind, (Path(args.out),))):
            raise InputError(
                f"--out {args.out}: report.json would look like a split of the data; "
                "give another folder"
            )
    evaluate = evaluate_run if args.run else evaluate_predictions
    report, evaluated, folder = evaluate(args)
    print_markdown(report_markdown(report, brief=True))
    if folder is not None:
        write_report(report, evaluated, folder)
        print(f"wrote {folder / 'report.html'}, report.md, report.json and queries.csv")


def evaluate_run(args: EvaluateConfig) -> tuple[dict[str, Any], Evaluated, Path | None]:
    """Evaluates a run or an export. Returns the report, its results, and where to write them."""
    from r2sm_jax.evaluation.evaluator import evaluate
    from r2sm_jax.inference.load import enable_compilation_cache, load
    from r2sm_jax.inference.model_folder import is_export
    from r2sm_jax.synthetic.queries.sentences import intent_sentences

    assert args.run is not None
    enable_compilation_cache()
    run = load(args.run)
    data = run.config.data
    if args.data:
        data = DataConfig(source=args.data, seed=data.seed)
    data = replace(
        data, images=args.images or data.images, backgrounds=args.backgrounds or data.backgrounds
    )
    split = args.split or ("all" if args.data else REPORTED)
    size = run.config.model.vision.image_size
    count = args.samples or run.config.train.report_samples
    sources = {
        name: open_dataset(data, name, image_size=size, count=count)
        for name in split_names(data.source, split)
    }
    own_data = run.config.data.source
    is_own = SourceSpec.parse(data.source).is_same_data(SourceSpec.parse(own_data))
    report, evaluated = evaluate(
        run.predictor,
        sources,
        {"val_r2sm": intent_sentences("val_r2sm")} if data.source == "scenes" else {},
        trained=run.config,
        source=data.source,
        step=run.step,
        selected_on=run.config.train.select_on,
        trained_on=data.source if is_own else own_data,
    )
    check_results(data.source, evaluated)
    if args.out:
        return report, evaluated, Path(args.out)
    # A run's own report is replaced only by the same evaluation.
    as_in_training = split == REPORTED and not args.samples and not is_export(run.folder)
    return report, evaluated, Path(args.run) if as_in_training else None


def evaluate_predictions(args: EvaluateConfig) -> tuple[dict[str, Any], Evaluated, Path | None]:
    """Scores the masks of another system. Returns as `evaluate_run`."""
    assert args.predictions is not None
    if args.data is None:
        raise InputError("--predictions are for some data; give it as --data json:FILE")
    splits = split_names(args.data, args.split or "all")
    if len(splits) > 1:
        raise InputError(
            f"--predictions are for one split; give one --split of {', '.join(splits)}"
        )
    data = DataConfig(source=args.data, images=args.images, backgrounds=args.backgrounds)
    count = args.samples or 256
    source = open_dataset(data, splits[0], image_size=96, count=count, need_images=False)
    path = Path(args.predictions)
    results = score_predictions(path, source, args.format)
    evaluated = {splits[0]: (source, results)}
    check_results(args.data, evaluated)
    report = make_report(
        evaluated,
        source=args.data,
        predictions=path.name,
        predictions_sha256=sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        missing=results.missing,
    )
    return report, evaluated, Path(args.out) if args.out else None


def check_results(source: str, evaluated: Evaluated) -> None:
    """Prints which queries are left out and why. Raises InputError if none is scored."""
    left_out = []
    for name, (_, results) in evaluated.items():
        for reason, count in results.left_out.items():
            left_out.append(f"{name}: {count} queries are left out, which {reason}")
    if not any(results.results for _, results in evaluated.values()):
        reason = "; ".join(left_out) or "there are none"
        raise InputError(f"{source}: no query can be scored ({reason}); see docs/metrics.md")
    for sentence in left_out:
        print(sentence)


def evaluate_decisions(args: EvaluateConfig) -> None:
    """Prints the scores of decisions about sentences, and writes them where --out says."""
    from r2sm_jax.synthetic.queries.sentences import SentenceList, intent_sentences

    assert args.decisions is not None
    name = args.sentences or "val_r2sm"
    if name in get_args(SentenceList):
        sentences = intent_sentences(name)  # pyright: ignore[reportArgumentType]
    else:
        sentences = read_sentences(Path(name))
        name = Path(name).name
    figures = score_decisions(Path(args.decisions), sentences, name)
    if figures["ignored"]:
        print(f"{figures['ignored']} decisions about other sentences do not count")
    columns = [("sentences", "queries", str), *DECISIONS]
    table = make_table("Mask type", [(name, figures)], columns)
    print_markdown(to_markdown("Decisions about sentences", [], [table]))
    if args.out is None:
        return
    file = Path(args.out) / "decisions.json"
    with atomic_write(file) as part:
        part.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(f"wrote {file}")


def compare_reports(args: EvaluateConfig) -> None:
    """Prints reports side by side, and writes the comparison where --out says."""
    compared = compare([Path(folder) for folder in args.compare])
    parts = (COMPARISON_TITLE, [COMPARISON_INTRO], comparison_tables(compared))
    text = to_markdown(*parts)
    print_markdown(text)
    if args.out is None:
        return
    file = Path(args.out) / "compare.html"
    with atomic_write(file) as part:
        part.write_text(render_page(*parts), "utf-8")
        file.with_suffix(".json").write_text(json.dumps(compared, indent=1) + "\n", "utf-8")
        file.with_suffix(".md").write_text(text, "utf-8")
    print(f"wrote {file}, compare.md and compare.json")


if __name__ == "__main__":
    cli_main(main)
