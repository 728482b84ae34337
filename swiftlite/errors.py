"""The two errors a user ever sees, each saying what is wrong, where, and what to do next."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SwiftliteError(Exception):
    """Base of the errors that the command line shows as one block without a traceback.

    what: one sentence; where: file and line, row, key; fix: what to do next; rank: of the process that has met it,
    where another one raises it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, rank: int | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.fix, self.rank = what, where, fix, rank

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n".join(parts)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def kind_and_words(error: BaseException) -> str:
    """`RuntimeError: what it says`, in one line; its kind alone where it says nothing."""
    kind, words = type(error).__name__, first_line(error)
    return kind if words == kind else f"{kind}: {words}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Also where PyTorch's pipelines have wrapped it. The CPU's allocator has no error class of its own, and that of
    GPUs is known by its name here: nothing is imported for an error."""
    if error is None:
        return False
    names = [kind.__name__ for kind in type(error).__mro__]
    if "MemoryError" in names or "OutOfMemoryError" in names or "can't allocate memory" in str(error):
        return True
    return is_out_of_memory(error.__cause__)


class UserError(SwiftliteError):
    """Something the user can mend: flag, recipe, data, model folder, layout. Exit code 2."""

    exit_code = 2


def all_in_one(errors: Sequence[UserError], words: str) -> UserError:
    """One error that lists several, a line each. words: what they are, as `values are wrong`."""
    if len(errors) == 1:
        return errors[0]
    lines = [f"{error.what}{f' ({error.where})' if error.where else ''}: {error.fix}" for error in errors]
    return UserError(f"{len(errors)} {words}:\n  " + "\n  ".join(lines), fix="mend all of them")


class RunError(SwiftliteError):
    """The run failed while it was running. Exit code 1."""


@contextmanager
def memory_told(what: str, fix: str) -> Iterator[None]:
    """Turn what is raised where memory is full into a RunError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(what, fix=fix) from error
