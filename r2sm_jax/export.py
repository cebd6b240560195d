"""`python -m r2sm_jax.export RUN --out DIR`: writes a run as a folder (docs/export.md)."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from r2sm_jax.cli import cli_main, parse_flags
from r2sm_jax.config import ModelConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.completion import load_completer
from r2sm_jax.inference.export_folder import CONFIG, find_folder, is_export
from r2sm_jax.inference.exporter import add_completer, export
from r2sm_jax.inference.run import load
from r2sm_jax.inference.verification import verify


@dataclass(frozen=True)
class ExportConfig:
    """Writes a run as a folder in Hugging Face's layout: safetensors, tokenizer, model card,
    StableHLO."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest. With --completer also an export, such as photos-small."""
    out: str
    """Folder to write. Its name is the model's name on the card."""
    lm: Literal["embed", "reference"] = "embed"
    """embed: copy the frozen language model into the folder; reference: write its name and
    checksum, and download it at the first use."""
    compact: bool = False
    """Write the trained weights alone, in float16: published weights that are frozen and the
    language model are referred to by name, and there is no StableHLO."""
    completer: str | None = None
    """Run folder of a completer, which is put into the export, so that it completes given
    masks."""
    checkpoint: str = "best"
    """best (highest gIoU on the split --train.select-on), latest, or the number of a step."""
    overwrite: bool = False
    """Replace an earlier export in the folder, with its model card."""
    verify: bool = False
    """Check that the run, the export, and the StableHLO without this package give the same
    answers."""


def check_out(out: Path, overwrite: bool) -> None:
    """Raises InputError if the folder holds anything but an export that may be replaced."""
    has_config = (out / CONFIG).exists()
    is_run = (out / "checkpoints").exists()
    if out.is_file() or is_run or (has_config and not is_export(out)):
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
        "--checkpoint": args.checkpoint != "best",
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
    args = parse_flags(ExportConfig, sys.argv[1:], prog="python -m r2sm_jax.export")
    if args.compact and args.verify:
        raise InputError(
            "--verify compares float32 weights with the StableHLO; leave it out with --compact"
        )
    out = Path(args.out)
    check_out(out, args.overwrite)
    completer = None if args.completer is None else load_completer(Path(args.completer))
    source = find_folder(args.run)
    if is_export(source):
        check_keeps_form(args)
        if completer is None:
            raise InputError(
                f"{args.run}: this is an export already; copy the folder, give the run that it "
                "came from, or add a completer to it with --completer"
            )
        add_completer(source, completer, out)
        print(f"wrote {out}: {args.run} with a completer, {megabytes(out):.1f} MB")
        return
    run = load(args.run, checkpoint=args.checkpoint)
    check_references(args, run.config.model)

    export(
        run,
        out,
        embed_language_model=args.lm == "embed",
        compact=args.compact,
        completer=completer,
    )
    print(f"wrote {out}: step {run.step}, {megabytes(out):.1f} MB")
    if args.verify:
        print(verify(run, out))


if __name__ == "__main__":
    cli_main(main)
