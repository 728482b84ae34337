"""What is known of devices that people train on, from their makers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

GB = 10**9
SLOWER = {"Laptop", "D", "MIG"}  # words of devices that share a name with a faster one


@dataclass(frozen=True)
class Device:
    """flops: dense bf16 peak in FLOP/s, without sparsity; memory: bytes; link: bytes/s that one device sends to the
    others of its machine; network: bytes/s that it sends to other machines, of machines as they are usually sold; host:
    bytes/s that it copies from its host's memory, and to it; capability: of NVIDIA's, None where there is none.
    """

    name: str
    flops: float
    memory: float
    link: float
    network: float
    host: float
    capability: tuple[int, int] | None


PCIE_4, PCIE_5 = 32 * GB, 64 * GB  # 16 lanes, one direction
SLOW, FAST, FASTEST = 3 * GB, 25 * GB, 50 * GB  # 25, 200 and 400 Gbit/s for each device
ADA, HOPPER = (8, 9), (9, 0)  # https://developer.nvidia.com/cuda-gpus

# The more particular names come first: a name of PyTorch's holds all words of a name here.
DEVICES = (
    Device("H200 NVL", 836e12, 141 * GB, 450 * GB, FAST, PCIE_5, HOPPER),
    Device("H200", 989e12, 141 * GB, 450 * GB, FASTEST, PCIE_5, HOPPER),
    Device("H100 NVL", 836e12, 94 * GB, 300 * GB, FAST, PCIE_5, HOPPER),
    Device("H100 PCIe", 756e12, 80 * GB, PCIE_5, FAST, PCIE_5, HOPPER),
    Device("H100", 989e12, 80 * GB, 450 * GB, FASTEST, PCIE_5, HOPPER),
    Device("H800 PCIe", 756e12, 80 * GB, PCIE_5, FAST, PCIE_5, HOPPER),
    Device("H800", 989e12, 80 * GB, 200 * GB, FASTEST, PCIE_5, HOPPER),
    Device("A100 40GB", 312e12, 40 * GB, 300 * GB, FAST, PCIE_4, (8, 0)),
    Device("A100", 312e12, 80 * GB, 300 * GB, FAST, PCIE_4, (8, 0)),
    Device("A800", 312e12, 80 * GB, 200 * GB, FAST, PCIE_4, (8, 0)),
    Device("L40S", 362e12, 48 * GB, PCIE_4, SLOW, PCIE_4, ADA),
    Device("L40", 181e12, 48 * GB, PCIE_4, SLOW, PCIE_4, ADA),
    Device("L4", 121e12, 24 * GB, PCIE_4, SLOW, PCIE_4, ADA),
    Device("A10", 125e12, 24 * GB, PCIE_4, SLOW, PCIE_4, (8, 6)),
    Device("RTX 4090", 165e12, 24 * GB, PCIE_4, SLOW, PCIE_4, ADA),
    Device("B200", 2250e12, 180 * GB, 900 * GB, FASTEST, PCIE_5, (10, 0)),
)


def find_device(name: str) -> Device | None:
    """The device that a name speaks of: PyTorch's, or as people write it, such as `h100` or `rtx4090`."""
    words = {word.lower() for word in re.split(r"[\s_-]+", name)}
    if words & {word.lower() for word in SLOWER}:
        return None
    plain = re.sub(r"[\s_-]+", "", name).lower()
    for device in DEVICES:
        if device.name.lower().replace(" ", "") == plain or words.issuperset(device.name.lower().split()):
            return device
    return None
