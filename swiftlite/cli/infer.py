"""`swiftlite infer`: the flags. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.model_options import Model, Revision, TrustRemoteCode, given_path, model_option

PRECISION = "auto, bf16, fp16 or fp32; auto: as the files, fp32 on most CPUs."
TEMPLATE = "A built-in name, a Jinja file, or `none` for plain text. \\[default: the model's]"
TOOLS = "Functions that the model may call, FILE.py:NAME or PACKAGE.MODULE.NAME; of a class its methods."
TOOL_ROUNDS = "How often an answer may call them. \\[default: 8]"
TEMPERATURE = "0 takes the likeliest token, more is livelier."
ROWS = "jsonl rows, also compressed: messages, prompt, Alpaca, ..."

answer_option = partial(typer.Option, rich_help_panel="Answers")
file_option = partial(typer.Option, rich_help_panel="Files")
path_option = partial(file_option, metavar="FILE", callback=given_path)


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command(name="infer", help="Chat in the terminal, answer a prompt, or answer a jsonl file.")(infer)


def infer(
    model: Model = None,
    adapter: Annotated[str | None, model_option(help="LoRA adapter to put on the model.", metavar="PATH")] = None,
    prompt: Annotated[
        list[str] | None,
        answer_option("--prompt", "-p", help="Answer this and leave; may be given again.", metavar="TEXT"),
    ] = None,
    system: Annotated[
        str | None, answer_option(help="System message: the text, or a .txt file.", metavar="TEXT|FILE")
    ] = None,
    input: Annotated[Path | None, path_option(help=ROWS)] = None,
    output: Annotated[Path | None, path_option(help="jsonl: the rows with their `response`.")] = None,
    batch_size: Annotated[int, file_option(help="Rows of the file at once.", metavar="N")] = 8,
    max_new_tokens: Annotated[int, answer_option(help="Longest answer in tokens.", metavar="N")] = 256,
    temperature: Annotated[float, answer_option(help=TEMPERATURE, metavar="FLOAT")] = 0.0,
    top_p: Annotated[
        float, answer_option(help="Sample from the likeliest tokens of this probability in all.", metavar="FLOAT")
    ] = 1.0,
    top_k: Annotated[int, answer_option(help="Sample from the K likeliest tokens; 0: from all.", metavar="K")] = 0,
    tools: Annotated[list[str] | None, answer_option(help=TOOLS, metavar="NAME ...")] = None,
    tool_rounds: Annotated[int | None, answer_option(help=TOOL_ROUNDS, metavar="N")] = None,
    stream: Annotated[
        bool, answer_option("--stream/--no-stream", help="Print answers as they grow.", metavar="")
    ] = True,
    seed: Annotated[int, answer_option(help="Decides what is sampled.", metavar="N")] = 42,
    precision: Annotated[str, model_option(help=PRECISION, metavar="TYPE")] = "auto",
    chat_template: Annotated[str | None, model_option(help=TEMPLATE, metavar="NAME|FILE")] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Hands the flags over to `swiftlite.serving.infer`."""
    from swiftlite.config.types import split_list
    from swiftlite.serving.infer import InferOptions, run_infer

    run_infer(
        InferOptions(
            model=model,
            adapter=adapter,
            prompts=prompt or [],
            system=system,
            tools=[name for word in tools or () for name in split_list(word)],
            tool_rounds=tool_rounds,
            input=input,
            output=output,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            batch_size=batch_size,
            streaming=stream,
            precision=precision,
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
            seed=seed,
        )
    )
