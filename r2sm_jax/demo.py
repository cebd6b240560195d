"""`python -m r2sm_jax.demo [RUN|EXPORT]`: a web page on which people try a trained segmenter."""

import os
import tempfile
from pathlib import Path

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import DemoConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(DemoConfig)

from r2sm_jax.config import NO_HEAD
from r2sm_jax.errors import InputError
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import enable_compilation_cache, load


def load_predictor(args: DemoConfig) -> Predictor:
    """Opens the run. Raises InputError if its head cannot decide from a sentence."""
    predictor = load(args.run, checkpoint=args.checkpoint).predictor
    if predictor.config.head in (NO_HEAD, "oracle"):
        raise InputError(
            f"{args.run}: its head, {predictor.config.head}, reads no sentence; give a run that "
            "decides"
        )
    return predictor


def main() -> None:
    """Command line."""
    args = read_flags(DemoConfig)
    if args.max_upload_mb < 1:
        raise InputError(f"--max-upload-mb {args.max_upload_mb}: give 1 or more")
    if not 0 <= args.port < 65536:
        raise InputError(f"--port {args.port}: give a number between 0 and 65535")
    enable_compilation_cache()
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        # gradio reads both when it is imported: no reports home, and uploads go into our folder.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            from r2sm_jax.inference.web_page import launch
        except ImportError:
            raise InputError("the page needs gradio; pip install 'r2sm_jax[demo]'") from None

        predictor = load_predictor(args)
        predictor.warm_up()
        page = launch(
            predictor,
            Path(folder),
            host=args.host,
            port=args.port,
            max_upload_mb=args.max_upload_mb,
        )
        page.block_thread()


if __name__ == "__main__":
    cli_main(main)
