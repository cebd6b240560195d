"""Puts an export on the Hugging Face hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HTTPError

from r2sm_jax.errors import InputError
from r2sm_jax.inference.model_folder import FILES, check_files
from r2sm_jax.models.hub import HUB, HUB_NAME


def check_can_push(name: str) -> None:
    """Raises InputError for what is no name of a repository, and where no token says who pushes."""
    match = HUB_NAME.fullmatch(HUB + name.removeprefix(HUB))
    if match is None or match[2] is not None:
        raise InputError(f"--push {name}: no name of a repository on the hub; give owner/name")
    if huggingface_hub.get_token() is None:
        raise InputError(
            f"--push {name}: there is no token for the Hugging Face hub; run `hf auth login`, or "
            "set HF_TOKEN to a token that may write"
        )


def push(folder: Path, name: str) -> str:
    """Uploads an export to the repository `owner/name`, which is made if there is none.

    Returns its address. Files of an earlier export that the new one lacks are deleted there; other
    files stay. Raises InputError as `check_can_push`, if the export is damaged, or if the hub does
    not take it.
    """
    check_can_push(name)
    check_files(folder)
    api = huggingface_hub.HfApi()
    repository = name.removeprefix(HUB)
    try:
        address = api.create_repo(repository, exist_ok=True)
        # Only files of an export, in one commit: what else lies in the folder stays here.
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(FILES),
            delete_patterns=list(FILES),
            commit_message="Export of r2sm_jax",
        )
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"--push {name}: the Hugging Face hub did not take it ({reason}); the export is in "
            f"{folder}; push it later with hf upload {repository} {folder}"
        ) from None
    return str(address)
