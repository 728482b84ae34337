"""The hub where there is no network: one block and no waiting."""

import os
import socket
import subprocess
import sys

import pytest
from huggingface_hub import constants, is_offline_mode

from swiftlite.hub import stay_offline_without_network

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture
def network(monkeypatch):
    """A network of which the answers to the question for a host can be set; what was asked is in `asked`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", *PROXIES):
        monkeypatch.delenv(name, raising=False)

    class Network:
        there, asked = True, []

        def address(self, host, _):
            self.asked.append(host)
            if not self.there:
                raise socket.gaierror("Name or service not known")

    network = Network()
    monkeypatch.setattr(socket, "getaddrinfo", network.address)
    stay_offline_without_network.cache_clear()
    yield network
    stay_offline_without_network.cache_clear()


def test_with_a_network_the_hub_is_asked(network):
    stay_offline_without_network()
    assert not is_offline_mode() and len(network.asked) == 1


def test_without_a_network_only_what_was_kept_is_used(network):
    network.there = False
    stay_offline_without_network()
    assert is_offline_mode()


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "0"), ("https_proxy", "http://proxy:3128")])
def test_the_users_word_and_proxies_decide_themselves(network, monkeypatch, name, value):
    network.there = False
    monkeypatch.setenv(name, value)
    stay_offline_without_network()
    assert not is_offline_mode() and not network.asked


def test_a_model_that_is_nowhere_is_one_block(tmp_path):
    left_out = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *PROXIES}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_ENDPOINT": "http://nowhere.invalid", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "swiftlite", "infer", "--model", "runs/nothing", "--prompt", "Hello"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where:", "fix:"], done.stderr
