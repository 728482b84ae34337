"""`swiftlite export`: the flags and what is told. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftlite.cli.model_options import Model, Revision, TrustRemoteCode, given_path, model_option
from swiftlite.quick_imports import quick_imports
from swiftlite.sizes import in_words

if TYPE_CHECKING:
    from swiftlite.serving.export import Exported

DTYPE = "Number type of the result: auto (that of the base), bf16, fp16 or fp32."
FOLDER = "A folder that is not there yet."
TEMPLATE = "Chat template to save: a built-in name, or a Jinja file. \\[default: the model's]"
PROMPT = "Check the result with this; may be given again. \\[default: four of our own]"


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command(name="export", help="Merge an adapter, re-shard, change the number type, check the result.")(export)


def export(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help=FOLDER, callback=given_path, metavar="PATH")],
    model: Model = None,
    adapter: Annotated[str | None, model_option(help="LoRA adapter to merge into the model.", metavar="PATH")] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE, metavar="TYPE")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file, such as 5GB.", metavar="SIZE")] = "5GB",
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help=PROMPT, metavar="TEXT")] = None,
    chat_template: Annotated[str | None, model_option(help=TEMPLATE, metavar="NAME|FILE")] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Hands the flags over to `swiftlite.serving.export`."""
    with quick_imports():
        from swiftlite.serving.export import ExportOptions, run_export, type_name

    done = run_export(
        ExportOptions(
            model=model,
            adapter=adapter,
            output=output_dir,
            dtype=dtype,
            max_shard_size=max_shard_size,
            prompts=prompt or [],
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    )
    _tell(done, type_name(done.dtype))


def _tell(done: Exported, kind: str) -> None:
    print(f"wrote {done.folder}: {in_words(done.size)}, {kind}; every tensor was read back as it should be")
    if done.merge is not None:
        print(f"merged in fp32: logits differ from those of base and adapter by {done.merge:.1e}")
    print(
        f"the result in {kind}: logits differ by {done.total:.1e}, the likeliest token is the same at "
        f"{done.agreement:.1%} of all positions of the prompts"
    )
