"""`swiftlite infer`: the flags. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftlite.cli.model_options import Model, Revision, TrustRemoteCode, given_path, model_option

PRECISION = "auto, bf16, fp16 or fp32; auto: as the files, fp32 on most CPUs."
TEMPLATE = "`chatml`, `instruction`, a Jinja file, or `none` for plain text. \\[default: the model's]"
ROWS = "jsonl rows, also compressed: messages, prompt, Alpaca, ..."


def _answer(*names: str, **details: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Answers", **details)


def _file(*names: str, **details: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Files", **details)


def _path(**details: Any) -> Any:
    return _file(metavar="FILE", callback=given_path, **details)


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command(name="infer", help="Chat in the terminal, answer a prompt, or answer a jsonl file.")(infer)


def infer(
    model: Model = None,
    adapter: Annotated[str | None, model_option(help="LoRA adapter to put on the model.", metavar="PATH")] = None,
    prompt: Annotated[
        list[str] | None, _answer("--prompt", "-p", help="Answer this and leave; may be given again.")
    ] = None,
    system: Annotated[str | None, _answer(help="System message: the text, or a .txt file.")] = None,
    input: Annotated[Path | None, _path(help=ROWS)] = None,
    output: Annotated[Path | None, _path(help="jsonl: the rows with their `response`.")] = None,
    batch_size: Annotated[int, _file(help="Rows of the file at once.")] = 8,
    max_new_tokens: Annotated[int, _answer(help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, _answer(help="0 takes the likeliest token, more is livelier.")] = 0.0,
    top_p: Annotated[float, _answer(help="Sample from the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, _answer(help="Sample from the K likeliest; 0: all.")] = 0,
    stream: Annotated[bool, _answer("--stream/--no-stream", help="Print answers as they grow.")] = True,
    seed: Annotated[int, _answer(help="Decides what is sampled.")] = 42,
    precision: Annotated[str, model_option(help=PRECISION)] = "auto",
    chat_template: Annotated[str | None, model_option(help=TEMPLATE, metavar="NAME|FILE")] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
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
