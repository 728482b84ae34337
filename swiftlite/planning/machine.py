"""The device that a plan is for: one that is here, or one that is known by name."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from swiftlite.errors import UserError
from swiftlite.planning.devices import DEVICES, GB, Device, find_device
from swiftlite.planning.memory import free_bytes

SIDE, TIMES = 1024, 9  # of square matrices that are multiplied to know a CPU's rate
BY_MEMORY = 2 * GB  # bytes/s that processes of one machine send through its memory


def device_of(
    name: str | None, memory: int | None = None, link: float | None = None, network: float | None = None
) -> tuple[str, Device]:
    """(`cuda` or `cpu`, the device). name: as people write it, None for the one that is here; the others replace what
    is known of it: bytes, and bytes/s. Raises UserError for a device that nobody knows."""
    kind, found = _here() if name is None else ("cpu", _cpu()) if name.lower() == "cpu" else ("cuda", _known(name))
    said = {"memory": memory, "link": link, "network": network}
    return kind, replace(found, **{key: value for key, value in said.items() if value is not None})


def _known(name: str) -> Device:
    found = find_device(name)
    if found is None:
        names = ", ".join(device.name.lower().replace(" ", "-") for device in DEVICES)
        raise UserError(f"nothing is known of a device {name!r}", where="--device", fix=f"name one of: {names}, cpu")
    return found


def _here() -> tuple[str, Device]:
    if not torch.cuda.is_available():
        return "cpu", _cpu()
    device = torch.device("cuda", torch.cuda.current_device())
    return "cuda", replace(_known(torch.cuda.get_device_name(device)), memory=torch.cuda.mem_get_info(device)[1])


def _cpu() -> Device:
    """This machine's with its free memory; its FLOP/s are not known before they are asked for (`measure_rate`)."""
    free = free_bytes(torch.device("cpu"))
    return Device("CPU of this machine", 0.0, free, link=BY_MEMORY, network=GB, host=BY_MEMORY, capability=None)


def measure_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product on this CPU, the best of a few."""
    matrix = torch.randn(SIDE, SIDE).to(dtype)
    best = float("inf")
    for _ in range(TIMES):
        begun = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - begun)
    return 2 * SIDE**3 / best
