"""The import law of the package: which folder may import which, and no import circles."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "r2sm_jax"

# Each room may import itself, the ground and the rooms that are listed.
GROUND = ["errors", "progress", "query", "config", "cli", "flags", "markdown", "finders"]
ROOMS = {
    "models": [],
    "language": ["models"],
    "data": ["models", "language"],
    "synthetic": ["models", "data"],
    "sources": ["data", "synthetic"],
    "training": ["models", "language", "data"],
    "inference": ["models", "language", "data"],
    "evaluation": ["models", "language", "data", "synthetic", "inference"],
    "tools": ["data", "synthetic", "sources"],
}
COMMANDS = [
    *"train evaluate predict decide export demo ablate".split(),
    "data.__main__",
    "__main__",
]
EXCEPTIONS = {
    "tools.complete": ["inference"],  # loads a completer when it runs
    "tools.complete_image": ["inference"],  # is given one
}
MAX_IMPORTS = 14  # modules of the package that a file imports; commands may need more


def find_modules() -> dict[str, Path]:
    """Dotted names below `r2sm_jax` -> files. A folder's `__init__` has the folder's name."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    return modules


def find_imports(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, at its top or inside functions."""
    imports = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue

        for name in names:
            parts = name.split(".")
            if parts[0] != "r2sm_jax":
                continue
            for end in range(len(parts), 1, -1):
                module = ".".join(parts[1:end])
                if module in modules:
                    imports.add(module)
                    break
    return imports


MODULES = find_modules()
GRAPH = {name: find_imports(path, set(MODULES)) for name, path in MODULES.items()}


def test_every_room_imports_only_what_it_may():
    wrong = []
    for module, imports in GRAPH.items():
        room = module.split(".")[0]
        if module in (*COMMANDS, "__init__"):
            may_import = set(MODULES) - set(COMMANDS)
        elif module in GROUND:
            may_import = set(GROUND)
        else:
            rooms = (room, *ROOMS[room], *EXCEPTIONS.get(module, ()))
            may_import = {name for name in MODULES if name.split(".")[0] in rooms}
            may_import = may_import.difference(COMMANDS).union(GROUND)
        wrong += [f"{module} -> {name}" for name in imports - may_import]
    assert wrong == []


def test_no_file_imports_too_many_others():
    counts = {name: len(imports) for name, imports in GRAPH.items() if name not in COMMANDS}
    assert {name: count for name, count in counts.items() if count > MAX_IMPORTS} == {}


def test_there_is_no_import_circle():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_find_imports_sees_imports_inside_functions(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("import r2sm_jax.errors\ndef f():\n    from r2sm_jax.data import masks\n")
    assert find_imports(file, {"errors", "data", "data.masks"}) == {"errors", "data.masks"}


def test_the_configuration_loads_no_jax():
    code = "import sys, r2sm_jax.config; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


def test_the_mask_type_heads_load_no_image_library():
    code = "import sys, r2sm_jax.models.mask_type_heads; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = result.stdout.split()
    assert "r2sm_jax.models.mask_type_heads" in loaded, result.stderr
    unwanted = ("r2sm_jax.synthetic", "r2sm_jax.data", "r2sm_jax.tools", "PIL", "pycocotools")
    assert [name for name in loaded if name.startswith(unwanted)] == []


def declared(lines: list[str]) -> set[str]:
    """Names of distributions, as they are compared."""
    return {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}


def test_what_is_imported_is_declared():
    """What is optional is imported inside of functions."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    required = declared(project["dependencies"])
    optional = declared([line for of in project["optional-dependencies"].values() for line in of])
    distributions = packages_distributions()
    wrong = []
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = {node.module.split(".")[0]}
            else:
                continue
            for package in imported - sys.stdlib_module_names - {"r2sm_jax"}:
                of_package = declared(distributions.get(package, [package]))
                may_be = required if node in tree.body else required | optional
                if not of_package & may_be:
                    wrong.append(f"{name} -> {package}")
    assert wrong == []


def test_names_in_the_code_page_exist():
    root = PACKAGE.parent
    page = (root / "docs" / "code.md").read_text("utf-8")
    files = [*MODULES.values(), *root.glob("configs/*.py")]
    source = "\n".join(path.read_text("utf-8") for path in files)
    for name in re.findall(r"`([\w./]+)`", page):
        if "/" in name or name.endswith(".py"):
            assert (PACKAGE / name).exists() or (root / name).exists(), name
        else:
            for part in name.split("."):
                assert re.search(rf"\b(def|class) {part}\b|^{part}\b", source, re.M), name
