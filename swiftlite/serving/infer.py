"""`swiftlite infer`: find the model, load it, then answer prompts, a file, or a person in the terminal."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.config.names import system_text
from swiftlite.data.rows.sources import COMPRESSED, as_data_file
from swiftlite.data.tokens.own_tools import parse_tool
from swiftlite.errors import DISK_FULL, RunError, UserError, memory_told
from swiftlite.quick_imports import quick_imports
from swiftlite.serving.chat import Conversation, chat, say
from swiftlite.serving.origin import system_of_training, tools_of_training
from swiftlite.serving.prompts import check_utf8, read_questions
from swiftlite.serving.source import ModelSource, find_source, refuse_reward_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.data.calls.toolbox import Toolbox
    from swiftlite.data.tokens.own_tools import Tool
    from swiftlite.data.tokens.questions import Question
    from swiftlite.serving.generate import Answerer
    from swiftlite.serving.turns import Exchange, Turns

TOOL_ROUNDS = 8  # as grpo's
SHOWN_SYSTEM = 60  # characters
ROWS_AT_A_TIME = 32  # batches that are answered, and then written in the order of the input


@dataclass(frozen=True)
class InferOptions:
    """The flags of `swiftlite infer`, see its --help."""

    model: str | None = None
    adapter: str | None = None
    prompts: list[str] = field(default_factory=list)
    system: str | None = None
    tools: list[str] = field(default_factory=list)
    tool_rounds: int | None = None
    input: Path | None = None
    output: Path | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    streaming: bool = True
    precision: str = "auto"
    chat_template: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    seed: int = 42


def run_infer(options: InferOptions) -> None:
    """Does what the flags say; answers go to stdout or to the output file, everything else to stderr.

    Raises UserError before the model is loaded wherever possible.
    """
    _check(options)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that knows fewer characters gets question marks
        sys.stdout.reconfigure(errors="replace")
    source = find_source(options.model, options.adapter)
    refuse_reward_model(source)
    system, note = system_to_ask_behind(options, source)
    options = replace(options, system=system)
    questions = None
    if options.input is not None:
        questions = read_questions(options.input, options.system)
    with quick_imports():
        import torch
        from transformers.utils import logging as hf_logging

        from swiftlite.serving.generate import Answerer, Sampling
        from swiftlite.serving.load import load_for_answers
        from swiftlite.serving.turns import Turns

    hf_logging.set_verbosity(logging.ERROR)
    tools = _tools(options, source)
    model, tokenizer = load_for_answers(source, precision=options.precision, **_known(options))
    torch.manual_seed(options.seed)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.top_k)
    toolbox = _toolbox(tools, model.generation_config, tokenizer)
    answerer = Answerer(model, tokenizer, sampling)
    turns = Turns(answerer, toolbox, options.tool_rounds or TOOL_ROUNDS)
    if not options.temperature and (options.top_p < 1 or options.top_k):
        say("note: --temperature 0 takes the likeliest token, whatever --top-p and --top-k say")
    if options.tool_rounds is not None and not tools:
        say("note: --tool-rounds has no effect without --tools")
    if note is not None:
        say(f"note: {note}")
    if not options.tools and answerer.has_template and (named := tools_of_training(source)):
        say(f"note: answers of its training could call tools: --tools {' '.join(named)} makes them callable here too")
    if not answerer.has_template:
        say("no chat template: each prompt is plain text that the model goes on with")
    fix = "lower --batch-size or --max-new-tokens, shorten the prompts, or take --precision bf16"
    using = contextlib.nullcontext() if toolbox is None else contextlib.closing(toolbox)
    with using, memory_told("the device ran out of memory while the model answered", fix):
        if questions is not None and options.output is not None:
            answer_file(answerer, questions, options.output, options.batch_size, turns)
        elif options.prompts:
            answer_prompts(answerer, options, turns)
        else:
            chat(answerer, options.system, streaming=options.streaming, turns=turns)


def _known(options: InferOptions) -> dict[str, Any]:
    """How the tokenizer is loaded, and the model."""
    return {
        "chat_template": options.chat_template,
        "revision": options.revision,
        "trust_remote_code": options.trust_remote_code,
    }


def _words_of_tools(options: InferOptions) -> list[str]:
    """Without `none`, which elsewhere sets back what a recipe has."""
    return [] if options.tools == ["none"] else options.tools


def _tools(options: InferOptions, source: ModelSource) -> Sequence[Tool]:
    """Those that answers may call. Raises UserError, before the model is loaded, where one cannot be had, or the chat
    template writes no calls."""
    if not (words := _words_of_tools(options)):
        return ()
    from swiftlite.data.tokens.own_tools import load_tools
    from swiftlite.models.load import load_config
    from swiftlite.serving.load import tokenizer_of
    from swiftlite.serving.turns import printing_aside

    with printing_aside():
        tools = load_tools(words)
    config = load_config(source.base, revision=options.revision, trust_remote_code=options.trust_remote_code)
    _toolbox(tools, config.get_text_config(), tokenizer_of(source, **_known(options)))
    return tools


def _toolbox(
    tools: Sequence[Tool], config: PretrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> Toolbox | None:
    """config: says what ends an answer."""
    if not tools:
        return None
    from swiftlite.data.calls.toolbox import Toolbox
    from swiftlite.data.tokens.stops import stop_tokens

    if tokenizer.chat_template is None:
        fix = "give --chat-template chatml or a .jinja file, or leave --tools out"
        raise UserError("tools are called in conversations, and there is no chat template", where="--tools", fix=fix)
    return Toolbox(tools, tokenizer, datetime.date.today().isoformat(), stop_tokens(config, tokenizer))


def system_to_ask_behind(options: InferOptions, source: ModelSource) -> tuple[str | None, str | None]:
    """(the system message, a note): that of the flag, else what the model's run put before conversations without one,
    since it learnt to answer behind it."""
    if options.system is not None:
        return system_text(options.system), None
    trained = None if options.chat_template == "none" else system_of_training(source)
    if trained is None:
        return None, None
    short = trained if len(trained) <= SHOWN_SYSTEM else trained[:SHOWN_SYSTEM] + "..."
    return trained, f"asked behind the system message of its training, {short!r}; --system gives another"


def _check(options: InferOptions) -> None:
    if (options.input is None) != (options.output is None):
        missing = "--output" if options.output is None else "--input"
        raise UserError(f"{missing} is missing", fix="give both --input FILE.jsonl and --output FILE.jsonl")
    if options.input is not None and options.prompts:
        raise UserError("--prompt and --input are both given", fix="keep one of them")
    if options.output is not None:
        _check_output(options.output)
    for word in _words_of_tools(options):
        parse_tool(word)
    for text, name in [*((prompt, "--prompt") for prompt in options.prompts), (options.system or "", "--system")]:
        check_utf8(text, name)
    for name, value, fits, wanted in (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "at least 1"),
        ("--batch-size", options.batch_size, options.batch_size >= 1, "at least 1"),
        ("--temperature", options.temperature, 0 <= options.temperature < float("inf"), "0 or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "more than 0, at most 1"),
        ("--top-k", options.top_k, options.top_k >= 0, "0 (off) or more"),
        ("--tool-rounds", options.tool_rounds, options.tool_rounds is None or options.tool_rounds >= 1, "at least 1"),
        ("--seed", options.seed, 0 <= options.seed < 1 << 63, "a number from 0 to 2^63 - 1"),
    ):
        if not fits:
            raise UserError(f"{name} is {value}, out of range", where=name, fix=f"give {wanted}")


def _check_output(output: Path) -> None:
    if str(output) == "-":  # which is stdout elsewhere, also to --json
        fix = "name a new file, such as answers.jsonl"
        raise UserError("answers are written to a file", where="--output -", fix=fix)
    kind = as_data_file(output)
    if output.suffix.lower() in COMPRESSED or (kind is not None and kind.kind not in ("jsonl", "json", "txt")):
        what = f"{output.suffix} files are not written, only JSON lines"  # whole lines of them can be kept on failure
        fix = "name a .jsonl file, which you may pack or convert afterwards"
        raise UserError(what, where=f"--output {output}", fix=fix)
    if output.exists():
        what = "the output is a folder" if output.is_dir() else "the output file exists"
        fix = "name a .jsonl file in it" if output.is_dir() else "move it, or name another file"
        raise UserError(what, where=f"--output {output}", fix=fix)
    if (partial := _aside(output)).exists():
        what = "answers of a run that did not end, or has not yet, are there"
        fix = "let it end; where it has, move or delete that file, or name another --output"
        raise UserError(what, where=str(partial), fix=fix)
    if not output.absolute().parent.is_dir():
        raise UserError(
            "the folder of the output file does not exist",
            where=f"--output {output}",
            fix=f"mkdir -p {output.absolute().parent}",
        )
    try:
        _aside(output).touch()
        _aside(output).unlink()
    except OSError as error:
        what = f"the output cannot be written: {error.strerror}"
        raise UserError(what, where=f"--output {output}", fix="name a file in another folder") from error


def _aside(output: Path) -> Path:
    """Where answers lie until all of them are there."""
    return output.with_name(f"{output.name}.partial")


def answer_prompts(answerer: Answerer, options: InferOptions, turns: Turns) -> None:
    """One conversation a prompt. A single answer is printed alone, several with their questions."""
    for number, prompt in enumerate(options.prompts):
        if len(options.prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}> {prompt}", flush=True)
        Conversation(answerer, options.system, turns).ask(prompt, streaming=options.streaming)


def answer_file(answerer: Answerer, questions: list[Question], output: Path, batch_size: int, turns: Turns) -> None:
    """Writes each row with its `response`, in order, and with the `turns` of an answer that called tools; the file
    appears only when it is whole. What a run that does not end has answered stays beside it.

    A row's own `response` is kept under `reference`. Raises UserError, before the first answer, for a row that the
    model cannot take.
    """
    for question in questions:
        if "response" in question.row and "reference" in question.row:
            raise UserError("the row has `response` and `reference`", where=question.where, fix="rename one of them")
        if turns.has_tools and "turns" in question.row:
            raise UserError(
                "the row has `turns`, as those of its answer are called", where=question.where, fix="rename it"
            )
    prompts = [
        answerer.encode(each.messages, each.where, turns.schemas(each.tools), plain=each.plain) for each in questions
    ]
    if some := sum(question.plain for question in questions) if answerer.has_template else 0:
        say(f"rows whose prompt and completion are texts: {some}; they are gone on with as they are, without template")
    cut: Counter[str] = Counter()
    with _written_aside(output, len(questions)) as write, _progress(len(questions)) as advance:
        for start in range(0, len(prompts), ROWS_AT_A_TIME * batch_size):
            part = slice(start, start + ROWS_AT_A_TIME * batch_size)
            chunk, ids = questions[part], prompts[part]
            done: dict[int, Exchange] = {}
            try:
                for batch in answerer.batches(ids, batch_size):
                    exchanges = [
                        turns.begin(ids[i], chunk[i].row, chunk[i].where, may_call=not chunk[i].plain) for i in batch
                    ]
                    turns.finish(exchanges, batch_size)
                    done |= dict(zip(batch, exchanges, strict=True))
                    advance(len(batch))
            finally:  # of a chunk that is broken off too
                write([_answered(answerer, chunk[i], done[i]) for i in sorted(done)])
            cut.update(exchange.cut for exchange in done.values() if exchange.cut is not None)
    say(f"wrote {output}, answers: {len(questions)}")
    for limit, count in cut.items():
        say(f"cut off by {limit}: {count}")


def _answered(answerer: Answerer, question: Question, exchange: Exchange) -> str:
    """The row with its response, as a line."""
    row = {"reference" if key == "response" else key: value for key, value in question.row.items()}
    as_it_is = question.plain or not answerer.has_template
    told = {"turns": exchange.messages} if exchange.rounds else {}
    return _json_line({**row, **told, "response": exchange.text if as_it_is else exchange.text.strip()})


def _json_line(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON alone can write
        text = json.dumps(row)
    return text + "\n"


@contextlib.contextmanager
def _written_aside(output: Path, wanted: int) -> Iterator[Callable[[list[str]], None]]:
    """Takes lines. The file gets its name only when all of it is on the disk; on failure it keeps the one aside, with
    whole lines."""
    partial, count, size = _aside(output), 0, 0

    def write(lines: list[str]) -> None:
        nonlocal count, size
        file.writelines(lines)
        file.flush()
        count, size = count + len(lines), file.tell()

    _check_output(output)  # again: another run may have begun while this one loaded its model
    file = partial.open("x", encoding="utf-8")  # nobody else's, which is not to be removed below
    try:
        with file:
            yield write
            os.fsync(file.fileno())
        partial.rename(output)
    except BaseException as error:
        _keep(partial, count, size, wanted)
        if not isinstance(error, OSError):
            raise
        full = error.errno in DISK_FULL
        fix = "free some space on the disk" if full else "name a file in another folder"
        raise RunError(f"the output cannot be written: {error.strerror}", where=str(output), fix=fix) from error


def _keep(partial: Path, count: int, size: int, wanted: int) -> None:
    """Of answers that were written aside, those of whole lines."""
    with contextlib.suppress(OSError):
        if not count:
            partial.unlink()
            return
        os.truncate(partial, size)
        say(f"{count} of {wanted} answers are in {partial}, in the order of the rows")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr in a terminal; a line now and then where there is none. Takes how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("answering", total=total)
            yield lambda count: bar.advance(task, count)
        return
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if done == total or done * 10 // total > before * 10 // total:
            console.print(f"answered {done} of {total}")

    yield advance
