"""The token cache filled by another process while this one imports."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from test_launch import wait_gone
from test_parity import settings

from swiftlite.config.resolve import resolve_config
from swiftlite.data.background import prepared_in_background
from swiftlite.data.prepare import prepare_data
from swiftlite.errors import UserError
from swiftlite.models.tokenizer import tokenizer_loader


def must_not_be_called():
    raise AssertionError("the tokenizer was loaded although the cache is full")


@pytest.fixture
def config(tmp_path, tiny_model, write_rows, chat_rows):
    return resolve_config("sft", **settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows)))


def test_the_other_process_fills_the_cache(config):
    with prepared_in_background(config, tokenizer_loader(config)):
        deadline = time.monotonic() + 60
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert prepare_data(config, must_not_be_called).audit["rows"]["used"] == 32


class AbortsElsewhere:
    """Garbage, until the collector finds it, that only the process that made it can clean up: as a pool of threads."""

    def __init__(self):
        self.itself, self.maker = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.maker:
            os.abort()


def test_what_the_first_process_left_behind_is_not_collected_by_the_other(config):
    load = tokenizer_loader(config)

    def collect_and_load():
        gc.collect()
        return load()

    gc.disable()
    try:
        AbortsElsewhere()
        with prepared_in_background(config, collect_and_load):
            while multiprocessing.active_children():
                time.sleep(0.05)
    finally:
        gc.enable()
    assert prepare_data(config, must_not_be_called).audit["rows"]["used"] == 32


def test_nothing_is_collected_on_the_way_into_the_other_process(config):
    """Libraries do things there (filelock makes new tables): the collector may run at any of them."""
    made, entered = AbortsElsewhere(), []
    os.register_at_fork(after_in_child=lambda: entered and gc.isenabled() and gc.collect())
    gc.collect()  # it is old by now, and will not be looked at soon
    entered.append(True)
    del made
    started = time.monotonic()
    with prepared_in_background(config, tokenizer_loader(config)):
        while multiprocessing.active_children() and time.monotonic() < started + 60:
            time.sleep(0.05)
    entered.clear()
    assert gc.isenabled() and prepare_data(config, must_not_be_called).audit["rows"]["used"] == 32


FRESH = """
import json, multiprocessing, sys, time
from swiftlite.config.resolve import resolve_config
from swiftlite.data.background import prepared_in_background
from swiftlite.models.tokenizer import tokenizer_loader

config = resolve_config("sft", **json.loads(sys.argv[1]))
sys.modules["torch"] = None  # every import of it fails
with prepared_in_background(config, tokenizer_loader(config)):
    while multiprocessing.active_children():
        time.sleep(0.05)
from swiftlite.data.prepare import prepare_data
print(prepare_data(config, None).audit["rows"]["used"])
"""


def test_it_needs_no_torch(tmp_path, tiny_model, write_rows, chat_rows):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(values)], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("32\n", "")


def test_leaving_early_ends_the_other_process(config):
    with prepared_in_background(config, lambda: time.sleep(600)):
        pass
    assert not multiprocessing.active_children()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_the_other_process_does_not_outlive_a_killed_one(tmp_path, config):
    killed = os.fork()
    if not killed:
        with prepared_in_background(config, lambda: (tmp_path / "id").write_text(str(os.getpid())) and time.sleep(60)):
            while not (tmp_path / "id").is_file():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    wait_gone([int((tmp_path / "id").read_text())])


def test_bad_data_is_reported_by_this_process_only(config, capfd):
    bad = config.model_copy(update={"dataset": ["/nowhere/rows.jsonl"]})
    with prepared_in_background(bad, tokenizer_loader(bad)):
        time.sleep(0.5)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UserError, match="rows.jsonl"):
        prepare_data(bad, must_not_be_called)
