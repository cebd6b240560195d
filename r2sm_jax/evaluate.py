"""`python -m r2sm_jax.evaluate RUN [--data SPEC] [--split val]`: the figures of a trained
segmenter.

`--predictions FILE --data SPEC` scores the masks of any other system by the same code, without JAX,
and `--compare A B ...` puts reports side by side.
"""

from collections.abc import Mapping
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
from r2sm_jax.errors import InputError, atomic_write, load_json, write_json
from r2sm_jax.evaluation.compare import compare_reports
from r2sm_jax.evaluation.detectors import holds_detections, score_detections
from r2sm_jax.evaluation.page import render_page, write_report
from r2sm_jax.evaluation.predictions import score_decisions, score_predictions
from r2sm_jax.evaluation.report import make_report
from r2sm_jax.evaluation.scorer import Evaluated
from r2sm_jax.evaluation.tables import (
    COMPARISON_INTRO,
    COMPARISON_TITLE,
    DECISIONS,
    DETECTIONS,
    comparison_tables,
    make_table,
    report_markdown,
)
from r2sm_jax.markdown import print_markdown, to_markdown
from r2sm_jax.sources import REPORTED, SourceSpec, open_split, open_splits, split_names


def main() -> None:
    """Command line."""
    args = read_flags(EvaluateConfig)
    tasks = (args.run, args.predictions, args.decisions, args.compare)
    if sum(map(bool, tasks)) != 1:
        raise InputError(
            "give one of them: a run folder, --predictions FILE --data SPEC, --decisions FILE, or "
            "--compare REPORT REPORT"
        )
    if args.sentences is not None and args.decisions is None:
        raise InputError("--sentences: they are for --decisions FILE; leave the flag out")
    if args.samples is not None and args.samples < 1:
        raise InputError(f"--samples {args.samples}: give 1 or more, or leave the flag out")
    if args.compare:
        write_comparison(args)
    elif args.decisions:
        evaluate_decisions(args)
    elif args.predictions and holds_detections(Path(args.predictions)):
        evaluate_detections(args)
    else:
        write_figures(args)


def write_figures(args: EvaluateConfig) -> None:
    """Prints the report of a run or of predictions, and writes it where --out says."""
    report, evaluated, folder = evaluate_run(args) if args.run else evaluate_predictions(args)
    for name, results in evaluated.items():
        for reason, count in results.left_out.items():
            print(f"{name}: {count} queries are left out, which {reason}")
    if not any(results.results for results in evaluated.values()):
        raise InputError(f"{report['meta']['source']}: no query can be scored; see docs/metrics.md")
    print_markdown(report_markdown(report, brief=True))
    if folder is not None:
        write_report(report, evaluated, folder)
        print(f"wrote {folder / 'report.html'}, report.md, report.json and queries.csv")


def evaluate_run(args: EvaluateConfig) -> tuple[dict[str, Any], Evaluated, Path | None]:
    """Evaluates a run or an export. Returns the report, its results, and where to write them."""
    from r2sm_jax.evaluation.evaluator import evaluate
    from r2sm_jax.inference.load import enable_compilation_cache, load_run
    from r2sm_jax.inference.model_folder import is_export

    assert args.run is not None
    enable_compilation_cache()
    run = load_run(args.run)
    if args.out:
        refuse_other_system(Path(args.out), {"weights_sha256": run.predictor.weights_sha256})
    trained = run.config.data
    data = trained
    if args.data:
        # Only composed photos read `crowds`.
        is_composed = SourceSpec.parse(args.data).kind == "compose"
        crowds = trained.crowds if is_composed else DataConfig.crowds
        data = DataConfig(source=args.data, seed=trained.seed, crowds=crowds)
    data = replace(
        data, images=args.images or data.images, backgrounds=args.backgrounds or data.backgrounds
    )
    split = args.split or ("all" if args.data else REPORTED)
    size = run.config.model.vision.image_size
    count = args.samples or run.config.train.report_samples
    sources = open_splits(data, split, size=size, count=count, is_exact=args.samples is not None)
    is_own = SourceSpec.parse(data.source).is_same_data(SourceSpec.parse(trained.source))
    trained_on = data.source if is_own else trained.source
    report, evaluated = evaluate(run, sources, data.source, trained_on)
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
    splits = split_names(args.data, args.split or "all", args.images)
    if len(splits) > 1:
        raise InputError(
            f"--predictions are for one split; give one --split of {', '.join(splits)}"
        )
    data = DataConfig(source=args.data, images=args.images, backgrounds=args.backgrounds)
    count = args.samples or 256
    source = open_split(data, splits[0], count=count, need_images=False)
    path = Path(args.predictions)
    system = {"predictions": path.name, "predictions_sha256": None}
    if path.is_file():
        system["predictions_sha256"] = sha256(path.read_bytes()).hexdigest()
    if args.out:
        refuse_other_system(Path(args.out), system)
    results = score_predictions(path, source, args.format)
    evaluated = {splits[0]: results}
    report = make_report(evaluated, source=args.data, **system, missing=results.missing)
    return report, evaluated, Path(args.out) if args.out else None


def evaluate_detections(args: EvaluateConfig) -> None:
    """Prints the scores of a detector's masks, and writes them where --out says."""
    assert args.predictions is not None
    others = (args.split, args.samples, args.images, args.backgrounds)
    if any(others) or args.format != "auto":
        raise InputError(
            f"{args.predictions}: --split, --samples, --images, --backgrounds and --format are not "
            "for results of a detector, which are about all of --data; leave them out"
        )
    data = Path((args.data or "").removeprefix("json:"))
    if not data.is_file():
        raise InputError(
            f"--data {args.data}: the results of a detector are for a dataset file or a COCO file; "
            "give its path"
        )
    figures = score_detections(Path(args.predictions), data)
    rows = [(f"{mask_type} masks", of_type) for mask_type, of_type in figures.items()]
    print_markdown(to_markdown("Masks of a detector", [], [make_table("COCO", rows, DETECTIONS)]))
    if args.out is not None:
        file = Path(args.out) / "detections.json"
        write_json(file, {"predictions": args.predictions, "data": str(data), **figures})
        print(f"wrote {file}")


def refuse_other_system(folder: Path, system: Mapping[str, str | None]) -> None:
    """Raises InputError if a folder holds the report of another system.

    `system`: what `meta` of a report says of this one.
    """
    file = folder / "report.json"
    if file.exists():
        meta = load_json(file, "report").get("meta", {})
        if any(meta.get(name) != value for name, value in system.items()):
            raise InputError(f"{file}: it is of another system; give another --out")


def evaluate_decisions(args: EvaluateConfig) -> None:
    """Prints the scores of decisions about sentences, and writes them where --out says."""
    from r2sm_jax.evaluation.wordings import wordings_table
    from r2sm_jax.inference.query_lines import read_query_lines
    from r2sm_jax.synthetic.queries.plain import plain_sentences
    from r2sm_jax.synthetic.queries.sentences import (
        SentenceList,
        intent_sentences,
        read_sentences,
    )

    assert args.decisions is not None
    name = args.sentences or "val_r2sm"
    if name == "plain":
        sentences = plain_sentences()
    elif name in get_args(SentenceList):
        sentences = intent_sentences(name)  # pyright: ignore[reportArgumentType]
    else:
        lines = [line for _, line in read_query_lines(Path(name))]
        sentences = read_sentences("\n".join(lines), name)
        name = Path(name).name
    figures = score_decisions(Path(args.decisions), sentences, name)
    if figures["ignored"]:
        print(f"{figures['ignored']} decisions about other sentences do not count")
    tables = [make_table("Mask type", [(name, figures)], {"sentences": "queries", **DECISIONS})]
    if figures["wordings"]:
        tables.append(wordings_table(figures["wordings"]))
    print_markdown(to_markdown("Decisions about sentences", [], tables))
    if args.out is not None:
        file = Path(args.out) / "decisions.json"
        write_json(file, figures)
        print(f"wrote {file}")


def write_comparison(args: EvaluateConfig) -> None:
    """Prints reports side by side, and writes the comparison where --out says."""
    compared = compare_reports([Path(folder) for folder in args.compare])
    parts = (COMPARISON_TITLE, [COMPARISON_INTRO], comparison_tables(compared))
    text = to_markdown(*parts)
    print_markdown(text)
    if args.out is not None:
        file = Path(args.out) / "compare.html"
        with atomic_write(file) as part:
            part.write_text(render_page(*parts), "utf-8")
            write_json(file.with_suffix(".json"), compared)
            file.with_suffix(".md").write_text(text, "utf-8")
        print(f"wrote {file}, compare.md and compare.json")


if __name__ == "__main__":
    cli_main(main)
