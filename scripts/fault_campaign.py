"""Kills runs with SIGKILL at random moments, during saves above all, resumes them, and compares what they end with.

    python scripts/fault_campaign.py --runs 200 --work campaign --markdown docs/reliability.md

Each run trains a toy model with a checkpoint after every step. It is killed as often as chance wants (once at least),
goes on each time by the same command with `--resume auto`, and must end with the weights of a run that nobody
disturbed. What was done is kept in WORK/campaign.jsonl: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.campaign import machine
from bench.tables import fill, has_place, markdown_table

STEPS = 8
LONGEST = 180.0  # seconds that a run may take
IMPORTED = (  # by runs
    *("swiftlite.training.run", "peft", "transformers.models.llama.modeling_llama", "transformers.generation.utils"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin"),
)
PLACE = "fault_campaign"


@dataclass(frozen=True)
class Subject:
    """What is run: `method` with `flags`, `share` of all runs."""

    name: str
    method: str
    flags: tuple[str, ...]
    share: int


SUBJECTS = (
    Subject("sft, full", "sft", ("--tuner", "full"), 4),
    Subject("sft, full, saved beside the training", "sft", ("--tuner", "full", "--async-save", "on"), 2),
    Subject("sft, full, bf16 model", "sft", ("--tuner", "full", "--save-dtype", "bf16"), 4),
    Subject("sft, LoRA", "sft", ("--tuner", "lora"), 4),
    Subject("dpo, LoRA", "dpo", ("--tuner", "lora"), 2),
    Subject("dpo, full", "dpo", ("--tuner", "full"), 2),
    Subject("sft, full, fsdp 2", "sft", ("--tuner", "full", "--nproc-per-node", "2", "--parallel", "fsdp"), 2),
    Subject("sft, full, tp 2", "sft", ("--tuner", "full", "--tp", "2"), 1),
    Subject("sft, full, pp 2", "sft", ("--tuner", "full", "--pp", "2"), 1),
)


@dataclass(frozen=True)
class Outcome:
    """One run. kills: how often it was killed, saving: of these while a checkpoint was being written; problem: why it
    counts as lost, None where it survived; difference: largest relative difference of a tensor (0: bit for bit).
    """

    number: int
    subject: str
    kills: int
    saving: int
    problem: str | None
    difference: float


def words(subject: Subject, work: Path, output: Path) -> list[str]:
    """The command line of a run."""
    rows = work / ("pairs.jsonl" if subject.method == "dpo" else "rows.jsonl")
    return [
        subject.method, "--model", str(work / "model"), "--dataset", str(rows), "--output-dir", str(output),
        "--max-steps", str(STEPS), "--save-steps", "1", "--max-length", "128", "--global-batch-size", "4",
        "--micro-batch-size", "1", "--precision", "fp32", "--learning-rate", "1e-3", "--cache-dir", str(work / "cache"),
        "--resume", "auto", *subject.flags,
    ]  # fmt: skip


def prepare(work: Path) -> None:
    """The model and the rows, and everything imported that a run imports: each start is then a fork."""
    from swiftlite.models.toys import toy_config, toy_pairs, toy_rows, write_toy
    from swiftlite.quick_imports import quick_imports

    with quick_imports():
        for name in IMPORTED:
            importlib.import_module(name)
    gc.freeze()  # or each fork's collections go through all of it, and copy its memory
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "pairs.jsonl").is_file():
        write_toy(work / "model", toy_config("llama"))
        for name, rows in (("rows", toy_rows(48)), ("pairs", toy_pairs(48))):
            (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(line: list[str], log: Path) -> int:
    """Begin a run in a process group of its own. Returns its process id."""
    child = os.fork()
    if child:
        with suppress(OSError):  # it has done so itself
            os.setpgid(child, child)
        return child
    os.setpgid(0, 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from swiftlite.cli.app import main

    try:
        main(line)
    except SystemExit as stop:
        sys.stdout.flush()
        os._exit(stop.code if isinstance(stop.code, int) else 1)
    os._exit(0)


def wait(child: int, until: float, is_due=lambda: False) -> int | None:  # noqa: ANN001
    """The exit code, or None where the time is over, or `is_due()` before it ended."""
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if is_due():
            return None
        time.sleep(0.0005)
    return None


def kill(child: int) -> None:
    """All processes of the run, at once."""
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while any(_group(process) == child for process in Path("/proc").iterdir() if process.name.isdigit()):
        time.sleep(0.005)  # the launcher's children may take a moment


def _group(process: Path) -> int | None:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])


def attempt(subject: Subject, number: int, seed: int, work: Path, seconds: float) -> Outcome:
    """Run once, killed by chance. seconds: what the undisturbed run took."""
    from swiftlite.verification.compare import weights_difference  # loads torch, which reads its threads once

    chance = random.Random(f"{seed}/{number}")
    output, log = work / f"run-{number}", work / f"run-{number}.log"
    shutil.rmtree(output, ignore_errors=True)
    line = words(subject, work, output)
    kills = saving = 0
    for _ in range(chance.choice((1, 1, 2, 3))):
        child = start(line, log)
        if chance.random() < 2 / 3:
            after, pause = chance.randint(1, STEPS), chance.uniform(0, 0.02)
            code = wait(child, time.monotonic() + LONGEST, lambda nth=after: is_saving(output, nth))
            time.sleep(pause)
        else:
            code = wait(child, time.monotonic() + chance.uniform(0, 1.2 * seconds))
        if code is None:
            during = bool(list(output.glob("checkpoints/.step-*.partial")))
            kill(child)
            kills, saving = kills + 1, saving + during
    code = wait(start(line, log), time.monotonic() + LONGEST)
    problem = None if code == 0 else f"exit code {code}"
    reference = reference_folder(work, subject)
    difference = float("inf") if problem else weights_difference(output / "model", reference / "model")
    if problem is None and difference > 1e-5:
        problem = f"weights differ by {difference:.1e}"
    if problem is None:
        shutil.rmtree(output)
        log.unlink()
    return Outcome(number, subject.name, kills, saving, problem, difference)


def is_saving(output: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a later one is being written."""
    parts = [path.name for path in output.glob("checkpoints/.step-*.partial")]
    return any(int(name.split("-")[1].split(".")[0]) >= step for name in parts)


def reference_folder(work: Path, subject: Subject) -> Path:
    return work / f"undisturbed-{subject.name}".replace(" ", "_").replace(",", "")


def undisturbed(work: Path, subject: Subject) -> float:
    """Make the run that nobody disturbs, unless it is there. Returns the seconds of one."""
    folder = reference_folder(work, subject)
    note = folder.with_suffix(".seconds")
    if not note.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        log = folder.with_suffix(".log")
        if wait(start(words(subject, work, folder), log), began + LONGEST) != 0:
            raise SystemExit(f"{subject.name}: the undisturbed run failed, see {log}")
        note.write_text(str(time.monotonic() - began))
    return float(note.read_text())


def summary(outcomes: list[Outcome], seed: int) -> str:
    """Markdown."""
    rows = []
    for subject in [*dict.fromkeys(subject.name for subject in SUBJECTS), None]:
        of = [outcome for outcome in outcomes if subject in (None, outcome.subject)]
        lost = [outcome for outcome in of if outcome.problem]
        worst = max((outcome.difference for outcome in of if not outcome.problem), default=0.0)
        rows.append([
            subject or "**all**", str(len(of)), str(sum(o.kills for o in of)), str(sum(o.saving for o in of)),
            str(len(of) - len(lost)), str(len(lost)), "bit for bit" if worst == 0 else f"{worst:.0e}",
        ])  # fmt: skip
    header = ("what", "runs", "killed", "of these while saving", "survived", "lost", "weights differ by")
    facts = machine()
    about = f"{len(outcomes)} runs, seed {seed}; {facts['cpu']}, {facts['cores']} cores, Python {facts['python']}."
    lost = [f"- run {o.number}, {o.subject}: {o.problem}" for o in outcomes if o.problem]
    return "\n\n".join(filter(None, [about, markdown_table(header, rows), "\n".join(lost)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("campaign"), help="folder of the campaign (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[subject.name for subject in SUBJECTS], help="only these")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    options = parser.parse_args()
    if options.markdown and not has_place(options.markdown, PLACE):
        parser.error(f"{options.markdown} has no place for the table")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    work = options.work.absolute()
    prepare(work)
    notes = work / "campaign.jsonl"
    outcomes = [Outcome(**json.loads(line)) for line in notes.read_text().splitlines()] if notes.is_file() else []
    done = {outcome.number for outcome in outcomes}
    chosen = [subject for subject in SUBJECTS if options.only is None or subject.name in options.only]
    turns = [subject for subject in chosen for _ in range(subject.share)]
    for number in range(options.runs):
        subject = turns[number % len(turns)]
        if number in done:
            continue
        outcome = attempt(subject, number, options.seed, work, undisturbed(work, subject))
        outcomes.append(outcome)
        with notes.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        print(f"{number + 1}/{options.runs} {outcome}", flush=True)
    print(summary(outcomes, options.seed))
    if options.markdown:
        fill(options.markdown, PLACE, summary(outcomes, options.seed))
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
