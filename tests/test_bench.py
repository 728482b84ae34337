"""The measuring scripts: the token rule of the probe, rates, step counts, tables, the marked place in the document."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_check  # noqa: E402
from bench import campaign, pairs, tables, workload  # noqa: E402
from bench.measure import PROBE, Run, evaluate, read_files, run_command  # noqa: E402
from bench.preference_tools import DPO  # noqa: E402
from bench.rollout_tools import GRPO  # noqa: E402
from bench.tools import SFT  # noqa: E402

TRAINING = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is not None  # some tools ask first: that must not use the probe up
import torch
table, positions = torch.nn.Embedding(64, 4), torch.nn.Embedding(8, 4)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
for _ in range(2):
    table.train()
    (table(ids) + positions(torch.arange(4))).sum().backward()
    table(ids[:1])
    with torch.no_grad():
        table(ids)
    table.eval()
    table(ids)
    optimizer.step()
"""


def probe(tmp_path, code):
    environment = os.environ | {
        "PYTHONPATH": str(PROBE), "BENCH_LOG": str(tmp_path / "log"), "BENCH_PAD_ID": "0", "BENCH_VOCABULARY": "64",
        "BENCH_MARK_ID": "6",
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def test_probe_counts_real_ids_that_enter_the_token_embedding_in_training_mode(tmp_path):
    rows = probe(tmp_path, TRAINING)
    assert [row["kind"] for row in rows] == ["step", "step", "end"]
    for row in rows[:2]:  # both passes in training; no evaluation, reference or position embedding
        assert (row["real"], row["padding"], row["marked"]) == (7, 5, 2)
        assert row["rss"] > 50 * 2**20
    assert rows[0]["began"] <= rows[0]["time"] <= rows[1]["began"] <= rows[1]["time"]


def test_rate_leaves_out_skipped_steps_and_the_time_before_them():
    rows = [
        {
            "kind": "step",
            "time": 100.0 + t,
            "began": 99.0 + t,
            "real": real,
            "padding": 100,
            "marked": 6,
            "rss": (1 + i) << 20,
            "threads": 2,
        }
        for i, (t, real) in enumerate([(0, 5000), (2, 300), (4, 500)])
    ]
    rows.append({"kind": "end", "time": 110.0, "real": 0, "padding": 0, "marked": 0, "rss": 9 << 20, "threads": 2})
    run = Run("tool", "setting", 1, "log")
    evaluate(run, rows, start=90.0, skip=1)
    assert run.tokens_per_second == pytest.approx((300 + 500) / 4)
    assert run.pairs_per_second == pytest.approx((3 + 3) / 4) and run.steps_per_second == pytest.approx(2 / 4)
    assert run.padding == pytest.approx(200 / 1000)
    assert run.first_step_seconds == pytest.approx(10.0) and run.start_seconds == pytest.approx(9.0)
    assert run.peak_rss_mib == pytest.approx(9.0)
    assert run.tokens_of_steps == [5000, 300, 500]


def test_every_file_of_an_environment_is_read(tmp_path):
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "large.so").write_bytes(bytes(5 << 20))
    (tmp_path / "package" / "deep" / "small.py").write_bytes(b"import this")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert read_files(tmp_path) == (5 << 20) + len(b"import this")


def test_command_output_is_kept_and_a_slow_one_is_stopped(tmp_path):
    code, _, seconds, _ = run_command([sys.executable, "-c", "print('hello')"], tmp_path / "a", 1, timeout=60)
    assert code == 0 and "hello" in (tmp_path / "a" / "log.txt").read_text() and seconds < 60
    code, _, _, _ = run_command([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "b", 1, timeout=1)
    assert code is None


EVERY = [
    (benchmark, kept, setting)
    for benchmark, kept in ((SFT, workload.Workload), (DPO, pairs.PairWorkload))
    for setting in benchmark.settings
]


@pytest.mark.parametrize(("benchmark", "kept", "setting"), EVERY, ids=lambda s: getattr(s, "name", ""))
def test_every_command_asks_for_the_same_training(benchmark, kept, setting, tmp_path):
    line = benchmark.command(setting, Path("/env/bin/python"), kept(tmp_path), tmp_path / "out", 7)
    assert line[0].startswith("/env/bin/")
    flags = dict(zip(line, line[1:], strict=False))
    wanted = {"max steps": "7", "micro batch": "4"}
    found = {
        "max steps": flags.get("--max_steps") or flags.get("--max-steps") or flags.get("--train.max_steps"),
        "micro batch": flags.get("--per_device_train_batch_size") or flags.get("--micro-batch-size")
        or flags.get("--train.micro_batch_size"),
    }  # fmt: skip
    assert found == wanted
    rate = {"bench_cpu": ("1e-4", "0.0001"), "bench_preference": ("1e-5",)}[benchmark.name]
    assert any(value in part for part in line for value in rate)
    assert {setting.tool for setting in benchmark.settings} == set(benchmark.tools)


@pytest.mark.parametrize("setting", GRPO.settings, ids=lambda setting: f"{setting.tool} {setting.name}")
def test_every_command_asks_for_as_many_answers(setting, tmp_path):
    line = GRPO.command(setting, Path("/env/bin/python"), pairs.PairWorkload(tmp_path), tmp_path / "out", 7)
    flags = dict(zip(line, line[1:], strict=False))  # what comes last counts, as it does for the tools
    if setting.tool == "swiftlite":
        answers, longest = int(flags["--global-batch-size"]) * int(flags["--samples"]), flags["--max-new-tokens"]
    else:
        answers = int(flags["--per_device_train_batch_size"]) * int(flags["--gradient_accumulation_steps"])
        longest = flags["--max_completion_length"]
    assert answers == 64 and longest == "64" and "8" in (flags.get("--samples"), flags.get("--num_generations"))
    assert flags.get("--reward", flags.get("--reward_funcs")) == "bench_reward.vowels" and "1e-6" in line


def test_packed_settings_take_fewer_steps():
    options = campaign.parse(SFT, None, ["--steps", "25", "--skip", "2"])
    packed = next(setting for setting in SFT.settings if setting.packed)
    single = next(setting for setting in SFT.settings if not setting.packed)
    assert campaign.steps_of(SFT, single, options, 160.0) == 27
    assert campaign.steps_of(SFT, packed, options, 160.0) == 6


def finished(tool, setting, rate, **more):
    values = {"start_seconds": 8.0, "first_step_seconds": 10.0}
    values |= {"peak_rss_mib": 1000.0, "padding": 0.4, "others_cores": 0.0, "steps": 27}
    return Run(tool, setting, 1, "log", tokens_per_second=rate, **(values | more))


def test_tables_show_medians_ratios_goals_and_every_failure():
    runs = [
        finished("swiftlite", "defaults", 2000.0, first_step_seconds=6.0, peak_rss_mib=1001.0),
        finished("swiftlite", "defaults", 2200.0, start_seconds=7.0, first_step_seconds=6.0, peak_rss_mib=1001.0),
        finished("swiftlite", "no packing", 1800.0, first_step_seconds=5.0),
        finished("trl", "as shipped", 525.0),
        Run("litgpt", "as shipped", 1, "/logs/litgpt.txt", failure="exit code 1"),
    ]
    lines = tables.summarise(SFT, runs)
    assert [(line.tool, line.runs) for line in lines] == [
        ("swiftlite", 2),
        ("swiftlite", 1),
        ("trl", 1),
        ("litgpt", 0),
    ]
    assert lines[0].rate == 2100 and lines[2].of_swiftlite == pytest.approx(0.25)
    text = tables.text_table(SFT, lines)
    assert "FAILED, exit code 1: see /logs/litgpt.txt" in text
    found = tables.goals(SFT, lines)
    assert any("shipped: 4.00x (goal 2.2x): reached" in goal for goal in found)
    assert any("first step against" in goal and "0.60x (goal 0.5x): NOT reached" in goal for goal in found)
    assert any("not packed, against" in goal and "0.50x (goal 0.5x): reached" in goal for goal in found)
    assert any("start against" in goal and "0.94x" in goal and goal.endswith(": NOT reached") for goal in found)
    assert any("memory" in goal and goal.endswith(": NOT reached") for goal in found)


def test_the_document_has_a_place_for_every_table(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text((SCRIPTS.parent / "docs" / "performance.md").read_text())
    for name in ("bench_cpu", "bench_preference", "gpu_check"):
        tables.fill(page, name, f"figures of {name}")
        tables.fill(page, name, f"newer figures of {name}")
    text = page.read_text()
    assert "newer figures of bench_cpu" in text and "newer figures of gpu_check" in text and "\nfigures" not in text
    assert tables.has_place(page, "bench_cpu") and not tables.has_place(page, "other")
    with pytest.raises(ValueError, match="no place"):
        tables.fill(page, "other", "text")


def test_rows_have_the_lengths_that_were_asked_for(tmp_path):
    made = workload.make_workload(tmp_path / "w", seed=3)
    facts = made.facts()["described"]
    assert facts["rows"] == 2000 and facts["shortest"] >= 15 and facts["longest"] <= workload.LONGEST
    assert 108 <= facts["median"] <= 128 and 145 <= facts["mean"] <= 175
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.model)
    with made.rows.open() as file:
        rows = [json.loads(line)["messages"] for line in file]
    encoded = tokenizer([tokenizer.apply_chat_template(row, tokenize=False) for row in rows], add_special_tokens=False)
    assert sum(map(len, encoded["input_ids"])) == facts["tokens"]
    assert workload.PAD_ID not in {token for ids in encoded["input_ids"] for token in ids}


def test_pairs_have_the_lengths_and_the_marks_that_were_asked_for(tmp_path):
    made = pairs.make_pairs(tmp_path / "w", seed=3)
    facts = made.facts()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.model)
    with made.rows.open() as file:
        rows = [json.loads(line) for line in file]
    texts = [tokenizer.apply_chat_template(row["prompt"] + row[key], tokenize=False)
             for row in rows for key in ("chosen", "rejected")]  # fmt: skip
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert all(ids.count(facts["mark"]) == 1 for ids in encoded)
    prompts = tokenizer([row["prompt"][0]["content"] for row in rows])["input_ids"]
    assert min(map(len, prompts)) >= 180 and max(map(len, prompts)) <= 601
    answers = tokenizer([row[key][0]["content"] for row in rows for key in ("chosen", "rejected")])["input_ids"]
    assert min(map(len, answers)) >= 30 and max(map(len, answers)) <= 201
    assert abs(sum(map(len, prompts)) + sum(map(len, answers)) + 9 * len(rows) - facts["described"]["tokens"]) < 900


def test_gpu_run_is_ended_once_its_metrics_are_there(tmp_path):
    code = (
        "import pathlib, sys, time\nfile = pathlib.Path(sys.argv[1]) / 'metrics.jsonl'\nfile.parent.mkdir()\n"
        'file.write_text(\'{"step": 1}\\n{"step": 2}\\n{"ste\')\ntime.sleep(60)'
    )
    line = [sys.executable, "-c", code, str(tmp_path / "run")]
    rows, result = gpu_check.train(line, tmp_path / "run", tmp_path / "log", 2, "cpu", timeout=30)
    assert result == "ok" and rows == [{"step": 1}, {"step": 2}]
    line = [sys.executable, "-c", "raise SystemExit('CUDA out of memory')"]
    assert gpu_check.train(line, tmp_path / "none", tmp_path / "log", 2, "cpu", timeout=30) == ([], "out of memory")


def test_gpu_shapes_have_the_sizes_that_their_names_say():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for shape, billions in zip(gpu_check.shapes(tiny=False), (0.494, 1.711, 8.03), strict=True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.family, **shape.sizes))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)
