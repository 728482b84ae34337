"""What the system says of this machine's processor."""

from __future__ import annotations

from pathlib import Path

INFORMATION = Path("/proc/cpuinfo")


def processor() -> dict[str, str]:
    """What Linux says of the first processor, nothing where it cannot be known."""
    first = INFORMATION.read_text().partition("\n\n")[0] if INFORMATION.is_file() else ""
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def instructions() -> frozenset[str]:
    """The names of its extensions, as x86 has them, such as `avx512f`."""
    return frozenset(processor().get("flags", "").split())
