"""A folder that all processes of a run write together: complete or not there at all, as `atomic_folder` for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from swiftlite.checkpoint.boxes import Holding, holdings
from swiftlite.checkpoint.folder import GO_ON, atomic_folder, disk_errors, partial_folder
from swiftlite.errors import RunError, SwiftliteError, UserError, kind_and_words
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.world import AnotherFailed

T = TypeVar("T")


class Together(Protocol):
    """Processes that can agree, such as those of a `Mesh`. rank: this one's number."""

    @property
    def rank(self) -> int: ...

    def any(self, here: bool) -> bool:
        """Whether something holds in at least one of them."""

    def collect(self, value: T) -> list[T]:
        """Every process's value, in the order of ranks."""


def write_together(
    mesh: Together, final: Path, create: Callable[[Path], None], write: Callable[[Path], None], *, manifest: bool = True
) -> None:
    """Make the folder `final`: rank 0 calls `create(folder)`, then everyone `write(folder)`, then rank 0 commits it.

    Raises on every process where one of them fails, and leaves nothing behind.
    """
    with ExitStack() as stack:
        folder = partial_folder(final)

        def begin() -> None:
            stack.enter_context(atomic_folder(final, manifest=manifest))
            create(folder)

        def do(work: Callable[[], None]) -> Callable[[], None]:
            return disk_errors(final, GO_ON)(work)  # here, so that the others are told of a full disk by that name

        leads = mesh.rank == 0
        in_turn(mesh, do(begin) if leads else nothing)
        in_turn(mesh, do(lambda: write(folder)))
        in_turn(mesh, do(stack.pop_all().close) if leads else nothing)


def nothing() -> None:
    """The part of those who only wait."""


def in_turn(mesh: Together, work: Callable[[], None]) -> None:
    """Do one's part, then wait for all. Where one of them failed, every process raises, the others for its reason, or
    AnotherFailed where that is none of our errors: whoever met it may make one of it, and tells."""
    problem: Exception | None = None
    try:
        work()
    except Exception as error:
        problem = error
    if mesh.any(problem is not None):
        reasons = [(rank, *reason) for rank, reason in enumerate(mesh.collect(_reason(problem))) if reason is not None]
        rank, kind, what, where, fix = reasons[0]
        raise problem or kind(what, where=where, fix=fix, rank=rank)


def _reason(problem: Exception | None) -> tuple[type[SwiftliteError], str, str | None, str | None] | None:
    if problem is None:
        return None
    if isinstance(problem, SwiftliteError):  # which of the user's errors it is decides the exit code
        kind = UserError if isinstance(problem, UserError) else RunError
        return kind, problem.what, problem.where, problem.fix
    return AnotherFailed, f"another process failed: {kind_and_words(problem)}", None, None


def to_write(mesh: Mesh, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[Holding]]:
    """What of some tensors this process has to write: of copies, the first process that holds one writes."""
    return {name: holdings(tensor) for name, tensor in tensors if mesh.is_first_copy(tensor)}
