"""The layers of the package: which folder may import which, and no import circles."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "r2sm_jax"

# From the bottom up. A layer imports itself and the layers before it, never one after it.
LAYERS = {
    "ground": ["errors", "progress", "query", "config", "cli", "flags"],
    "models": ["models"],
    "data": ["data"],
    "synthetic": ["synthetic"],
    "inference": ["inference"],
    "training": ["training"],
    "evaluation": ["evaluation"],
    "tools": ["tools"],
    "commands": [
        *"train evaluate predict decide export demo ablate".split(),
        "data.__main__",
        "__main__",
    ],
}
ORDER = list(LAYERS)


def layer_of(module: str) -> str:
    """The layer of a dotted module name: that of its longest listed prefix."""
    prefixes = {prefix: layer for layer, names in LAYERS.items() for prefix in names}
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in prefixes:
            return prefixes[prefix]
    raise KeyError(module)


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


def test_no_module_imports_from_a_higher_layer():
    heights = {name: ORDER.index(layer_of(name)) for name in GRAPH if name != "__init__"}
    upwards = []
    for module, height in heights.items():
        upwards += [f"{module} -> {name}" for name in GRAPH[module] if heights[name] > height]
    assert upwards == []


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
