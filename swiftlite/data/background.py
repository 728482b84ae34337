"""Fill the token cache in another process while this one imports PyTorch and the model's code.

Tokenising and importing each take seconds, on different cores at the same time. The other process only fills the
cache; this one then calls `prepare_data` as always, which waits for it at the cache's lock and finds the result, or
meets the same error itself.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from swiftlite.ending import STOPPING, end_with_parent
from swiftlite.quick_imports import import_numpy

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.prepare import LoadTokenizer


NICENESS = 5  # where there are fewer cores than processes, the imports come first: the user waits for them


@contextmanager
def prepared_in_background(config: RunConfig, load_tokenizer: LoadTokenizer, *, when: bool = True) -> Iterator[None]:
    """Start before anything heavy is imported, so that the fork is cheap and no thread is running yet.

    The process ends with the block, whatever became of it. when: False leaves it to another process of this machine.
    Without fork (Windows, macOS) nothing is started.
    """
    if sys.platform != "linux" or config.streaming or not when:
        yield
        return
    given = config, load_tokenizer, os.getpid()
    process = multiprocessing.get_context("fork").Process(target=_fill_cache, args=given)
    # Held back until the new process has reached its own code: the handlers it inherits raise exceptions, which before
    # that would run up through a copy of everything its parent was doing.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    with _nothing_collected():
        process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield
    finally:
        if process.is_alive():
            with suppress(ProcessLookupError):  # it may end, or not yet have its own group, at this very moment
                os.killpg(process.pid, signal.SIGTERM)
            process.terminate()
        process.join()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage of the process that forks holds threads that are not in the other one: collecting it there may abort."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fill_cache(config: RunConfig, load_tokenizer: LoadTokenizer, parent: int) -> None:
    end_with_parent(parent)
    gc.freeze()  # what the other process has left is not collected here
    gc.enable()
    os.nice(NICENESS)
    os.setpgrp()  # its worker processes belong to it, so that one signal ends them all
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # whatever is wrong is said once, by the process that the user talks to
        os.dup2(quiet, stream)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    import_numpy()
    sys.modules.setdefault("torch", None)  # tokenising needs none of it, and transformers would import it: a second
    with suppress(Exception):
        from swiftlite.data.prepare import prepare_data

        prepare_data(config, load_tokenizer)
