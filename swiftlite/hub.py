"""The Hugging Face hub where there is no network."""

from __future__ import annotations

import functools
import os
import socket
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
