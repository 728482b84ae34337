"""A short fault campaign: runs killed at random, and a run that really lost something is seen."""

import json
import subprocess
import sys
from pathlib import Path

from test_launch import ENV

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fault_campaign.py"


def campaign(work, runs, *more):
    command = [sys.executable, SCRIPT, "--runs", str(runs), "--work", work, "--only", "sft, full", "dpo, LoRA", *more]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=ENV)


def test_killed_runs_end_with_the_weights_of_an_undisturbed_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- fault_campaign: begin --><!-- fault_campaign: end -->")
    done = campaign(tmp_path / "work", 5, "--markdown", page)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "work" / "campaign.jsonl").read_text().splitlines()]
    assert len(outcomes) == 5 and sum(outcome["kills"] for outcome in outcomes) >= 4
    assert all(outcome["difference"] == 0 and outcome["problem"] is None for outcome in outcomes)
    assert "| **all** | 5 |" in page.read_text()
    # what another run ended with is not what this one should have
    undisturbed = next((tmp_path / "work").glob("undisturbed-dpo*/model/adapter_model.safetensors"))
    content = bytearray(undisturbed.read_bytes())
    content[-3] ^= 0x40
    undisturbed.write_bytes(content)
    again = campaign(tmp_path / "work", 6)
    assert again.returncode == 1 and "weights differ" in again.stdout
