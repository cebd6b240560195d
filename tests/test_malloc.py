"""Commands keep the memory that they free."""

import os
import platform
import subprocess
import sys

import pytest

WORK = """
import resource
import numpy as np
from r2sm_jax.malloc import keep_memory
keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    np.ones(50_000_000, np.uint8)
before = faults()
for _ in range(20):
    np.ones(50_000_000, np.uint8)
print(faults() - before)
"""


def faults(tmp_path, environment: dict[str, str]) -> int:
    """Pages that the kernel gives a command which uses and frees 50 MB twenty times."""
    script = tmp_path / "work.py"
    script.write_text(WORK)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | environment
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_command_keeps_the_memory_that_it_frees(tmp_path):
    assert faults(tmp_path, {}) < 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_settings_of_the_user_are_left_alone(tmp_path):
    assert faults(tmp_path, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) > 200
