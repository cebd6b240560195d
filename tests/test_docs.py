"""The README and the notebook: what they tell users to run is there. Figures are measured ones."""

import ast
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from r2sm_jax.__main__ import COMMANDS
from r2sm_jax.cli import parse_config, parse_flags
from r2sm_jax.data.__main__ import main as data
from r2sm_jax.flags import COMMANDS as FLAGS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
PAGES = [
    ROOT / "README.md",
    ROOT / "scripts" / "onnx" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def written_commands(text: str) -> list[list[str]]:
    """The arguments of each `python -m r2sm_jax.COMMAND ...` of a page, the command first."""
    found = re.findall(r"python -m r2sm_jax\.([^\n`|#]*)", text)
    return [shlex.split(line) for line in found if not line.rstrip().endswith("\\")]


@pytest.mark.parametrize("words", written_commands(README), ids=" ".join)
def test_commands_of_the_readme_are_understood(words, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    name, *args = words
    if name == "train":
        parse_config(args)
    elif name == "data":
        # The command and its flags are known where only its files are missing.
        end = command(data, *args)
        assert end.code == 2 and "Unrecognized" not in end.err and "invalid choice" not in end.err
    else:
        (cls,) = [cls for cls, command_name in FLAGS.items() if command_name == name]
        parse_flags(cls, args, prog=name)


def test_the_readme_names_every_command():
    assert {words[0] for words in written_commands(README)} >= set(COMMANDS) - {"export"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        path = target.partition("#")[0]
        if path and not target.startswith("http"):
            assert (page.parent / path).exists(), target


CARD = (ROOT / "r2sm_jax/released/photos-small/README.md").read_text("utf-8")
CONFIGS = [path for path in (ROOT / "configs").glob("*.py") if not path.stem.startswith("r2sm_")]
TOLD = {
    "README": README[: README.index("## How it works")],
    "card": CARD[CARD.index("## Figures") : CARD.index("## Training data")],
    # Other lines of these pages have settings, too.
    **{
        f"docs/{name}": "\n".join(
            re.findall(".*IoU of.*", (ROOT / "docs" / f"{name}.md").read_text("utf-8"))
        )
        for name in ("complete", "photos", "predict")
    },
    **{path.name: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in CONFIGS},
}
"""What tells users how good something is."""


@pytest.mark.parametrize("where", TOLD)
def test_figures_are_among_the_results(where):
    """As they stand in docs/results.md, or rounded; percents as shares."""
    numbers = re.findall(r"\d+\.\d+", (ROOT / "docs" / "results.md").read_text("utf-8"))
    measured = {float(number) for number in numbers}
    told = TOLD[where].replace("2506.01795", "").replace("3.11", "").replace("Apache-2.0", "")
    figures = re.findall(r"(\d+\.\d+)( %)?", told)
    assert figures or where not in ("README", "card")
    for figure, percent in figures:
        scale, digits = (100, len(figure.split(".")[1]))
        values = {round(scale * value, digits) for value in measured} if percent else set()
        values |= {round(value, digits) for value in measured}
        assert float(figure) in values, figure


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """In a copy of the clone, as in a notebook that is opened in docs/."""
    (tmp_path / "docs").mkdir()
    for name in ("coffee.jpg", "saucer.png"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path / "docs")
    # The run is a process of its own, which finds the package where this one does.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    namespace: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), namespace)
    out = capsys.readouterr().out
    assert '\nmodal: "the saucer"' in out and '\namodal: "the saucer as if' in out
    assert (
        "1 kept, 0 changed" in out and "nothing wrong with 1 images" in out and "modal masks" in out
    )
    assert (tmp_path / "runs" / "latest" / "report.html").exists()
