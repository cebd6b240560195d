"""`python -m r2sm_jax.demo [RUN|EXPORT]`: a web page on which people try a trained segmenter."""

import os
import socket
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
from r2sm_jax.progress import show_progress


def check_address(host: str, port: int) -> None:
    """Raises InputError where a server cannot listen.

    This is for the sake of an early message: loading the model takes longest, and only then the
    page opens.
    """
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind) as listener:
            # As servers do: a port that was in use a moment ago is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError:
        raise cannot_open(host, port) from None


def cannot_open(host: str, port: int) -> InputError:
    """The error of an address that is in use, not allowed, or none of this machine."""
    return InputError(
        f"--port {port} at {host} cannot be opened; give another --port (0 takes a free one) or "
        "--host"
    )


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
    check_address(args.host, args.port)
    enable_compilation_cache()
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        # gradio reads both when it is imported: no reports home, and uploads go into our folder.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            from r2sm_jax.inference.web_page import launch
        except ImportError:
            raise InputError("the page needs gradio; pip install 'r2sm_jax[demo]'") from None

        with show_progress("preparing the page"):
            predictor = load_predictor(args)
            predictor.warm_up()
        try:
            page = launch(
                predictor,
                Path(folder),
                host=args.host,
                port=args.port,
                max_upload_mb=args.max_upload_mb,
            )
        except OSError:  # another program was faster
            raise cannot_open(args.host, args.port) from None
        page.block_thread()


if __name__ == "__main__":
    cli_main(main)
