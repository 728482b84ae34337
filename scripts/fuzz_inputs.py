"""Feeds damaged and hostile files to everything that reads a file the user names.

    python scripts/fuzz_inputs.py --inputs 100000 --work fuzz --markdown docs/reliability.md

Rows, recipes, safetensors headers, indexes, manifests, trainer states and model configs: valid ones, in which parts are
replaced, removed or doubled, or bytes changed blindly. Each goes through the product's own function. It may be accepted
or refused with a clear error. A finding is anything else: another exception, a process that dies, more than `--seconds`
an input, a file opened outside the folder or for writing, a process or connection started. Findings are kept in
WORK/findings, to be repeated with `--repeat FILE`. What was done is kept in WORK/fuzz-SEED.jsonl: the same command goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import base64
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from bench.campaign import machine
from bench.tables import fill, has_place, markdown_table
from fuzz import rows
from fuzz.guard import ACCEPTED, FINDING, REFUSED, Guard, Verdict
from fuzz.targets import TARGETS, Example, Target, lay_out, variants
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir

PLACE = "fuzz"
BATCH = 2000  # inputs between two notes
VARIANTS = 3  # of each example
KEPT = 5  # findings of one cause that are stored


class Campaign:
    """Makes examples, has them judged, and keeps what was found."""

    def __init__(self, work: Path, seconds: float) -> None:
        self._work, self._guard = work, Guard(seconds)
        self._stored: Counter[str] = Counter()

    def judge(self, target: Target, example: Example) -> Verdict:
        """One example in a fresh folder."""
        folder, scratch = self._work / "example", self._work / "scratch"
        for place in (folder, scratch):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
        lay_out(example, folder)
        (self._work / "now.json").write_text(json.dumps(_as_note(target, example)))  # for whoever asks why it died
        return self._guard.judge(lambda: target.read(folder, scratch, example.facts), folder, scratch)

    def batch(self, target: Target, number: int, count: int) -> Counter[str]:
        """Outcome -> inputs. number: of the batch, which decides its examples."""
        found: Counter[str] = Counter()

        @seed(number)
        @settings(
            max_examples=-(-count // (1 + VARIANTS)), database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(target.make)
        def judge(example: Example) -> None:
            for each in (example, *variants(example, VARIANTS)):
                if found.total() == count:
                    return
                verdict = self.judge(target, each)
                found[verdict.outcome] += 1
                if verdict.outcome == FINDING:
                    self._keep(target, each, verdict)

        judge()
        return found

    def batch_apart(self, target: Target, number: int, count: int) -> Counter[str]:
        """`batch` in a process of its own: one that dies is a finding too, and the end of its batch."""
        notes = self._work / "batch.json"
        notes.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            try:
                notes.write_text(json.dumps(self.batch(target, number, count)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return Counter(json.loads(notes.read_text()))
        note = json.loads((self._work / "now.json").read_text())
        self._store(f"the process died with code {code}", note)
        return Counter({FINDING: 1})

    def _keep(self, target: Target, example: Example, verdict: Verdict) -> None:
        cause = f"{target.name}: {verdict.problem}"[:120]
        self._stored[cause] += 1
        if self._stored[cause] > KEPT:
            return
        self._store(verdict.problem, _as_note(target, example))

    def _store(self, problem: str | None, note: dict[str, Any]) -> None:
        text = json.dumps({"problem": problem, **note}, indent=2)
        path = self._work / "findings" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"FINDING {note['target']}: {problem}\n  repeat: --repeat {path}", flush=True)


def _as_note(target: Target, example: Example) -> dict[str, Any]:
    files = {name: base64.b64encode(content).decode() for name, content in example.files.items()}
    return {"target": target.name, "facts": example.facts, "files": files}


def repeat(campaign: Campaign, path: Path) -> Verdict:
    """Judge a stored finding again."""
    note = json.loads(path.read_text())
    files = {name: base64.b64decode(text) for name, text in note["files"].items()}
    target = next(target for target in TARGETS if target.name == note["target"])
    return campaign.judge(target, Example(files, note["facts"]))


def run(campaign: Campaign, inputs: int, first_seed: int, notes: Path) -> dict[str, Counter[str]]:
    """Target -> outcomes and seconds, of this run and of what was noted before."""
    found: dict[str, Counter[str]] = {target.name: Counter() for target in TARGETS}
    for line in notes.read_text().splitlines() if notes.is_file() else ():
        note = json.loads(line)
        found[note.pop("target")].update(note)
    shares = sum(target.share for target in TARGETS)
    for place, target in enumerate(TARGETS):
        wanted, total = -(-inputs * target.share // shares), found[target.name]
        while (missing := wanted - _inputs(total)) > 0:
            began = time.monotonic()
            number = (first_seed * 100 + place) * 10**6 + total["batches"]
            batch = dict(campaign.batch_apart(target, number, min(BATCH, missing)))
            note = {**batch, "batches": 1, "seconds": time.monotonic() - began}
            total.update(note)
            with notes.open("a") as file:
                file.write(json.dumps({"target": target.name, **note}) + "\n")
        print(f"{target.name}: {dict(total)}", flush=True)
    return found


def _inputs(total: Counter[str]) -> int:
    return total[ACCEPTED] + total[REFUSED] + total[FINDING]


def summary(found: dict[str, Counter[str]], options: argparse.Namespace) -> str:
    """Markdown."""
    lines = {**found, "**all**": sum(found.values(), Counter())}
    rows = [
        [name, *(f"{number:,}" for number in (_inputs(t), t[ACCEPTED], t[REFUSED], t[FINDING])), f"{t['seconds']:,.0f}"]
        for name, t in lines.items()
    ]
    header = ("what", "inputs", "accepted", "refused with a clear error", "findings", "seconds")
    facts = machine()
    about = (
        f"`python scripts/fuzz_inputs.py --inputs {options.inputs} --seed {options.seed}`; at most "
        f"{options.seconds:g} s an input; {facts['cpu']}, one of {facts['cores']} cores, Python {facts['python']}."
    )
    return f"{about}\n\n{markdown_table(header, rows)}"


def prepare(work: Path) -> None:
    """Import what a run has imported before it reads anything, and keep the libraries quiet."""
    from swiftlite.training import run  # noqa: F401 - else the first example would wait for it

    work.mkdir(parents=True, exist_ok=True)
    set_hypothesis_home_dir(work / "hypothesis")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows.prepare()
    gc.freeze()  # the processes of the batches share what is loaded, and need not look through it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="that one input may take (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("fuzz"), help="folder of the campaign (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    parser.add_argument("--repeat", type=Path, help="judge one stored finding again")
    options = parser.parse_args()
    if options.markdown and not has_place(options.markdown, PLACE):
        parser.error(f"{options.markdown} has no place for the table")
    os.environ["HF_HUB_OFFLINE"] = "1"
    work = options.work.absolute()
    prepare(work)
    campaign = Campaign(work, options.seconds)
    if options.repeat:
        verdict = repeat(campaign, options.repeat)
        print(verdict)
        return 1 if verdict.outcome == FINDING else 0
    found = run(campaign, options.inputs, options.seed, work / f"fuzz-{options.seed}.jsonl")
    print(summary(found, options))
    if options.markdown:
        fill(options.markdown, PLACE, summary(found, options))
    return 1 if any(total[FINDING] for total in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
