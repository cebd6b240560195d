"""`python -m r2sm_jax.export RUN --out DIR`: writes a run as a folder (docs/export.md)."""

from pathlib import Path

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import ExportConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(ExportConfig)

from r2sm_jax.config import DataConfig, ModelConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export import add_parts, check_can_push, export, push
from r2sm_jax.inference.load import PARTS, load_part, load_run
from r2sm_jax.inference.model_folder import CONFIG, EXPORT_FILES, find_folder, is_export
from r2sm_jax.inference.stablehlo import verify
from r2sm_jax.sources import open_split

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
    # A clone of a hub repository may hold a card and no model yet.
    taken = [name for name in EXPORT_FILES if (out / name).exists()]
    if taken and not overwrite:
        raise InputError(f"{out}: it holds {taken[0]} already; give another --out or --overwrite")


def check_references(args: ExportConfig, config: ModelConfig) -> None:
    """Raises InputError if the export would refer to a model that is only on this machine."""
    names = []
    if args.compact or args.lm == "reference":
        names.append(config.text.name)
    if args.compact:
        names += config.vision.pretrained
    for name in names:
        if Path(name).expanduser().exists():
            raise InputError(
                f"{name} is on this machine alone, and others could not load the export; leave out "
                "--compact and --lm reference"
            )


def write_export(args: ExportConfig, out: Path) -> None:
    """Writes the folder, and verifies it on request."""
    names = {part: getattr(args, part) for part in PARTS}
    given = {part: name for part, name in names.items() if name is not None}
    parts = {part: load_part(name, part) for part, name in given.items()}
    part_folders = [find_folder(name) for name in given.values()]
    source = find_folder(args.run)
    if is_export(source):
        if not parts or args.lm != "embed" or args.compact or args.verify:
            raise InputError(
                f"{args.run}: this is an export already, which keeps its form; give --completer or "
                "--outliner alone to put a part into it, or the run that it came from"
            )
        add_parts(source, out, parts, part_folders)
        print(f"wrote {out}: {args.run} with the given parts, {megabytes(out):.1f} MB")
        return

    run = load_run(args.run)
    check_references(args, run.config.model)
    embeds = args.lm == "embed"
    export(
        run,
        out,
        embed_language_model=embeds,
        compact=args.compact,
        parts=parts,
        part_folders=part_folders,
    )
    print(f"wrote {out}: step {run.step}, {megabytes(out):.1f} MB")
    if args.verify:
        size = run.config.model.vision.image_size
        scenes = open_split(DataConfig(), "val", count=NUM_VERIFIED, size=size)
        print(verify(run, out, [scenes[index] for index in range(NUM_VERIFIED)]))


def megabytes(folder: Path) -> float:
    """Returns the size of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def main() -> None:
    """Command line."""
    args = read_flags(ExportConfig)
    if args.compact and args.verify:
        raise InputError(
            "--verify compares float32 weights with the StableHLO; leave it out with --compact"
        )
    out = Path(args.out)
    # All of this is told before the model is loaded and written.
    check_out(out, args.overwrite)
    if args.push is not None:
        check_can_push(args.push)
    write_export(args, out)
    if args.push is not None:
        print(f"pushed to {push(out, args.push)}")


if __name__ == "__main__":
    cli_main(main)
