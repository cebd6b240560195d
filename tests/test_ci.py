"""What `.ci/run` decides: which Pythons are tested. And that a deprecation fails a test."""

import subprocess
import tomllib
import warnings
from pathlib import Path

import optax
import pytest

ROOT = Path(__file__).parents[1]


def pythons(folder: Path, working: list[int], broken: list[int] = []) -> list[str]:  # noqa: B006
    """What `.ci/pythons` prints where these versions of Python 3 are all that there is."""
    for minor in [*working, *broken]:
        fake = folder / f"python3.{minor}"
        fake.write_text(f"#!/bin/sh\nexit {int(minor in broken)}\n")
        fake.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", ROOT / ".ci" / "pythons"],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line).name for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("working", "broken", "chosen"),
    [
        ([11], [], ["python3.11"]),
        ([11, 12, 13], [], ["python3.11", "python3.13"]),
        (
            [12, 13],
            [11, 14],
            ["python3.12", "python3.13"],
        ),  # those cannot make virtual environments
        ([10], [], ["python3"]),  # too old; `python3` then says so itself
    ],
)
def test_the_oldest_and_the_newest_python_are_tested(working, broken, chosen, tmp_path):
    assert pythons(tmp_path, working, broken) == chosen


def test_the_classifiers_name_the_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python ::" in line}
    assert named == {"3", "3.11", "3.12", "3.13"} and project["requires-python"] == ">=3.11"


@pytest.mark.parametrize("category", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
def test_calling_what_is_deprecated_fails_a_test(category):
    with pytest.raises(category, match="on its way out"):
        warnings.warn("on its way out", category, stacklevel=1)


def test_the_norm_of_gradients_is_not_the_deprecated_one():
    """`optax.global_norm` is deprecated in newer versions; `optax.tree.norm` is in all that we allow."""
    assert float(optax.tree.norm({"a": 3.0, "b": [4.0]})) == 5.0
    named = [
        path
        for path in (ROOT / "r2sm_jax").rglob("*.py")
        if "optax.global_norm" in path.read_text()
    ]
    assert named == []
