"""Shows an error as one block: what is wrong, where, what to do next."""

from __future__ import annotations

import os
import sys
import traceback

from swiftlite.errors import DISK_FULL, RunError, SwiftliteError, is_out_of_memory, kind_and_words
from swiftlite.imports import failed_import
from swiftlite.untrusted import printable, without_secrets


def show_error(error: BaseException, *, debug: bool = False) -> int:
    """Print one block on stderr, the traceback too where `debug` asks for it. Returns the exit code."""
    shown = error if isinstance(error, SwiftliteError) else unforeseen(error)
    if debug:
        traceback.print_exception(error)
    rank, where = os.environ.get("RANK", "0"), shown.where
    if rank != "0":
        where = f"{where}, rank {rank}" if where else f"rank {rank}"
    for label, text in (("error", shown.what), ("where", where), ("fix", shown.fix)):
        if text:
            text = printable(without_secrets(text))  # it may quote what others wrote
            print(f"{label + ':':6} {text}", file=sys.stderr, flush=True)
    return shown.exit_code


def unforeseen(error: BaseException) -> RunError:
    """What was not turned into a message where it happened."""
    if is_out_of_memory(error):
        return RunError("out of memory", fix="use a smaller --model, --micro-batch-size or --max-length")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return RunError(
            "the disk is full",
            where=error.filename and str(error.filename),
            fix="free some space, or name another disk with --output-dir or --cache-dir; --resume auto goes on",
        )
    if package := failed_import(root := _root(error)):
        return RunError(
            f"the package {package} cannot be imported: {kind_and_words(root)}",
            fix="install it again, in a version that fits the other packages; --debug shows the traceback",
        )
    return RunError(
        kind_and_words(error),
        fix="run again with --debug for the traceback; if it is not your data or model, please report it",
    )


def _root(error: BaseException) -> BaseException:
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return error
