"""What commands with flags of their own share: the options of those that load a finished model, and `~`.

Every option says by `metavar` what it takes, or Typer would show names of Python's types; switches take nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

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


model_option = partial(typer.Option, rich_help_panel="Model")  # which model is meant, and how it is read
Model = Annotated[str | None, model_option("--model", "-m", help=SOURCE, metavar="NAME|PATH")]
Revision = Annotated[str | None, model_option(help="Branch, tag or commit on the hub.", metavar="REVISION")]
TrustRemoteCode = Annotated[
    bool, model_option("--trust-remote-code", help="Run Python code that comes with the model.", metavar="")
]
