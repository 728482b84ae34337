"""The Hugging Face hub where there is no network, or where nothing is to be asked of it."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies


@functools.cache
def stay_offline_without_network() -> None:
    """Let the hub's client use what it has kept, if the hub's host has no address.

    Otherwise it asks again for half a minute, file by file, and says so line by line, also where it has kept them all.
    Whoever sets `HF_HUB_OFFLINE` has decided. With a proxy, names are the proxy's to look up.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if "HF_HUB_OFFLINE" in os.environ or getproxies() or not host:
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def kept_file(source: str, name: str, revision: str | None) -> Path | None:
    """A file of a folder, or of a hub id whose files have been downloaded; None where it is not there."""
    return _found(source, name, revision, local_files_only=True)


def fetched_file(source: str, name: str, revision: str | None) -> Path | None:
    """The same; of a hub id it is downloaded where it has not been."""
    return _found(source, name, revision, _raise_exceptions_for_connection_errors=False)


def _found(source: str, name: str, revision: str | None, **options: bool) -> Path | None:
    from transformers.utils import cached_file

    path = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False, **options)
    return None if path is None else Path(path)
