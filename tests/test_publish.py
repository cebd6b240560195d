"""An export on the Hugging Face hub: what is pushed comes back, and what is refused."""

import shutil
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from r2sm_jax import export
from r2sm_jax.inference import stablehlo
from r2sm_jax.inference.export import export as write_export, push
from r2sm_jax.inference.load import load_run
from r2sm_jax.inference.model_folder import verify_files


class Hub:
    """The hub's interface, with a folder in place of the hub."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.token: str | None = "hf_token"
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, exist_ok: bool) -> str:
        (self.folder / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(
        self, *, repo_id, folder_path, allow_patterns, delete_patterns, commit_message
    ) -> None:
        if self.error is not None:
            raise self.error
        repository = self.folder / repo_id
        for folder, patterns in ((repository, delete_patterns), (folder_path, allow_patterns)):
            for file in sorted(folder.rglob("*")):
                name = file.relative_to(folder).as_posix()
                if not file.is_file() or not any(fnmatch(name, p) for p in patterns):
                    continue
                if folder == repository:
                    file.unlink()
                    continue
                (repository / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, repository / name)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    monkeypatch.setattr(stablehlo, "PLATFORMS", ("cpu",))  # lowering takes most of the time
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: hub.token)
    return hub


def test_what_is_pushed_is_a_whole_export(tiny_run, tmp_path, hub, command):
    out = tmp_path / "mugs"
    out.mkdir()
    (out / "notes.txt").write_text("not for others")
    end = command(export.main, tiny_run, "--out", out, "--push", "me/mugs")
    assert end.code == 0 and "https://huggingface.co/me/mugs" in end.out

    pushed = hub.folder / "me" / "mugs"
    verify_files(pushed)
    assert not (pushed / "notes.txt").exists()
    # The head of the card, as the hub reads it.
    data = ModelCard.load(pushed / "README.md").data.to_dict()
    assert data["library_name"] == "r2sm_jax" and data["pipeline_tag"] == "image-segmentation"
    assert data["license"] and "jax" in data["tags"]

    # A second push replaces the files of the first; those that others put there stay.
    (pushed / "demo.ipynb").write_text("{}")
    write_export(load_run(tiny_run), out, compact=True)
    push(out, "hf:me/mugs")
    verify_files(pushed)
    assert (pushed / "demo.ipynb").exists() and not (pushed / "model.stablehlo").exists()


def test_refusals(tiny_run, tmp_path, hub, refused):
    out = tmp_path / "out"
    for name in ("mugs", "me/mugs@main", "me/mugs/more", "https://huggingface.co/me/mugs"):
        assert f"--push {name}" in refused(export.main, tiny_run, "--out", out, "--push", name)
    hub.token = None
    message = refused(export.main, tiny_run, "--out", out, "--push", "me/mugs")
    assert "token" in message and "HF_TOKEN" in message
    # All of that was told before anything was written.
    assert not out.exists() and not hub.folder.exists()

    hub.token = "hf_token"
    hub.error = OSError("no route to the hub")
    message = refused(export.main, tiny_run, "--out", out, "--push", "me/mugs")
    # The export is there to be pushed later.
    assert "no route" in message and str(out) in message
    verify_files(out)
