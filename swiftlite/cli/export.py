"""`swiftlite export`: the flags and what is told. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftlite.cli.model_options import Model, Revision, TrustRemoteCode, given_path, model_option
from swiftlite.quick_imports import quick_imports
from swiftlite.sizes import in_words

if TYPE_CHECKING:
    from swiftlite.serving.compress import Chosen
    from swiftlite.serving.export import Exported

DTYPE = "Number type of the result: auto (that of the base), bf16, fp16 or fp32."
QUANTIZATION = (
    "8 or 4 bits for the weights of linear layers: fp8 or int8 (engines round activations too), int4, or none."
)
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
    quantization: Annotated[str, typer.Option(help=QUANTIZATION, metavar="FORMAT")] = "none",
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
            quantization=quantization,
            max_shard_size=max_shard_size,
            prompts=prompt or [],
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    )
    _tell(done, type_name(done.dtype))


def _tell(done: Exported, kind: str) -> None:
    form = f"{done.chosen.name}, the rest {kind}" if done.chosen is not None else kind
    print(f"wrote {done.folder}: {in_words(done.size)}, {form}; every tensor was read back as it should be")
    if done.merge is not None:
        print(f"merged in fp32: logits differ from those of base and adapter by {done.merge:.1e}")
    if done.chosen is not None:
        _tell_chosen(done.chosen)
    if done.untrained is not None:
        print(f"note: {done.untrained}")
    print(
        f"the result in {done.chosen.name if done.chosen is not None else kind}: logits differ by {done.total:.1e}, "
        f"the likeliest token is the same at {done.agreement:.1%} of all positions of the prompts"
    )


def _tell_chosen(chosen: Chosen) -> None:
    """What is rounded, and what of it the numbers of the next line count."""
    from swiftlite.checkpoint.weights import shown_names

    scales = "each row" if chosen.group is None else f"every {chosen.group} numbers of a row"
    print(f"{len(chosen.entries)} matrices are {chosen.name}, with a scale for {scales}")
    if chosen.misfits:
        print(f"as they were, since the format does not fit their shapes: {shown_names(chosen.misfits)}")
    if chosen.form.rounds_inputs:
        left = ", but for experts" if chosen.has_experts else ""
        print(f"engines round what enters these layers to 8 bits too, which the next line counts{left}")
