"""Threads share one heap, which grows in huge pages, and what is free is given back."""

import platform
import subprocess
import sys
from pathlib import Path

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


PAGES = """
import re
from swiftlite.heap import RESERVED, prepare_heap
prepare_heap()
maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M)
heap = [part for part in maps if part.partition("\\n")[0].endswith("[heap]")]
sizes = {part: int(re.search(r"^Size: +(\\d+) kB", part, re.M)[1]) * 1024 for part in heap}
held = [part for part in heap if sizes[part] >= 0.99 * RESERVED]
print(len(held), all(" hg" in re.search("VmFlags:(.*)", part)[1] for part in held))
print(sum(int(re.search(r"^Rss: +(\\d+) kB", part, re.M)[1]) * 1024 for part in heap) < RESERVED / 10)
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("first", "heaps"), [("keep_one_heap()", {1}), ("", {2, 3, 4})])
def test_threads_share_one_heap(first, heaps):
    assert run(THREADS.format(first=first)).stderr.count("Arena ") in heaps


def test_what_is_free_is_given_back():
    assert float(run(FREED).stdout) > 0.9


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs a kernel with huge pages")
def test_the_heap_grows_in_huge_pages():
    assert run(PAGES).stdout.split() == ["1", "True", "True"]
