"""`python -m r2sm_jax.ablate [--quick]`: trains every mask-type head on sentences alone and
compares them.

Prints one table and writes it to a folder, with a figure and the numbers of every seed. No image is
used.
"""

from dataclasses import replace
from pathlib import Path

from r2sm_jax.cli import check_first, cli_main
from r2sm_jax.flags import read_ablate_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_first(read_ablate_flags)

from r2sm_jax.data.text_states import TextStates
from r2sm_jax.evaluation.ablation import AblationSizes, print_table, run_ablation, write_ablation
from r2sm_jax.inference.run import enable_compilation_cache

FULL = AblationSizes(num_steps=2000, num_scenes=1000, num_text_only=28_000, num_test_scenes=160)
QUICK = AblationSizes(num_steps=60, num_scenes=60, num_text_only=1200, num_test_scenes=30)


def main() -> None:
    """Command line."""
    args = read_ablate_flags()
    sizes = QUICK if args.quick else FULL
    num_seeds = (2 if args.quick else 3) if args.seeds is None else args.seeds
    num_steps = sizes.num_steps if args.steps is None else args.steps

    enable_compilation_cache()
    text = args.text
    texts = TextStates(text.name, layers=text.layers, max_tokens=text.max_tokens)
    results = run_ablation(
        args.heads, texts, replace(sizes, num_steps=num_steps), num_seeds=num_seeds
    )
    print_table(results)
    folder = Path(args.out)
    write_ablation(results, folder)
    print(f"wrote {folder / 'heads.md'}, heads.png and heads.json")


if __name__ == "__main__":
    cli_main(main)
