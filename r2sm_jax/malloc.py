"""Memory for XLA's temporaries on Linux, in huge pages and kept: a third off a training step's time on CPU, and more.

As glibc comes, it maps the temporaries of a step, half a gigabyte, and unmaps them again at every call, at a page fault
for every 4 KiB. 2 MiB pages make the faults fewer. Better is to keep the memory: with pages of 1 GiB asked for, an
arena may grow to 4 GiB (to 64 MiB otherwise), whether or not the kernel has such pages to give, and no step takes
memory or gives any back. Figures are in docs/experiments.md. Other C libraries ignore all this.
"""

import ctypes
import mmap
import os
import sys
from pathlib import Path

GIGABYTE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB")
"""Exists where the processor knows them, which glibc asks."""
KEEP = "glibc.malloc.hugetlb=1073741824:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
FEWER_FAULTS = "glibc.malloc.hugetlb=1"
HUGE = 2**21
MADV_COLLAPSE = 25  # <linux/mman.h>, since Linux 6.1


def tune_malloc() -> None:
    """Restarts this command with the settings, which glibc reads when a process starts, unless the user has made some.

    Call it before any work is done.
    """
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ or not sys.orig_argv[1:]:
        return
    sys.stdout.flush()
    settings = {"GLIBC_TUNABLES": KEEP if GIGABYTE_PAGES.exists() else FEWER_FAULTS}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings)


def ask_for_huge_pages() -> None:
    """Makes the memory that is kept one of 2 MiB pages, as far as it is used, and what is used from now on.

    Call it once the temporaries have been allocated. Does nothing where memory is not kept.
    """
    if os.environ.get("GLIBC_TUNABLES") != KEEP:
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *rest = line.split()
        start, end = (int(address, 16) for address in place.split("-"))
        if len(rest) > 3 or end - start < HUGE:  # a file's, or too small
            continue
        region = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        libc.madvise(*region, mmap.MADV_HUGEPAGE)
        if access.startswith("rw"):
            libc.madvise(*region, MADV_COLLAPSE)
