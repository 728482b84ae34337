"""Calls that are a name with arguments behind it: an object of JSON, as those of DeepSeek V3, Kimi K2 and the newer
Mistral, or keys and values between tags or quotes, as those of Qwen 3.5, GLM, MiniMax, Gemma 4 and LFM 2."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from swiftlite.data.calls.forms import (
    NAME,
    QUOTES,
    Call,
    Closed,
    Example,
    Types,
    Unreadable,
    balanced,
    behind_blanks,
    closed_by,
    common_end,
    cut_tag,
    decoded,
    flexible,
    in_json,
    literal,
    wild,
)

KEY = "\0"  # where a key is written again
END_OF_TAG = re.compile(r"^[^<\[]*[>\]](?=\s*[<\[])\s*")  # of another one than follows


@dataclass(frozen=True)
class _Pair:
    """How a key with its value is written. middle: between them; close: behind the value, with the key where None
    stands; following: before the next key; enders: what may stand behind a value that nothing closes; typed: what ends
    `middle` where it names a type."""

    middle: str
    close: tuple[str | None, ...]
    following: str
    enders: str
    typed: str = ""

    @property
    def pattern(self) -> str:
        """Of what stands between, but for blanks at its end."""
        if not self.typed:
            return flexible(self.middle.rstrip())
        return f"{flexible(self.middle)}.*?{flexible(self.typed.rstrip())}"

    @property
    def blanks(self) -> str:
        middle = self.typed or self.middle
        return middle[len(middle.rstrip()) :]


@dataclass(frozen=True)
class Tagged:
    """lead: before the name of the first call; opener: the part of it before that of each; separator: before that of
    another right behind it, None where each begins anew; middle: pattern between a name and its arguments in JSON, or
    before the first key; closed: what stands behind; tail: behind the last one besides; first: before the first key;
    pairs: of texts and of others, none where arguments are JSON."""

    lead: str
    opener: str
    separator: str | None
    middle: str
    closed: Closed
    tail: str
    first: str = ""
    pairs: tuple[_Pair, ...] = ()

    def read(self, text: str, types: Types) -> tuple[int, list[Call]]:
        found, place, first = [], 0, len(text)
        while match := re.compile(flexible(self.opener)).search(text, place):
            first = min(first, self._begun(text[: match.end()], match.start()))
            call, place = self._call(text, match.end(), types)
            found.append(call)
            while self.separator and (match := re.compile(flexible(self.separator)).match(text, place)):
                call, place = self._call(text, match.end(), types)
                found.append(call)
        if found and not re.compile(rf"\s*{flexible(self.tail)}").match(text, place):
            raise Unreadable
        return first, found

    def _begun(self, text: str, opener: int) -> int:
        """Where the first call begins with all that stands before it. text: up to its name; opener: where that is."""
        lead = re.search(f"{flexible(self.lead)}$", text.rstrip())
        return lead.start() if lead else opener

    def _call(self, text: str, place: int, types: Types) -> tuple[Call, int]:
        match = re.compile(rf"\s*({NAME}?)(?:{self.middle})", re.DOTALL).match(text, place)
        if match is None:
            raise Unreadable
        name, place, id_ = match.group(1), match.end(), match.groupdict().get("id", "")
        if self.pairs:
            arguments, place = self._arguments(text, place, types.get(name, {}))
        else:
            begun = behind_blanks(text, place)
            arguments, place = decoded(text, place if begun is None else begun)
        if not isinstance(arguments, dict):
            raise Unreadable
        return Call(name, arguments, id_), self.closed.end(text, place)

    def _arguments(self, text: str, place: int, types: dict[str, Any]) -> tuple[dict[str, Any], int]:
        arguments: dict[str, Any] = {}
        before = self.first
        while found := self._argument(text, place, before, types):
            key, arguments[key], place, before = found
        return arguments, place

    def _argument(self, text: str, place: int, before: str, types: dict[str, Any]) -> tuple[str, Any, int, str] | None:
        """(key, value, the place behind it, what the next one has before its key); None where no other comes."""
        for number, pair in enumerate(self.pairs):
            pattern = rf"\s*{flexible(before)}\s*({NAME}?){pair.pattern}"
            if (match := re.compile(pattern).match(text, place)) is None:
                continue
            key, begun, is_text = match.group(1), match.end(), len(self.pairs) > 1 and number == 0
            begun += len(pair.blanks) if text.startswith(pair.blanks, begun) else 0
            close = "".join(key if part is None else part for part in pair.close)
            if not close:
                end = balanced(text, begun, pair.enders)
                return key, literal(self._in_json(text[begun:end])), end, pair.following
            lead = close[: len(close) - len(close.lstrip())]
            if (closing := re.compile(flexible(close.strip())).search(text, begun)) is None:
                raise Unreadable
            value = text[begun : closing.start()].removesuffix(lead)
            is_text = is_text or types.get(key, {}).get("type") == "string"
            return key, value if is_text else literal(value), closing.end(), pair.following
        return None

    def _in_json(self, value: str) -> str:
        """A list or an object may hold texts between the quotes that others have."""
        of_text, other = self.pairs[0], self.pairs[-1]
        opening = of_text.middle.removeprefix(other.middle)
        return in_json(value, opening, "".join(map(str, of_text.close))) if opening and of_text.close else value


def as_tagged(example: Example) -> Tagged | None:
    """The form of an example, None where it has another."""
    if (found := _opened(example)) is None:
        return None
    (one, other), lead, opener, separator = found
    if one.pairs is None:
        behind, id_ = wild(one.behind, other.behind), example.calls[0].id
        if id_ in one.behind:
            behind = rf"(?P<id>{NAME}?)".join(map(flexible, one.behind.split(id_, 1)))
        closed = closed_by([one.rest, other.rest])
        separator = separator and separator.removeprefix(closed.closer)
        return Tagged(lead, opener, separator, behind, closed, closed.behind(other.rest))
    empty = example.bare[example.bare.rfind(example.calls[0].name) + len(example.calls[0].name) :]
    middle, tag = cut_tag(os.path.commonprefix([one.behind, empty]))
    if not (middle + tag).strip():
        return None
    pairs = _fewest(_pair(one.pairs, one.rest), _pair(other.pairs, other.rest))
    rests = [_behind_pairs(part, pairs[0]) for part in (one, other)]
    closed = closed_by(rests)
    if one.rest.endswith(other.rest):  # in one text, where what closes the first may end as what opens the other begins
        between = one.rest[: other.name - one.end].partition(closed.closer)[2]
        opener = common_end(opener, between.strip()) or opener
    if separator:
        separator = _behind_pairs(replace(one, rest=separator), pairs[0]).removeprefix(closed.closer)
    first = one.behind[len(middle) :]
    behind = wild(middle, other.behind.removesuffix(first)) if other.behind.endswith(first) else flexible(middle)
    behind += f"(?={re.escape(tag)})" if tag else ""
    return Tagged(lead, opener, separator, behind, closed, closed.behind(rests[-1]), first, pairs)


def _behind_pairs(part: _Part, pair: _Pair) -> str:
    """What stands behind the last argument with all that closes it."""
    *_, last = part.pairs
    close = "".join(last if piece is None else piece for piece in pair.close)
    return part.rest.removeprefix(close) if close else part.rest.lstrip(QUOTES)


def _opened(example: Example) -> tuple[list[_Part], str, str, str | None] | None:
    """(both calls in their texts, and what `Tagged` says of what stands before them)."""
    both, texts, separator = example.both, example.texts, None
    if both is not None and (parts := _parts([both] * 2, example.calls)):
        one, other = parts
        lead, between = both[: one.name], both[one.end : other.name]
        opener = common_end(lead, between)
        if not opener.strip():
            opener, separator = lead, between
    elif parts := _parts(texts, example.calls):
        lead = opener = common_end(*(text[: part.name] for text, part in zip(texts, parts, strict=True)))
    else:
        return None
    opener = END_OF_TAG.sub("", opener.strip())
    return (parts, lead.strip(), opener, separator) if opener else None


def _parts(texts: Sequence[str], calls: Sequence[Call]) -> list[_Part]:
    """Each call in its text; none where one of them is not there."""
    found = [_in_json(text, call) or _in_pairs(text, call) for text, call in zip(texts, calls, strict=True)]
    return [] if None in found else found


def _fewest(text: _Pair, number: _Pair) -> tuple[_Pair, ...]:
    """The pairs that read both. Where texts are quoted as Python does, all are its literals; where what stands between
    key and value names its type, schemas tell it as well."""
    if text == number:
        return (text,)
    if text.middle[:-1] == number.middle and text.middle[-1] in QUOTES:
        return (number,)
    before, behind = os.path.commonprefix([text.middle, number.middle]), common_end(text.middle, number.middle)
    if before and behind and text.close == number.close:
        return (replace(text, middle=before, typed=behind),)
    return text, number


@dataclass(frozen=True)
class _Part:
    """A call in a text. name: where its name begins; behind: what stands between that and arguments or first key; end:
    where arguments end; rest: what stands behind that; pairs: of arguments that are no JSON what stands behind the
    first key, and behind its value, and both keys."""

    name: int
    behind: str
    end: int
    rest: str
    pairs: tuple[str, str, str, str] | None = None


def _in_json(text: str, call: Call) -> _Part | None:
    """Of a call whose arguments are an object of JSON behind its name."""
    for begun in (match.start() for match in re.finditer(r"\{", text)):
        try:
            value, end = decoded(text, begun)
        except Unreadable:
            continue
        name = text.rfind(call.name, 0, begun)
        if value == call.arguments and name >= 0:
            return _Part(name, text[name + len(call.name) : begun], end, text[end:])
    return None


def _in_pairs(text: str, call: Call) -> _Part | None:
    """Of a call whose keys and values stand behind its name, two of each."""
    (key, value), (other, last) = ((key, str(value)) for key, value in call.arguments.items())
    start = text.find(key)
    name = text.rfind(call.name, 0, max(0, start))
    places = [start, text.find(value, start)]
    places += [text.find(other, places[1]), text.find(last, places[1])]
    if name < 0 or min(places) < 0 or places != sorted(places):
        return None
    ends = [place + len(part) for place, part in zip(places, (key, value, other, last), strict=True)]
    pairs = text[ends[0] : places[1]], text[ends[1] : places[2]], key, other
    return _Part(name, text[name + len(call.name) : start], ends[3], text[ends[3] :], pairs)


def _pair(found: tuple[str, str, str, str], rest: str) -> _Pair:
    """By what a part says of its pairs, and what stands behind the last value."""
    middle, between, key, last = found
    marked = [between.replace(key, KEY), rest.replace(last, KEY, 1)]
    if KEY not in os.path.commonprefix(marked):
        marked = [between, rest]
    shared = os.path.commonprefix(marked)
    close = cut_tag(shared)[0] or shared
    split = tuple(None if piece == KEY else piece for piece in re.split(f"({KEY})", close) if piece)
    return _Pair(middle, split, marked[0][len(close) :], between[:1] + rest[:1])
