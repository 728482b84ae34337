"""`swiftlite infer`: the flags. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL, ANSWER, FILES = "Model", "Answers", "Files"


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command(name="infer", help="Chat in the terminal, answer a prompt, or answer a jsonl file.")(infer)


def infer(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Model folder, adapter folder, run folder, checkpoint, hub id or short name.",
            rich_help_panel=MODEL,
            metavar="NAME|PATH",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="LoRA adapter to put on the model.", rich_help_panel=MODEL, metavar="PATH"),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Answer this and leave; may be given again.", rich_help_panel=ANSWER),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", rich_help_panel=ANSWER)] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="jsonl rows: messages, prompt, Alpaca, ...", rich_help_panel=FILES, metavar="FILE"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="jsonl: the rows with their `response`.", rich_help_panel=FILES, metavar="FILE"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of the file at once.", rich_help_panel=FILES)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", rich_help_panel=ANSWER)] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token, more is livelier.", rich_help_panel=ANSWER)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=ANSWER)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the K likeliest; 0: all.", rich_help_panel=ANSWER)] = 0,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print answers as they grow.", rich_help_panel=ANSWER)
    ] = True,
    seed: Annotated[int, typer.Option(help="Decides what is sampled.", rich_help_panel=ANSWER)] = 42,
    precision: Annotated[
        str,
        typer.Option(help="auto, bf16, fp16 or fp32; auto: as the files, fp32 on most CPUs.", rich_help_panel=MODEL),
    ] = "auto",
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="`chatml`, a Jinja file, or `none` for plain text. [default: the model's]",
            rich_help_panel=MODEL,
            metavar="NAME|FILE",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=MODEL)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=MODEL),
    ] = False,
) -> None:
    """Hands the flags over to `swiftlite.serving.infer`."""
    from swiftlite.serving.infer import InferOptions, run_infer

    run_infer(
        InferOptions(
            model=model,
            adapter=adapter,
            prompts=prompt or [],
            system=system,
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
