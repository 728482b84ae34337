"""Summary of all runs as text, as Markdown, and against the goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from bench.measure import Run, median
from bench.settings import Benchmark

BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"


@dataclass(frozen=True)
class Line:
    """Medians over the runs of one setting; `failures` and `logs`: why each failed run did, and where that is told."""

    tool: str
    setting: str
    kind: str
    runs: int
    rate: float | None
    lowest: float | None
    highest: float | None
    of_swiftlite: float | None
    padding: float | None
    start_seconds: float | None
    first_step_seconds: float | None
    peak_rss_mib: float | None
    others_cores: float | None
    failures: list[str]
    logs: list[str]


def summarise(benchmark: Benchmark, runs: list[Run]) -> list[Line]:
    """One line a setting, in their order; settings without a run are left out."""
    lines = []
    base = median([run for run in runs if _is(run, "swiftlite", "defaults") and not run.failure], benchmark.rate)
    for setting in benchmark.settings:
        of_setting = [run for run in runs if _is(run, setting.tool, setting.name)]
        good = [run for run in of_setting if not run.failure]
        if not of_setting:
            continue
        rate = median(good, benchmark.rate)
        rates = [value for run in good if (value := vars(run)[benchmark.rate]) is not None]
        lines.append(
            Line(
                tool=setting.tool, setting=setting.name, kind=setting.kind, runs=len(good), rate=rate,
                lowest=min(rates, default=None), highest=max(rates, default=None),
                of_swiftlite=rate / base if rate and base else None, padding=median(good, "padding"),
                start_seconds=median(good, "start_seconds"),
                first_step_seconds=median(good, "first_step_seconds"), peak_rss_mib=median(good, "peak_rss_mib"),
                others_cores=median(good, "others_cores"),
                failures=[run.failure for run in of_setting if run.failure],
                logs=[run.log for run in of_setting if run.failure],
            )
        )  # fmt: skip
    return lines


def _is(run: Run, tool: str, setting: str) -> bool:
    return run.tool == tool and run.setting == setting


def _header(benchmark: Benchmark) -> tuple[str, ...]:
    return (
        "tool", "setting", benchmark.unit, "of swiftlite", "padding", "start s", "first step s", "peak MiB",
        "others' cores", "runs",
    )  # fmt: skip


def _cells(line: Line) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    form = ",.0f" if line.rate is None or line.rate >= 100 else ".2f" if line.rate >= 1 else ".3f"
    rate = number(line.rate, form)
    if line.runs > 1 and line.lowest is not None and line.highest is not None:
        rate += f" ({line.lowest:{form}}-{line.highest:{form}})"
    count = str(line.runs) + (f", {len(line.failures)} FAILED" if line.failures else "")
    return [
        line.tool, line.setting, rate, number(line.of_swiftlite, ".2f"), number(line.padding, ".0%"),
        number(line.start_seconds, ".1f"), number(line.first_step_seconds, ".1f"), number(line.peak_rss_mib, ",.0f"),
        number(line.others_cores, ".2f"), count,
    ]  # fmt: skip


def text_table(benchmark: Benchmark, lines: list[Line]) -> str:
    header = _header(benchmark)
    table = [list(header), *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    rendered = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    rendered.insert(1, "-" * max(map(len, rendered)))
    failed = [
        f"{line.tool}, {line.setting}: FAILED, {failure}: see {log}"
        for line in lines
        for failure, log in zip(line.failures, line.logs, strict=True)
    ]
    return "\n".join(rendered + failed)


def markdown_table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(header), ["---"] * len(header), *rows])


def goals(benchmark: Benchmark, lines: list[Line]) -> list[str]:
    """The goals for swiftlite's defaults, each with what was measured. Empty without a run of it and of a peer."""
    ours = {line.setting: line for line in lines if line.kind == "swiftlite" and line.runs}
    own, unpacked = ours.get("defaults"), ours.get("no packing")
    peers = [line for line in lines if line.kind != "swiftlite" and line.runs]
    if own is None or not peers:
        return []
    found = []

    def compare(what: str, value: float | None, best: float | None, limit: float, at_least: bool) -> None:
        if value and best:
            reached = value / best >= limit if at_least else value / best <= limit
            found.append(f"{what}: {value / best:.2f}x (goal {limit}x): {'reached' if reached else 'NOT reached'}")

    for kind, factor in benchmark.kinds.items():
        best = max((line.rate for line in peers if line.kind == kind and line.rate), default=None)
        compare(f"{benchmark.unit} against the best peer, {kind}", own.rate, best, factor, True)
    if benchmark.first_step is not None:
        for what, mine, field in (
            ("start", own, "start_seconds"),
            ("first step", own, "first_step_seconds"),
            ("first step of as many rows, which is not packed,", unpacked, "first_step_seconds"),
        ):
            fastest = min((value for line in peers if (value := vars(line)[field])), default=None)
            value = mine and vars(mine)[field]
            compare(f"{what} against the fastest peer", value, fastest, benchmark.first_step, False)
    memory = min((line.peak_rss_mib for line in peers if line.peak_rss_mib), default=None)
    compare("peak memory against the leanest peer", own.peak_rss_mib, memory, benchmark.memory, False)
    return found


def markdown(benchmark: Benchmark, lines: list[Line], facts: dict) -> str:
    """The table, the goals and what they were measured on, for docs/performance.md."""
    machine, rows = facts["machine"], facts["workload"]
    tools = "; ".join(
        f"{tool}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for tool, found in facts["versions"].items()
    )
    parts = [
        f"Measured on {facts['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{facts['threads']} threads a tool; medians of {facts['rounds']} interleaved round(s); "
        f"{rows['rows']} {rows.get('what', 'rows')} of {rows['shortest']}-{rows['longest']} tokens "
        f"(median {rows['median']:.0f}, mean {rows['mean']:.0f}).",
        markdown_table(_header(benchmark), [_cells(line) for line in lines]),
        "\n".join(f"- {goal}" for goal in goals(benchmark, lines)),
        "\n".join(f"- {line.tool}, {line.setting}: failed, {failure}" for line in lines for failure in line.failures),
        f"Versions: {tools}.",
    ]
    return "\n\n".join(part for part in parts if part)


def has_place(file: Path, name: str) -> bool:
    """Whether a Markdown file has the marks between which the table of `name` goes: asked before hours of runs."""
    text = file.read_text() if file.is_file() else ""
    return BEGIN.format(name=name) in text and END.format(name=name) in text


def fill(file: Path, name: str, text: str) -> None:
    """Put `text` between the marks of `name` in a Markdown file. Raises ValueError where the file has no such marks."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    before, found, rest = file.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{file} has no place for this table: it needs the lines {begin} and {end}")
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def as_json(benchmark: Benchmark, lines: list[Line], runs: list[Run], facts: dict) -> dict:
    """Everything that was measured, with the facts of machine, versions and workload."""
    summary = [asdict(line) for line in lines]
    return {**facts, "summary": summary, "goals": goals(benchmark, lines), "runs": [asdict(run) for run in runs]}
