"""Values and bytes near a valid example: the grammar is kept and its parts replaced, or bytes are changed blindly."""

from __future__ import annotations

import copy
import random
from typing import Any

from hypothesis import strategies as st

HUGE = (10**400, -(10**400), 2**63, 2**64, 1e308, float("inf"), float("nan"))
TEXTS = (
    "", "\0", "\ud800", "\udcff", "\x1b[2J", "a\r\nb", "../../etc/passwd", "/etc/passwd", "~nobody/x", "x" * 5000,
    "user", "assistant", "gpt", "system", "function_call", "true", "null", "NaN", "[1]", '{"name": "f"}',
    "[" * 3000, '{"a":' * 200 + "1" + "}" * 200, "9" * 5000, "https://user:secret@host/x",
)  # fmt: skip
KEYS = ("role", "content", "name", "value", "from")
LETTERS = (
    "abAB019 _-.,:;/\\\"'{}[]()<>|&*#@!%?=+~$^`\n\r\t\0\x1b\x7f\x85\xa0"
    "\u00e9\u0130\u2028\u202e\ufeff\uffff\ud83d\U0001f600"
)
DEEP = (20, 90, 110, 400)
TOKENS = (
    b"\0", b"\xff", b'"', b"'", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\r", b"\t", b"\\ud800", b"\\",
    b"\xed\xa0\x80", b"null", b"1e999", b"9" * 4400, b"[" * 1200, b'{"a":' * 1200, b"&a ", b"*a",
    b"!!python/object/apply:os.system ",
    b"- ", b"? ", b"---\n", b"%YAML 1.1\n", b"\xef\xbb\xbf", b"Infinity", b"-0", b'"\\UFFFFFFFF"', b"<<: ",
)  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(LETTERS, max_size=20), st.sampled_from(TEXTS),
    st.sampled_from(HUGE),
)  # fmt: skip
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(LETTERS, max_size=8)), SCALARS, max_size=3),
    st.sampled_from(DEEP).map(_nested),
)  # fmt: skip


def changed(value: Any, chance: random.Random, replacements: list[Any], names: tuple[str, ...]) -> Any:
    """A copy of a JSON value in which a part is replaced for each replacement, or removed, doubled or renamed."""
    value = copy.deepcopy(value)
    for replacement in replacements:
        holder, key = _place(value, chance)
        if holder is None:
            return replacement
        action = chance.randrange(8)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[chance.choice(names)] = holder[key]
        elif action == 2 and isinstance(holder, list):
            holder.extend([holder[key]] * chance.choice((1, 2, 50)))
        elif action == 3 and isinstance(holder, dict):
            holder[chance.choice(names)] = replacement
        else:
            holder[key] = replacement
    return value


def _place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """A random place below a value: what holds it, and its key or index there."""
    holder, key = None, None
    while isinstance(value, dict | list) and value and (holder is None or chance.random() < 0.7):
        holder, key = value, chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
    return holder, key


def damaged(data: bytes, chance: random.Random, times: int) -> bytes:
    """The bytes with `times` changes: bits flipped, parts cut out, doubled or overwritten, tokens put in."""
    found = bytearray(data)
    for _ in range(times):
        at, action = chance.randrange(len(found) + 1), chance.randrange(7)
        end = min(len(found), at + chance.choice((1, 1, 4, 64)))
        if action == 0 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif action == 1:
            del found[at:end]
        elif action == 2:
            found[at:at] = chance.choice(TOKENS)
        elif action == 3:
            found[at:end] = chance.randbytes(end - at)
        elif action == 4:
            found[at:at] = found[at:end] * chance.choice((1, 2, 100))
        elif action == 5:
            found[at:end] = chance.choice((b"\0", b"\xff", b"\x7f")) * (end - at)
        else:
            del found[at:]
    return bytes(found)
