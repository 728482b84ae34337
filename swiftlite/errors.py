"""The two errors a user ever sees, each saying what is wrong, where, and what to do next."""


class SwiftliteError(Exception):
    """Base of the errors that the command line shows as one block without a traceback.

    what: one sentence; where: file and line, row, key or rank; fix: what to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n".join(parts)


class UserError(SwiftliteError):
    """Something the user can mend: flag, recipe, data, model folder, layout. Exit code 2."""

    exit_code = 2


class RunError(SwiftliteError):
    """The run failed while it was running. Exit code 1."""
