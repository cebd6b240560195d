"""Commands keep the memory that they free, in any thread."""

import os
import platform
import subprocess
import sys

import pytest

from r2sm_jax.cpu import GIGABYTE_PAGES, KEEP

WORK = """
import os
from r2sm_jax.cpu import ask_for_huge_pages, tune_malloc
tune_malloc()
ask_for_huge_pages()
print(os.environ["GLIBC_TUNABLES"])
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")


def settings(tmp_path, environment: dict[str, str]) -> str:
    """The settings that a command runs under."""
    script = tmp_path / "work.py"
    script.write_text(WORK)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | environment
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_command_restarts_with_settings_that_keep_its_memory(tmp_path):
    expected = KEEP if GIGABYTE_PAGES.exists() else "glibc.malloc.hugetlb=1"
    assert settings(tmp_path, {}) == expected


def test_settings_of_the_user_are_left_alone(tmp_path):
    assert settings(tmp_path, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == "glibc.malloc.hugetlb=0"
