"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

from splitcast.base.heap import keep_freed_memory

FAULTS = """
import resource, sys
from splitcast.base.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def once():
    block = bytearray(64 << 20)
    return len(block)
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="not glibc")
def test_a_block_that_was_freed_is_used_again_without_page_faults() -> None:
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True).stdout)
        for how in ("usual", "keep")
    )
    assert kept < usual / 20
