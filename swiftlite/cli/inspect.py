"""`swiftlite inspect`: what the data becomes. Rows with their trained tokens, the audit, lengths, and the packs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swiftlite.cli.options import RunCommand, own_flag
from swiftlite.config.methods import pack_capacity
from swiftlite.config.setting import DATA, MODEL
from swiftlite.errors import UserError
from swiftlite.untrusted import printable

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from swiftlite.config.flags import Flag
    from swiftlite.config.resolve import Resolved
    from swiftlite.data.order import Sequence
    from swiftlite.data.prepare import PreparedData

TRAINED, CONTEXT = ("bold green", "bold bright_green"), ("dim", "")  # two shades each, so that tokens can be told apart
OPEN, CLOSE = "⟦", "⟧"
SHOWN_TOKENS = 600  # of a row
OBEYED = (0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # those without a picture
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}  # a terminal would obey them
VISIBLE |= {code: printable(chr(code)) for code in OBEYED}
REFUSED = ("bold red", "bold bright_red")
BINS = 10
BAR, LONGEST_BAR, BESIDE_BAR = "█", 40, 23  # characters; of the range in front of a bar, and the blanks around it
USED_PANELS = (MODEL, DATA)
USED = {  # of the other panels
    "new_tokens", "adapter", "share_prompt", "desirable_weight", "undesirable_weight", "max_new_tokens", "epochs",
    "max_steps", "global_batch_size", "seed", "method", "tools", "debug", "dry_run",
}  # fmt: skip
RULE = 80  # characters of a line across, where no terminal has a width


def inspect(resolved: Resolved, rows: int) -> None:
    """Show `rows` rows of each data set, and the numbers of all. Raises UserError where the data are bad."""
    from swiftlite.cli.console import print_notes, wide_console
    from swiftlite.data.audit import imbalance_warning
    from swiftlite.data.prepare import prepare_data
    from swiftlite.models.tokenizer import tokenizer_loader

    if rows < 0:
        raise UserError("--rows is below 0", where="--rows", fix="give the number of rows to show")
    console = wide_console()
    print_notes(console, resolved.notes)
    load = tokenizer_loader(resolved.config)
    with console.status("reading the data"):
        prepared = prepare_data(resolved.config, load)
    if rows:
        show_rows(console, load(), prepared.train.head(rows))
    console.print(audit_table(prepared.audit))
    weights = resolved.config.desirable_weight, resolved.config.undesirable_weight
    if warning := imbalance_warning(prepared.audit, *weights):
        console.print(f"warning: {warning}", markup=False)
    if resolved.config.streaming:
        console.print("a stream: the numbers are those of its first window")
        return
    bar = "#" if console.options.ascii_only else BAR
    console.print(histogram("tokens of a row", prepared.train.lengths(), bar, console.width))
    console.print(packs_line(prepared, pack_capacity(resolved.config)))


def uses(flag: Flag) -> bool:
    """Whether a setting changes what is shown."""
    return flag.panel in USED_PANELS or flag.name in USED


INSPECT = RunCommand(
    "inspect",
    inspect,
    "Show what the data becomes: trained tokens in colour, the audit, lengths, packing.",
    own=(own_flag("rows", "int", 3, "Rows to show of each data set."),),
    fallback="sft",
    needs_reward=False,
    joins=False,
    uses=uses,
)


def show_rows(console: Console, tokenizer: PreTrainedTokenizerBase, rows: list[Sequence]) -> None:
    """Print rows token by token, with a legend. Of a pair the prompt is shown once, then both answers."""
    from rich.rule import Rule
    from rich.text import Text

    compared = any(sequence.preference for sequence in rows)
    in_colour = console.color_system is not None and not console.no_color
    if in_colour:
        wanted = ("chosen or desirable", TRAINED[0]) if compared else ("trained", TRAINED[0])
        refused = ("  ", ("rejected or undesirable", REFUSED[0])) if compared else ()
        legend = Text.assemble(wanted, *refused, "  ", ("context only", CONTEXT[0]), "  shades alternate by token")
    else:
        legend = Text(f"{OPEN}trained{CLOSE}, the rest is context only")
    console.print(legend)
    width = console.width if console.is_terminal else RULE
    for sequence in rows:
        trained = int(sequence.trained.sum())
        heading = f"{sequence.where}: {len(sequence.input_ids):,} tokens, {trained:,} trained"
        console.print(Rule(Text(heading), align="left"), width=width)
        for title, part, shades in parts_of(sequence):
            if title:
                console.print(f"{title}:")
            text = coloured(tokenizer, part, shades) if in_colour else bracketed(tokenizer, part)
            console.print(text, soft_wrap=True)  # character by character
    console.print(Rule(characters="-" if console.options.ascii_only else "─"), width=width)


def parts_of(sequence: Sequence) -> list[tuple[str, Sequence, tuple[str, str]]]:
    """(title, tokens, colours of what is trained) of each part of a sequence that is shown by itself."""
    layout = sequence.preference
    if layout is None:
        return [("", sequence, TRAINED)]
    if not layout.is_pair:
        return [("desirable", sequence, TRAINED) if layout.desirable else ("undesirable", sequence, REFUSED)]
    first, second = layout.prompt, layout.prompt + layout.chosen
    answers = [("chosen", _part(sequence, first, second), TRAINED), ("rejected", _part(sequence, second), REFUSED)]
    if not first:  # each answer has the whole prompt in front
        return answers
    prompt = ("prompt", _part(sequence, 0, first + 1), TRAINED)  # its last token opens both answers
    return [prompt, *((title, _part(answer, 1), shades) for title, answer, shades in answers)]


def _part(sequence: Sequence, start: int, stop: int | None = None) -> Sequence:
    return replace(sequence, input_ids=sequence.input_ids[start:stop], trained=sequence.trained[start:stop])


def coloured(tokenizer: PreTrainedTokenizerBase, sequence: Sequence, shades: tuple[str, str] = TRAINED) -> Text:
    """The row in colour, one shade a token. shades: of what is trained."""
    from rich.text import Text

    text = Text()
    for place, (piece, trained) in enumerate(pieces(tokenizer, sequence)):
        text.append(piece.replace("\n", "↵\n"), style=(shades if trained else CONTEXT)[place % 2])
    return text


def bracketed(tokenizer: PreTrainedTokenizerBase, sequence: Sequence) -> Text:
    """The row with brackets around what is trained."""
    from rich.text import Text

    parts, inside = [], False
    for piece, trained in pieces(tokenizer, sequence):
        if trained != inside:
            parts.append(OPEN if trained else CLOSE)
        parts.append(piece)
        inside = trained
    return Text("".join(parts) + (CLOSE if inside else ""))


def pieces(tokenizer: PreTrainedTokenizerBase, sequence: Sequence) -> Iterator[tuple[str, bool]]:
    """(text, is it trained) of each token; tokens that are parts of one character come together."""
    before: list[int] = []
    waiting: list[int] = []
    shown = list(zip(sequence.input_ids.tolist(), sequence.trained.tolist(), strict=True))[:SHOWN_TOKENS]
    for place, (token, trained) in enumerate(shown):
        waiting.append(token)
        text = _text_behind(tokenizer, before, waiting)
        more_follows = place + 1 < len(shown) and shown[place + 1][1] == trained and len(waiting) < 8
        if text.endswith("\ufffd") and more_follows:
            continue
        yield text.translate(VISIBLE), trained
        before, waiting = waiting, []
    if len(sequence.input_ids) > len(shown):
        yield f" … {len(sequence.input_ids) - len(shown):,} more tokens", False


def _text_behind(tokenizer: PreTrainedTokenizerBase, before: list[int], tokens: list[int]) -> str:
    """What tokens say behind others: SentencePiece's leave out the blank that a text begins with."""

    def decoded(ids: list[int]) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    said, text = decoded(before), decoded(before + tokens)
    return text[len(said) :] if text.startswith(said) else decoded(tokens)  # a character may begin in those before


def audit_table(audit: dict[str, Any]) -> Table:
    """One column a data set, one in all, and one for the evaluation rows."""
    from rich.table import Table
    from rich.text import Text

    datasets = audit.get("datasets", {})
    headings, sections = ["all", *_headings(datasets)], [audit, *datasets.values()]
    if len(datasets) == 1:
        headings, sections = ["training"], [audit]
    if "eval" in audit:
        headings, sections = [*headings, "evaluation"], [*sections, audit["eval"]]
    table = Table("", title="audit", title_justify="left")
    for heading in headings:
        table.add_column(Text(printable(heading)), justify="right", overflow="fold")
    plain = dict.fromkeys(
        key for section in sections for key, n in section["rows"].items() if isinstance(n, int) and (n or key == "used")
    )
    for key in plain:
        table.add_row(f"rows {key.replace('_', ' ')}", *(f"{section['rows'].get(key, 0):,}" for section in sections))
    if unread := audit.get("unread_files"):
        table.add_row("files not read", f"{len(unread):,}")
    for key, words in (("dropped", "rows dropped"), ("unused_columns", "rows with an unused column")):
        found = [section["rows"].get(key, {}) for section in sections]
        for name in dict.fromkeys(name for counts in found for name in counts):
            table.add_row(Text(printable(f"{words}: {name}")), *(f"{counts.get(name, 0):,}" for counts in found))
    for key in ("pairs", "desirable", "undesirable", "tokens", "trained_tokens", "packs"):
        if key in audit:
            table.add_row(key.replace("_", " "), *(f"{section[key]:,}" for section in sections))
    table.add_row("packs filled", *(f"{section['fill']:.1%}" for section in sections))
    return table


def _headings(names: Collection[str]) -> list[str]:
    """The last parts of the names of data sets, or all of them where these are not enough."""
    short = [name.rstrip("/").rsplit("/", 1)[-1] for name in names]
    return short if len({*short}) == len(short) else [*names]


def histogram(title: str, values: np.ndarray, bar: str = BAR, width: int = RULE) -> str:
    """Bars of how many values fall into each of ten equal ranges. bar: the letter that they are made of; width: of a
    line."""
    import numpy as np

    low, high = int(values.min()), int(values.max()) + 1
    counts, edges = np.histogram(values, bins=min(BINS, high - low), range=(low, high))
    lines = [f"{title}: {low:,} to {high - 1:,}, half of them up to {int(np.median(values)):,}"]
    longest = max(1, min(LONGEST_BAR, width - BESIDE_BAR - len(f"{counts.max():,}")))
    for count, start, end in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        length = max(round(longest * count / counts.max()), int(count > 0))
        lines.append(f"{int(np.ceil(start)):>8,} to {int(np.ceil(end)) - 1:>7,}  {bar * length} {count:,}")
    return "\n".join(lines)


def packs_line(prepared: PreparedData, max_length: int) -> str:
    """How full the packs are, and what that makes of the steps."""
    data, plan = prepared.train.describe(), prepared.train
    return (
        f"packs: {data['packs']:,} of up to {max_length:,} tokens, {data['fill']:.1%} full; rows: {data['rows']:,}; "
        f"steps: {plan.steps_per_epoch:,} an epoch, {plan.total_steps:,} in all"
    )
