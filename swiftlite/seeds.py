"""What is random in a run as a function of a key: of no rank, and of nothing that was drawn before."""

from __future__ import annotations

import hashlib


def derive_seed(*key: object) -> int:
    """A 63-bit seed that is a function of the key only: the run's seed, the step, and what in it is random."""
    return int.from_bytes(key_digest(*key, size=8), "little") >> 1


def key_digest(*key: object, size: int) -> bytes:
    """So many bytes, of which each is a function of the whole key."""
    return hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=size).digest()
