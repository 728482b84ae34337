"""Shows an error as one block: what is wrong, where, what to do next."""

from __future__ import annotations

import os
import sys
import traceback

from swiftlite.config.layout import follows
from swiftlite.errors import DISK_FULL, RunError, SwiftliteError, UserError, is_out_of_memory, kind_and_words
from swiftlite.imports import failed_import
from swiftlite.untrusted import printable, without_secrets

NO_ROOM = ("failed to map segment", "annot allocate memory")  # words of the system's loader
NO_TEMPORARY = "No usable temporary directory"  # words of Python's tempfile


def show_error(error: BaseException, *, debug: bool = False) -> int:
    """Print one block on stderr, the traceback too where `debug` asks for it. Returns the exit code."""
    shown = error if isinstance(error, SwiftliteError) else unforeseen(error)
    if debug:
        traceback.print_exception(error)
    rank = shown.rank
    if rank is None and follows(os.environ):
        rank = int(os.environ["RANK"])
    where = ", ".join(filter(None, (shown.where, None if rank is None else f"rank {rank}")))
    for label, text in (("error", shown.what), ("where", where), ("fix", shown.fix)):
        if text:
            text = printable(without_secrets(text))  # it may quote what others wrote
            print(f"{label + ':':6} {text}", file=sys.stderr, flush=True)
    return shown.exit_code


def unforeseen(error: BaseException) -> SwiftliteError:
    """What was not turned into a message where it happened."""
    if is_out_of_memory(error):
        return RunError("out of memory", fix="use a smaller --model, --micro-batch-size or --max-length")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return RunError(
            "the disk is full",
            where=error.filename and str(error.filename),
            fix="free some space, or write to another one: it is that of stdout, of a folder that the command names or "
            "of the cache; a training run goes on by --resume auto",
        )
    if isinstance(error, PermissionError) and error.filename:
        return UserError(
            f"the file or folder cannot be used: {error.strerror}",
            where=os.fsdecode(error.filename),
            fix="give whoever runs swiftlite the right to it, or name another one",
        )
    root = _root(error)
    if isinstance(root, FileNotFoundError) and NO_TEMPORARY in str(root):  # often in an import, which is not to blame
        return UserError(
            "there is no folder in which temporary files can be written",
            where="TMPDIR, /tmp, /var/tmp, /usr/tmp, the working folder",
            fix="free some space in one of them, or set TMPDIR to a folder that can be written",
        )
    package = failed_import(root)
    if package:
        return _not_imported(package, root)
    return RunError(
        kind_and_words(error),
        fix="run again with --debug for the traceback; if it is not your data or model, please report it",
    )


def _not_imported(package: str, root: BaseException) -> SwiftliteError:
    words = kind_and_words(root)
    if sys.flags.optimize > 1:
        return UserError(
            f"the package {package} does not work without docstrings: {words}",
            where="PYTHONOPTIMIZE=2, or -OO",
            fix="unset it, or use 1: that leaves docstrings in",
        )
    if "Invalid log settings" in words and "TORCH_LOGS" in os.environ:
        fix = "unset it, or name what `TORCH_LOGS=help python -c 'import torch'` lists"
        return UserError(f"the package {package} does not take its setting: {words}", where="TORCH_LOGS", fix=fix)
    fix = "install it again, in a version that fits the other packages; --debug shows the traceback"
    if isinstance(root, MemoryError) or any(mark in words for mark in NO_ROOM):
        fix = "give it more memory to load into: `ulimit -v unlimited`, or a larger limit of the container or the job"
    return RunError(f"the package {package} cannot be imported: {words}", fix=fix)


def _root(error: BaseException) -> BaseException:
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return error
