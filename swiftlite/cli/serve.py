"""`swiftlite serve`: the flags. Nothing heavy is imported, here or by the command: the engine does that."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from swiftlite.cli.model_options import Model, Revision, TrustRemoteCode, model_option
from swiftlite.errors import UserError

HOST = "Address to listen at; 0.0.0.0: all of the machine."
ENGINE = "auto, vllm, sglang, lmdeploy or transformers; auto: the first that is installed."
LONGEST = "Longest conversation in tokens. \\[default: the model's]"
PRECISION = "auto, bf16, fp16 or fp32; auto: the engine's choice."
SERVED = "What clients call it. \\[default: the name of the run or folder, or the hub id; also --served-model-name]"
SHARED = "GPUs that share each layer; also --tp."
OTHER_NAMES = {"served-model-name": "served-name", "tp": "tensor-parallel-size"}  # beside them help has no room

server_option = partial(typer.Option, rich_help_panel="Server")


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    told = "Serve a model by an installed engine, with the API of OpenAI."
    known = {"token_normalize_func": lambda name: OTHER_NAMES.get(name, name)}
    app.command(name="serve", help=told, context_settings=known)(serve)


def serve(
    words: Annotated[
        list[str] | None, typer.Argument(help="Behind `--`: the engine's own flags, as they are.", metavar="-- FLAGS")
    ] = None,
    model: Model = None,
    adapter: Annotated[str | None, model_option(help="LoRA adapter to serve on the model.", metavar="PATH")] = None,
    engine: Annotated[str, server_option("--engine", "-e", help=ENGINE, metavar="NAME")] = "auto",
    host: Annotated[str, server_option(help=HOST, metavar="HOST")] = "127.0.0.1",
    port: Annotated[int, server_option(help="Port to listen at.", min=1, max=65535, metavar="PORT")] = 8000,
    served_name: Annotated[str | None, server_option(help=SERVED, metavar="NAME")] = None,
    tensor_parallel_size: Annotated[int, server_option(help=SHARED, min=1, metavar="N")] = 1,
    max_length: Annotated[int | None, server_option(help=LONGEST, min=1, metavar="N")] = None,
    dry_run: Annotated[
        bool, server_option("--dry-run", help="Print the engine's command line, start nothing.", metavar="")
    ] = False,
    precision: Annotated[str, model_option(help=PRECISION, metavar="TYPE")] = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Hands the flags over to `swiftlite.serving.serve`. Raises UserError for a word that stands before `--`."""
    from swiftlite.serving.serve import ServeOptions, run_serve

    if words and not words[0].startswith("-"):
        raise UserError(
            f"unexpected word {words[0]!r}",
            where="swiftlite serve",
            fix="name the model by --model, and write the engine's own flags behind `--`",
        )
    run_serve(
        ServeOptions(
            model=model,
            adapter=adapter,
            engine=engine,
            host=host,
            port=port,
            served_name=served_name,
            tensor_parallel_size=tensor_parallel_size,
            max_length=max_length,
            precision=precision,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dry_run=dry_run,
            words=words or [],
        )
    )
