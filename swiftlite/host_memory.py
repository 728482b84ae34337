"""What of this machine's memory a process may still take, and an error in time where that is too little.

A GPU whose memory is full says so. The kernel of a machine ends a process, without a word.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from swiftlite.errors import UserError
from swiftlite.sizes import in_words

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Files of a control group: limit, use, what use is made of, and the words there for what is given back when needed,
# of files that were read once and more than once, as the kernel counts for MemAvailable.
VERSION_2 = ("memory.max", "memory.current", "memory.stat", "inactive_file|active_file|slab_reclaimable")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file|total_active_file")


def free_host_bytes() -> int | None:
    """Of one process: those of a machine share its memory. None where the system does not say."""
    free = _of_meminfo("MemAvailable")
    return None if free is None else min([free, *map(_free_of_limit, _own_groups())]) // _local_processes()


def fits_host_memory(needed: float) -> bool:
    """Whether there are so many bytes more for a process, pages on the disk included."""
    room = _room()
    return room is None or needed <= room


def check_host_memory(needed: float, what: str, where: str, fix: str) -> None:
    """Raises UserError where a process is about to take more than fits. what: who takes it, in the plural."""
    room = _room()
    if room is None or needed <= room:
        return
    each = f" in each of {count} processes" if (count := _local_processes()) > 1 else ""
    raise UserError(
        f"{what} take about {in_words(needed)} of this machine's memory{each}, of which {in_words(room)} are free"
        f"{' for each' if each else ''}",
        where=where,
        fix=fix,
    )


def _room() -> int | None:
    free = free_host_bytes()
    return None if free is None else free + (_of_meminfo("SwapFree") or 0) // _local_processes()


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _of_meminfo(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _text_of(MEMINFO), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _text_of(path: Path) -> str:
    """None of it where it is not there, or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _own_groups() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The control groups that this process is in, of either version, and all around them: each may have a limit, that
    of a container or of a job on a cluster."""
    for line in _text_of(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        inside = Path(path.lstrip("/"))
        if not controllers:
            root, names = GROUPS, VERSION_2
        elif "memory" in controllers.split(","):
            root, names = GROUPS / "memory", VERSION_1
        else:
            continue
        yield from ((root / place, names) for place in (inside, *inside.parents))


def _free_of_limit(group: tuple[Path, tuple[str, ...]]) -> int:
    folder, (limit, use, stat, given_back) = group
    most, used = _text_of(folder / limit).strip(), _text_of(folder / use).strip()
    if not (most.isdecimal() and used.isdecimal()):  # no such group, or no limit, which is written as `max`
        return sys.maxsize
    back = re.findall(rf"^(?:{given_back}) (\d+)$", _text_of(folder / stat), re.MULTILINE)
    return max(0, int(most) - int(used) + sum(map(int, back)))
