"""The hub: one block and no waiting where there is no network; results that are uploaded."""

import os
import socket
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub import constants, is_offline_mode
from test_parity import settings, train_alone

from swiftlite.config.resolve import resolve_config
from swiftlite.errors import RunError, UserError
from swiftlite.hub import stay_offline_without_network
from swiftlite.training.publish import model_card

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


class Hub:
    """Stands in for the hub's client, and for what it has kept."""

    endpoint, made, kept, full = "https://hub", [], {}, False

    def whoami(self):
        return {"name": "me"}

    def create_repo(self, repo_id, *, private, exist_ok):
        if "bad" in repo_id:
            raise ValueError("403 Forbidden\nlong words")
        self.made.append((repo_id, private, exist_ok))
        return huggingface_hub.RepoUrl(f"{self.endpoint}/{repo_id}", endpoint=self.endpoint)

    def file_exists(self, repo_id, name):
        return name in self.kept.get(repo_id, {})

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, commit_message):
        self.kept.setdefault(repo_id, {})[path_in_repo] = path_or_fileobj.decode()

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.full:
            raise OSError("no route")
        self.kept.setdefault(repo_id, {}).update({path.name: commit_message for path in folder_path.iterdir()})


@pytest.fixture
def pushing(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    hub = type("OwnHub", (Hub,), {"made": [], "kept": {}})
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=1)
    return hub, values | {"push_to_hub": True}


def test_a_result_is_uploaded_with_a_card(pushing, tmp_path, capsys):
    hub, values = pushing
    train_alone(resolve_config("sft", **values | {"tuner": "lora"}, hub_model_id="robo", hub_private=True))
    assert hub.made == [("me/robo", True, True)] and "uploaded to https://hub/me/robo" in capsys.readouterr().out
    files = hub.kept["me/robo"]
    assert {path.name for path in (tmp_path / "out" / "model").iterdir()} < files.keys()
    assert files["adapter_config.json"] == "sft, lora, by swiftlite"
    assert "library_name: peft" in files["README.md"] and str(tmp_path) not in files["README.md"]


def test_a_repository_that_cannot_be_written_is_told_before_training(pushing, tmp_path):
    _, values = pushing
    with pytest.raises(UserError, match=r"us/bad cannot be written: 403 Forbidden\n") as caught:
        train_alone(resolve_config("sft", **values, hub_model_id="us/bad"))
    assert "hf auth login" in caught.value.fix and not (tmp_path / "out").exists()


def test_a_result_that_cannot_be_uploaded_is_still_there(pushing, tmp_path):
    hub, values = pushing
    hub.full = True
    with pytest.raises(RunError, match="is saved, but cannot be uploaded: no route") as caught:
        train_alone(resolve_config("sft", **values))
    model = tmp_path / "out" / "model"
    assert caught.value.fix == f"`hf upload me/out {model}` tries again" and (model / "config.json").exists()


def test_a_card_names_a_model_of_the_hub_and_no_file():
    config = resolve_config("dpo", model="org/base", dataset=["org/rows"], tuner="full")
    card = model_card("me/robo", config)
    assert "base_model: org/base\nlibrary_name: transformers\n" in card and "- dpo\n" in card
