"""`python -m r2sm_jax.export RUN --out DIR`: writes a run as a folder (docs/export.md)."""

from pathlib import Path

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import ExportConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(ExportConfig)

from r2sm_jax.config import ModelConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export import add_parts, export
from r2sm_jax.inference.load import load, load_part
from r2sm_jax.inference.model_folder import CONFIG, find_folder, is_export
from r2sm_jax.inference.publish import check_can_push, push
from r2sm_jax.inference.verification import verify
from r2sm_jax.synthetic.sources import open_source

NUM_VERIFIED = 3
"""Drawn scenes on which `--verify` compares run and export."""


def check_out(out: Path, overwrite: bool) -> None:
    """Raises InputError if the folder holds anything but an export that may be replaced."""
    has_config = (out / CONFIG).exists()
    if out.is_file() or (has_config and not is_export(out)):
        raise InputError(
            f"{out}: this is a file, a run folder, or has another model's {CONFIG}; give another "
            "--out"
        )
    if has_config and not overwrite:
        raise InputError(f"{out}: it holds an export already; give another --out or --overwrite")


def check_references(args: ExportConfig, config: ModelConfig) -> None:
    """Raises InputError if the export would refer to a model that is only on this machine."""
    if args.compact:
        for encoder in config.vision.pretrained:
            if Path(encoder).expanduser().exists():
                raise InputError(
                    f"--compact: the image encoder {encoder} is on this machine alone; leave "
                    "--compact out"
                )
    name = config.text.name
    if (args.compact or args.lm == "reference") and Path(name).expanduser().is_dir():
        flag = "--compact" if args.compact else "--lm reference"
        raise InputError(
            f"{flag}: the language model {name} is a folder of this machine; use --lm embed alone"
        )


def check_keeps_form(args: ExportConfig) -> None:
    """Raises InputError for flags that would change the form of an export."""
    flags = {
        "--lm": args.lm != "embed",
        "--compact": args.compact,
        "--verify": args.verify,
    }
    for flag, is_given in flags.items():
        if is_given:
            raise InputError(
                f"{flag}: {args.run} is an export already and keeps its form; leave the flag out"
            )


def megabytes(folder: Path) -> float:
    """Size of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def main() -> None:
    """Command line."""
    args = read_flags(ExportConfig)
    if args.compact and args.verify:
        raise InputError(
            "--verify compares float32 weights with the StableHLO; leave it out with --compact"
        )
    out = Path(args.out)
    check_out(out, args.overwrite)
    if args.push is not None:
        # Before the model is loaded and written.
        check_can_push(args.push)
    write_export(args, out)
    if args.push is not None:
        print(f"pushed to {push(out, args.push)}")


def write_export(args: ExportConfig, out: Path) -> None:
    """Writes the folder, and verifies it on request."""
    completer = None if args.completer is None else load_part(args.completer, "completer")
    outliner = None if args.outliner is None else load_part(args.outliner, "outliner")
    source = find_folder(args.run)
    if is_export(source):
        check_keeps_form(args)
        if completer is None and outliner is None:
            raise InputError(
                f"{args.run}: this is an export already; copy the folder, give the run that it "
                "came from, or add a part to it with --completer or --outliner"
            )
        add_parts(source, out, completer=completer, outliner=outliner)
        print(f"wrote {out}: {args.run} with the given parts, {megabytes(out):.1f} MB")
        return
    run = load(args.run)
    check_references(args, run.config.model)

    export(
        run,
        out,
        embed_language_model=args.lm == "embed",
        compact=args.compact,
        completer=completer,
        outliner=outliner,
    )
    print(f"wrote {out}: step {run.step}, {megabytes(out):.1f} MB")
    if args.verify:
        size = run.config.model.vision.image_size
        source = open_source("scenes", "val", count=NUM_VERIFIED, size=size)
        print(verify(run, out, [source[index] for index in range(NUM_VERIFIED)]))


if __name__ == "__main__":
    cli_main(main)
