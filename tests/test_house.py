"""The law of the house: which room may import which, no circles, no large files, a package that stays small."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "r2sm_jax"
MOST_LINES, MOST_FILES, LONGEST_FILE = 16_602, 86, 400
"""What the package has today. The first two go down: the aim is 12,500 lines in 75 files. The first went up once, from
16,597 on 2026-11-26, when visitors had found thirty mistakes."""

ROOMS = {
    "ground": "errors query config flags cpu random_choice distributed feature_cache",
    "data": "data", "models": "models",
    "training": "training", "metrics": "metrics", "queries": "queries", "scenes": "scenes", "tools": "tools",
    "sources": "sources",
    "predictor": "predictor prediction", "runs": "runs exported",
    "commands": "train evaluate predict journal",
}  # fmt: skip
"""Room -> files and folders of the package that belong to it."""
MAY_IMPORT = {
    "ground": "",
    "data": "ground",
    "models": "ground",
    "queries": "ground",
    "scenes": "ground data queries",
    "training": "ground data models",
    "metrics": "ground data",
    "predictor": "ground data models",
    "sources": "ground data scenes queries",
    "runs": "ground data models training predictor",
    "commands": "ground data models training metrics predictor sources runs",
    "tools": "ground data models training metrics predictor sources runs commands scenes queries",
}
"""Room -> the lower rooms that it may import. Every room may import itself."""
DOORS = {"__init__", "export", "demo", "data.__main__"}
"""Entry points of a few lines, which may import anything and which nobody imports."""

ROOM_OF = {name: room for room, names in ROOMS.items() for name in names.split()}


def modules() -> dict[str, Path]:
    """Dotted names, without the package's own, of all files; a folder's `__init__` has the folder's name."""
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(path: Path, known: set[str]) -> set[str]:
    """The modules of the package that a file imports, anywhere in it, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "r2sm_jax":
                tails = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
                found |= set(next(([tail] for tail in tails if tail in known), []))
    return found


GRAPH = {name: imports(path, set(modules())) for name, path in modules().items()}


def test_every_file_has_a_room():
    assert [name for name in GRAPH if name not in DOORS and name.split(".")[0] not in ROOM_OF] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_lower_rooms_only(room):
    allowed = {room, *MAY_IMPORT[room].split()}
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        if name not in DOORS and ROOM_OF.get(name.split(".")[0]) == room
        for other in sorted(others)
        if other in DOORS or ROOM_OF.get(other.split(".")[0]) not in allowed
    ]
    assert wrong == []


def test_there_is_no_import_circle():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_test_of_the_law_sees_imports(tmp_path):
    file = tmp_path / "file.py"
    lines = ("import r2sm_jax.cpu", "def f():", "    from r2sm_jax.data import masks")
    file.write_text("\n".join(lines))
    assert imports(file, {"cpu", "data", "data.masks"}) == {"cpu", "data.masks"}


def test_the_package_stays_small():
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}
    assert sum(lines.values()) <= MOST_LINES and len(lines) <= MOST_FILES


def test_the_heads_load_no_grammar_and_no_image_library():
    code = "import sys, r2sm_jax.models.heads; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unwanted = ("r2sm_jax.queries", "r2sm_jax.scenes", "r2sm_jax.data", "r2sm_jax.tools", "PIL", "pycocotools")
    assert [name for name in loaded if name.startswith(unwanted)] == []
