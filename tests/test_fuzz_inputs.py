"""A short fuzzing campaign: nothing is found in the readers as they are, and what is broken in one is found."""

import json
import subprocess
import sys
from pathlib import Path

from test_launch import ENV

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fuzz_inputs.py"
HARMS = {
    "raise ValueError('broken')": "ValueError",
    "raise UserError('x' * 10_000)": "a message of",
    "open('/etc/hostname').close()": "opens /etc/hostname",
    "(output / 'more').write_text('x')": "for writing",
    "(output / 'more').mkdir()": "os.mkdir",
    "subprocess.run(['true'])": "subprocess.Popen",
    "time.sleep(30)": "TooLong",
}
BREAK = """
import json, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import fuzz_inputs
from swiftlite.checkpoint import folder
from swiftlite.errors import UserError
work, sound = Path(sys.argv[2]), folder.newest_checkpoint
fuzz_inputs.prepare(work)
campaign = fuzz_inputs.Campaign(work, 0.5)
target = next(target for target in fuzz_inputs.TARGETS if target.name == "manifests")
for number, harm in enumerate(json.loads(sys.argv[3])):
    def broken(output, code=compile(harm, "harm", "exec")):
        exec(code)
        return sound(output)
    folder.newest_checkpoint = broken
    found = campaign.batch(target, number, 2)
    assert found[fuzz_inputs.FINDING] == found.total() == 2, (harm, found)
folder.newest_checkpoint = sound
for path in (work / "findings").iterdir():
    assert fuzz_inputs.repeat(campaign, path).outcome != fuzz_inputs.FINDING
"""


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, env=ENV)


def test_hostile_inputs_find_nothing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- fuzz: begin --><!-- fuzz: end -->")
    arguments = ["--inputs", 300, "--seed", 7, "--work", tmp_path / "work", "--markdown", page]
    done = run(SCRIPT, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| **all** | 300 |" in page.read_text() and not (tmp_path / "work" / "findings").exists()


def test_what_is_broken_in_a_reader_is_found(tmp_path):
    done = run("-c", BREAK, SCRIPT.parent, tmp_path, json.dumps(list(HARMS)))
    assert done.returncode == 0, done.stdout + done.stderr
    problems = {json.loads(path.read_text())["problem"] for path in (tmp_path / "findings").iterdir()}
    for said in HARMS.values():
        assert any(said in problem for problem in problems), (said, problems)
