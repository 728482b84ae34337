"""The audit: what was read, what became of every row, and what the packs hold. Nothing is lost without a number."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from swiftlite.data.rows.formats import count_columns
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.data.order import BatchPlan
    from swiftlite.data.prepare import Entry
    from swiftlite.data.rows.sources import Source

NUMBERS = ("pairs", "desirable", "undesirable", "tokens", "trained_tokens", "packs", "fill")
IN_BALANCE = (1.0, 4 / 3)
ROUNDING = 0.005  # of weights that are told in three digits
TOO_LONG = ("over_long", "no_trained_token")  # reasons to drop a row
LONGER = "raise --max-length, or lower --max-new-tokens of prompts"
NAMES_TOLD = 3  # of files or columns
# What may become of a row that is used, as `losses_in_words` says it; audit.json has these three in any case.
CUT = {"truncated": "truncated", "split": "split", "split_by_template": "split by the template"}
SAME = {"repeated": "the same as one before", "trained_on": "that are trained on as well"}
CHANGED = {
    "tools_left_out": "without their tools",
    "messages_left_out": "without some of their messages",
    "asked_otherwise": "asked otherwise than the model is",
    "asked_plainly": "asked without a chat template, which the tokenizer has not",
    "system_added": "with the message of --system",
    "system_left_out": "that take no message of --system",
    "placeholders_filled": "with placeholders filled",
    "placeholders_left": "with placeholders left",
}


def build_audit(
    train: list[Entry], plan: BatchPlan, held_out: list[Entry], eval_plan: BatchPlan | None
) -> dict[str, Any]:
    """audit.json: the training data in all, then per data set, then the evaluation data in the same form.

    `rows` counts rows of the files; tokens, packs and fill describe the first epoch, after weights and the held-out
    part; of methods that compare answers also `pairs`, or `desirable` and `undesirable` answers. A row of which nothing
    is kept is under `dropped` with its reason; one that is kept in part is under `truncated`, `split` (several
    sequences by length) or `split_by_template` (several because the chat template writes history differently);
    `tools_left_out`, `messages_left_out`: the template does not write the tools, or a question or result, of so many
    rows, or messages follow the last answer to learn; `asked_otherwise`: an answer of so many rows is learnt behind
    other tokens than the model is asked with; `asked_plainly`: so many questions are plain text to a tokenizer without
    a chat template; `system_added`: so many rows got the message of `--system`,
    `system_left_out`: so many are texts, which take none; `placeholders_filled`: so many held one,
    `placeholders_left`: so many still do; `unused_columns`: rows by column of which nothing is made, `messages.KEY` for
    a key of messages.
    `repeated`: rows that are the same as one before, by their tokens and what is learnt of them; under `--deduplicate`
    such rows, and those that are evaluated, are among `dropped`. `trained_on`: rows to evaluate that are trained on.
    `questions`: the evaluation rows as prompts that the model answers, where functions judge its answers; `no_prompt`
    of those that are held out cannot be asked, which may be because they are too long.
    `held_out` rows went to the evaluation set; `unread_files` are of another type than those that are read, links to
    folders or to nothing, or folders of runs and of models.
    """
    parts = plan.describe_parts()
    datasets = {
        entry.source.spec.text: {"rows": _rows([entry])} | _numbers(parts[entry.source.spec.text]) for entry in train
    }
    audit = {"rows": _rows(train)} | _numbers(plan.describe()) | {"datasets": datasets}
    audit |= unread_files([entry.source for entry in (*train, *held_out)])
    if eval_plan is None:
        return audit
    audit |= eval_section(held_out, eval_plan)
    if not held_out:  # a part of the training rows
        counts = eval_plan.row_counts
        for rows, count in [(audit["rows"], sum(counts.values()))] + [
            (datasets[name]["rows"], count) for name, count in counts.items()
        ]:
            rows["held_out"] = count
            rows["used"] -= count
        audit["eval"]["rows"] |= dict.fromkeys(("read", "used"), sum(counts.values()))
    return audit


def eval_section(held_out: list[Entry], plan: BatchPlan) -> dict[str, Any]:
    """What audit.json says of the evaluation rows."""
    return {"eval": {"rows": _rows(held_out)} | _numbers(plan.describe())}


def questions_section(entries: list[Entry], plan: BatchPlan, held_out: int | None) -> dict[str, Any]:
    """What audit.json says of evaluation rows as prompts. held_out: how many there are of them, where they are a part
    of the rows of `entries`."""
    rows, used = _rows(entries), sum(plan.row_counts.values())
    if held_out is not None:
        unasked = held_out - used
        rows = {"read": held_out, "used": used, "dropped": {"no_prompt": unasked} if unasked else {}}
    return {"questions": {"rows": rows} | _numbers(plan.describe())}


def unread_files(sources: list[Source]) -> dict[str, list[str]]:
    """The files of data folders that may hold rows and are not read, where there are any."""
    unread = dict.fromkeys(name for source in sources for name in source.unread)  # two may be splits of one folder
    return {"unread_files": list(unread)} if unread else {}


def unused_columns(counts: Iterable[Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Rows by column that hold something of which nothing is made, where there are any, the most frequent first."""
    total: Counter[str] = Counter()
    for count in counts:
        count_columns(total, count)
    return {"unused_columns": dict(total.most_common())} if total else {}


def _numbers(described: dict[str, Any]) -> dict[str, Any]:
    return {key: described[key] for key in NUMBERS if key in described}


def imbalance_warning(audit: dict[str, Any], desirable_weight: float, undesirable_weight: float) -> str | None:
    """What to say where wanted and refused answers weigh unequally; None where they do not, or have no labels.

    KTO wants (weight x number of the wanted) : (weight x number of the refused) between 1 and 4/3
    (arXiv 2402.01306, Eq. 8).
    """
    wanted, refused = audit.get("desirable"), audit.get("undesirable")
    if wanted is None:
        return None
    said = f"{wanted:,} answers are desirable, {refused:,} undesirable"
    if not wanted or not refused:
        return f"{said}: KTO cannot learn a difference from one kind alone"
    low, high = IN_BALANCE
    ratio = desirable_weight * wanted / (undesirable_weight * refused)
    if low * (1 - ROUNDING) <= ratio <= high * (1 + ROUNDING):
        return None
    if wanted < refused:
        name, weights = "desirable", [undesirable_weight * refused * bound / wanted for bound in (low, high)]
    else:
        name, weights = "undesirable", [desirable_weight * wanted / (refused * bound) for bound in (high, low)]
    return f"{said}: for balance give {name} ones a weight from {weights[0]:.3g} to {weights[1]:.3g}"


def _rows(entries: list[Entry]) -> dict[str, Any]:
    def count(name: str) -> int:
        return sum(entry.meta["counts"].get(name, 0) for entry in entries)

    repeated = sum(entry.repeated for entry in entries)
    left_out = sum(entry.repeated for entry in entries if entry.rows is not None)
    return {
        "read": count("read"),
        "used": count("used") - left_out,
        "dropped": dropped_rows(entries) | ({"repeated": left_out} if left_out else {}),
        **{name: count(name) for name in CUT},
        **{name: number for name in CHANGED if (number := count(name))},
        **({"repeated": repeated} if repeated > left_out else {}),
        **unused_columns([entry.meta["unused"] for entry in entries]),
    }


def losses_in_words(audit: dict[str, Any]) -> str | None:
    """What of the rows is not trained as it was written, for whoever starts a run; None where everything is."""
    told = []
    for name, key in (("", None), ("evaluation ", "eval"), ("prompt ", "questions")):
        rows = audit["rows"] if key is None else audit.get(key, {"rows": {}})["rows"]
        dropped = counts_in_words(rows.get("dropped", {}))
        parts = [f"{sum(rows['dropped'].values()):,} dropped ({dropped})"] if dropped else []
        parts += [f"{rows[key]:,} {words}" for key, words in (CUT | CHANGED | SAME).items() if rows.get(key)]
        told += [f"of {rows['read']:,} {name}rows: {', '.join(parts)}"] if parts else []
        if unused := list(rows.get("unused_columns", ())):
            told.append(f"{name}columns not used: {_some(unused)}")
    if unread := audit.get("unread_files"):
        files = "1 file may hold rows and is" if len(unread) == 1 else f"{len(unread):,} files may hold rows and are"
        told.append(f"{files} not read ({_some(unread)})")
    return "; ".join(told) or None


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Reasons, each with how many rows it is of."""
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_TOLD]) + (" and others" if len(names) > NAMES_TOLD else "")


def dropped_rows(entries: list[Entry]) -> dict[str, int]:
    """Reason -> rows, the most frequent first."""
    total: Counter[str] = Counter()
    for entry in entries:
        total.update(entry.meta["dropped"])
    return dict(total.most_common())


def check_anything_left(entries: list[Entry]) -> None:
    """Raises UserError for a data set without a row, or of which no row was kept, with the counts."""
    for entry in entries:
        if entry.meta["counts"].get("used", 0):
            continue
        read, where = entry.meta["counts"].get("read", 0), entry.source.spec.given
        if not read:
            raise UserError("the data set holds no row", where=where, fix="check that it is the right file")
        dropped = dropped_rows([entry])
        first = next(entry.rejected_lines(), None)
        detail = f"; of the first: {json.loads(first)['detail']}" if first else ""  # over-long rows are in no list
        raise UserError(
            f"no row is left: {read:,} read, all dropped ({counts_in_words(dropped)}){detail}",
            where=where,
            fix=LONGER if dropped.keys() <= {*TOO_LONG} else f"mend the rows; for {' and '.join(TOO_LONG)} {LONGER}",
        )
