"""What commands with flags of their own share: the options of those that load a finished model, and `~`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SOURCE = "Model folder, adapter folder, run folder, checkpoint, hub id or short name."


def at_home(path: Path, where: str) -> Path:
    """With `~` as a folder, which a shell leaves alone behind `--output=` and in quotes. where: who gave it.

    Raises UserError for what can be no name of a file.
    """
    from swiftlite.config.names import check_name

    check_name(str(path), where)
    return path.expanduser()


def given_path(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same as a callback of options and arguments."""
    return path and at_home(path, max(param.opts, key=len))


def model_option(*names: str, **details: Any) -> Any:
    """An option in the panel that says which model is meant, and how it is read."""
    return typer.Option(*names, rich_help_panel="Model", **details)


Model = Annotated[str | None, model_option("--model", "-m", help=SOURCE, metavar="NAME|PATH")]
Revision = Annotated[str | None, model_option(help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[
    bool, model_option("--trust-remote-code", help="Run Python code that comes with the model.")
]
