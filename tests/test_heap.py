"""Threads share one heap after `keep_one_heap`, and what is free is given back."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

THREADS = """
import ctypes, threading
from swiftlite.heap import keep_one_heap
{first}
kept = []
for _ in range(3):
    thread = threading.Thread(target=lambda: kept.append(bytearray(100_000)))
    thread.start()
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""

FREED = """
import ctypes
from swiftlite.heap import give_back
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
size, count = 100_000, 1000  # too small to be taken from the system each by itself
kept = [bytearray(b"x") * size for _ in range(count)]
last = bytearray(b"x") * size
del kept
before = resident()
give_back()
print((before - resident()) / (size * count))
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("first", "heaps"), [("keep_one_heap()", {1}), ("", {2, 3, 4})])
def test_threads_share_one_heap(first, heaps):
    assert run(THREADS.format(first=first)).stderr.count("Arena ") in heaps


def test_what_is_free_is_given_back():
    assert float(run(FREED).stdout) > 0.9
