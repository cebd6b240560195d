"""Commands keep the memory that they free, in any thread."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from r2sm_jax.malloc import GIGABYTE_PAGES

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
WORK = """
import re
import resource
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from r2sm_jax.malloc import ask_for_huge_pages, tune_malloc
tune_malloc()
def use(count):
    for _ in range(count):
        np.ones(100_000_000, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with ThreadPoolExecutor(1) as thread:
    before = thread.submit(use, 3).result()
    print(thread.submit(use, 20).result() - before)
ask_for_huge_pages()
print(re.search(r"AnonHugePages: *([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1])
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")


def work(tmp_path, environment: dict[str, str]) -> tuple[int, int]:
    """Pages that the kernel gives a command of which a thread uses and frees 100 MB twenty times; KiB in huge pages."""
    script = tmp_path / "work.py"
    script.write_text(WORK)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | environment
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    faults, huge = done.stdout.split()
    return int(faults), int(huge)


@pytest.mark.skipif(not GIGABYTE_PAGES.exists(), reason="the processor has no pages of 1 GiB")
def test_a_command_keeps_the_memory_that_it_frees(tmp_path):
    faults, huge = work(tmp_path, {})
    assert faults < 100
    version = tuple(map(int, platform.release().split(".")[:2]))
    if version >= (6, 1) and "[never]" not in SETTING.read_text():
        assert huge > 90_000


def test_settings_of_the_user_are_left_alone(tmp_path):
    assert work(tmp_path, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})[0] > 500
