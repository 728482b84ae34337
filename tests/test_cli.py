"""The program as a user meets it: help, dry runs, one-block errors with their exit codes, a run from start to end."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_parity import settings

from swiftlite.cli.app import main
from swiftlite.cli.console import print_notes, wide_console
from swiftlite.cli.errors import show_error
from swiftlite.cli.train import train
from swiftlite.config import resolve
from swiftlite.config.recipe import load_recipe, shipped_recipes
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.training import launch

HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "pyarrow")


@pytest.fixture
def run(capsys):
    """Call the program in this process: words -> (exit code, stdout, stderr)."""

    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call


def flags(values):
    words = []
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [str(value)])]
    return words


@pytest.mark.parametrize(
    "words", [["--help"], ["sft", "--help"], ["serve", "--help"], ["recipes", "list"], ["--version"]]
)
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\nfrom swiftlite.cli.app import main\n"
        f"try:\n    main({words!r})\nfinally:\n    print([n for n in {HEAVY!r} if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_help_lists_commands_and_panels(run):
    code, out, _ = run("--help")
    assert code == 0
    commands = ("sft", "pretrain", "train", "inspect", "plan", "eval", "infer", "export", "serve", "recipes", "report")
    assert all(command in out for command in commands)
    code, out, _ = run("sft", "--help")
    assert code == 0
    for panel in ("Model", "Data", "Tuner", "Optimization", "Parallelism", "Memory", "Checkpoints", "Logging"):
        assert f"─ {panel}" in out


@pytest.mark.parametrize("command", ["infer", "export", "serve", "verify"])
def test_options_say_what_they_take_and_not_in_names_of_python(run, command):
    lines = [line for line in run(command, "--help")[1].splitlines() if not {"--help", "--"} & {*line.split()}]
    assert len(lines) > 10 and not any(re.search(r"<(str|int|bool|float|path|list)", line) for line in lines)


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("sft", ["--warm-check"], ["--method"]),
        ("eval", ["--json", "FILE", "[default: the recipe's, else sft;"], ["--warm-check", "--lora-rank"]),
        ("plan", ["--device-memory", "SIZE", "--json", "--optimizer"], ["--report-to"]),
        ("inspect", ["--rows", "--chat-template", "--packing"], ["--learning-rate", "--report-to"]),
        ("train", ["--method", "[default: the recipe's;"], []),
    ],
)
def test_help_shows_what_a_command_uses_and_its_own_flags(run, command, shown, hidden):
    out = " ".join(run(command, "--help")[1].replace("│", " ").split())
    assert all(f" {word} " in out for word in shown) and not any(f" {word} " in out for word in hidden)


def test_notes_are_printed_as_they_are(capsys):
    print_notes(wide_console(), ["a:smile:b [red]c", "d" * 300 + " " + "e" * 300])
    assert capsys.readouterr().out == f"note: a:smile:b [red]c\nnote: {'d' * 300} {'e' * 300}\n"


def test_a_variable_of_a_scheduler_alone_makes_no_process_one_of_several(tmp_path, monkeypatch, capsys):
    """Without the number of processes: its notes and errors are shown as ever, and its folder is its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    show_error(UserError("it is wrong", where="here"))
    assert "where: here\n" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["sft", "--model", "m", "--dry-run"])
    assert stopped.value.code == 0 and "one process" in capsys.readouterr().out
    started = []
    monkeypatch.setattr(launch, "launch", lambda config, *_: started.append(Path(config.output_dir).is_dir()))
    values = {"model": "m", "dataset": ["d"], "beta": 0.5}
    train(resolve.resolve("sft", {name: Given(value, name, "flag") for name, value in values.items()}))
    assert started == [True] and "note: beta has no effect with sft" in capsys.readouterr().out


def test_recipes_are_listed_by_their_words(run):
    code, out, _ = run("recipes", "list", "QWEN3", "orpo")
    assert code == 0 and out.split()[0] == "qwen3/8b-orpo-full-fsdp" and out.count("\n") == 1


def test_recipes_are_listed_in_whole_words(run, monkeypatch):
    monkeypatch.setattr("swiftlite.cli.console.WIDTH", 80)
    lines = run("recipes", "list")[1].splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > len(shipped_recipes())
    words = {word for line in lines for word in line.split()}
    described = (path.read_text().splitlines()[0].removeprefix("#").split() for path in shipped_recipes().values())
    assert words == {*shipped_recipes(), *(word for line in described for word in line)}


def test_a_narrow_terminal_cuts_no_word(run, monkeypatch, tiny_model):
    monkeypatch.setattr("swiftlite.cli.console.WIDTH", 60)
    assert "…" not in run("recipes", "list")[1]
    words = ("--model", str(tiny_model("llama")), "--device", "h100", "--nproc-per-node", "8")
    _, told, _ = run("plan", *words)
    assert re.search(r"^ 8 +pp 2, fsdp full 4 +none +1 +[\d.]+ GiB ", told, re.MULTILINE)


@pytest.mark.parametrize("command", ["infer", "export", "serve"])
def test_defaults_that_are_told_in_words_are_shown(run, command):
    assert "[default: the model's]" in " ".join(run(command, "--help")[1].replace("│", " ").split())


CONTRACT_LINES = [
    "sft --parallel fsdp --sharding full --model org/model --dataset org/rows",
    "sft --recipe llama3/8b-sft-fsdp --nproc-per-node 8",
    "sft --model_type qwen-7b --dataset alpaca-en --parallel_method megatron --tensor_parallel_size 4 "
    "--pipeline_parallel_size 2",
    "sft --model_type llama3-8b --parallel_method fsdp --sharding_strategy full --mixed_precision fp16",
    "pt --model org/model --dataset org/text --lr 3e-4 --cutoff-len 512",
]


@pytest.mark.parametrize("line", CONTRACT_LINES)
def test_the_lines_of_the_contract_resolve_anywhere(run, line):
    code, out, err = run(*line.split(), "--dry-run")
    assert (code, err) == (0, "")
    assert "pp x dp_replicate x dp_shard x cp x tp" in out


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_resolves(run, name):
    code, _, err = run("train", "--recipe", name, "--dry-run")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sft --model m/x --dataset d/x --max-lenght 5", "--max-length"),
        ("sft --model m/x --dataset d/x --tuner lorra", "lora"),
        ("sft --model m/x --dataset d/x --max-length many", "max-length"),
        ("sft --model m/x", "--dataset"),
        ("sft --dataset d/x", "--model"),
        ("sft --model m/x --dataset d/x --nproc-per-node 6 --tp 4", "4"),
        ("sft --model m/x --dataset d/x --global-batch-size 8 --micro-batch-size 3", "8"),
        (
            "sft --model m/x --dataset d/x --global-batch-size 8 --micro-batch-size 2 --gradient-accumulation-steps 2",
            "4",
        ),
        ("sft --recipe no/such", "recipe"),
        ("sfft", "sft"),
        ("infer --modle x", "error: unknown flag --modle\nwhere: swiftlite infer\nfix:   did you mean `--model`? "),
        ("infer -z", "error: unknown flag -z\nwhere: swiftlite infer\nfix:   `swiftlite infer --help` shows"),
        (
            "infer m/x two",
            "error: no flag has these words: m/x two\nwhere: swiftlite infer\nfix:   name the model by --model; ",
        ),
        (
            "recipes schema x",
            "error: no flag has these words: x\nwhere: swiftlite recipes schema\nfix:   `swiftlite recipes schema ",
        ),
        (
            "--model m/x sft",
            "unknown flag --model\nwhere: swiftlite\nfix:   name a command first, flags behind it: `sw",
        ),
        ("merge --model x", "did you mean `swiftlite export`?"),
        (
            "deploy --model x",  # and not `dpo`
            "error: there is no command 'deploy'\nwhere: swiftlite\nfix:   did you mean `swiftlite serve`? `sw",
        ),
        ("recipes shw", "no command 'shw'\nwhere: swiftlite recipes\nfix:   did you mean `swiftlite recipes show`? "),
        ("export --model x", "--output-dir is missing\nwhere: swiftlite export\nfix:   add --output-dir PATH; "),
        ("recipes show", "error: NAME is missing\nwhere: swiftlite recipes show\nfix:   add NAME; `swiftlite recipes"),
        ("recipes list qwen3 gpt-2", "no recipe has all of these words\nwhere: qwen3 gpt-2\nfix:   give fewer words, "),
        ("infer --input", "error: --input needs a value\nwhere: swiftlite infer\nfix:   write --input VALUE; "),
        ("infer --stream=3", "--stream takes no value\nwhere: swiftlite infer\nfix:   write --stream alone; "),
        ("--version=3", "--version takes no value\nwhere: swiftlite\nfix:   write --version alone; `swiftlite --help`"),
        ("export --dtpe x", "fix:   did you mean `--dtype`? "),
        ("SFT --model x", "did you mean `swiftlite sft`?"),
        ("infer -m=/nowhere/at/all -p hi", "--model /nowhere/at/all"),
        ("serve m/x", "unexpected word 'm/x'"),
        ("serve m/x --model m/x -- --flag", "unexpected word 'm/x'"),
        ("serve --model /nowhere/at/all -- --flag --port=x value", "--model /nowhere/at/all"),
        (
            "serve --port 8OOO",
            "--port is '8OOO', not a whole number\nwhere: --port\nfix:   give a whole number, such as",
        ),
        ("serve --port 65536", "--port is '65536', out of range\nwhere: --port\nfix:   give at most 65535\n"),
        (
            "infer --temperature hot",
            "error: --temperature is 'hot', not a number\nwhere: --temperature\nfix:   give a n",
        ),
        ("serve --model m/x --tp 0", "--tensor-parallel-size"),
        ("serve --model m/x --max_length some", "--max-length"),
        ("recipes show nothing", "recipe"),
        ("report /nowhere", "metrics.jsonl"),
        ("recipes copy llama3/8b-sft-fsdp /proc/x.yaml", "/proc/x.yaml"),
        ("recipes copy llama3/8b-sft-fsdp not-there/", "no such folder"),
        ("sft --no-gradient-checkpointing", "write `--activation-checkpointing none`"),
        ("sft --model m/x --dataset d/x --load_best_model_at_end", "add --eval-fraction 0.05 or --eval-dataset"),
        ("dpo --model m/x --dataset d/x --train-on all", "leave it out"),
        ("sft --model m/x --dataset d/x --template vicuna --dry-run", "leave it out for the model's own"),
        ("simpo --model m/x", "did you mean `swiftlite dpo --loss simpo`?"),
        ("train --method simpo --model m/x --dataset d/x", "write `--method dpo` and `--loss simpo`"),
        ("sft --rlhf_type simpo --model m/x --dataset d/x", "use `swiftlite dpo`"),
        ("merge-lora --adapters x", "did you mean `swiftlite export`?"),
        ("sft --model /nowhere/model --dataset d/x", "/nowhere/model"),
    ],
)
def test_a_mistake_is_one_block_and_exit_code_2(run, line, said):
    code, _, err = run(*line.split())
    assert code == 2
    assert said in err
    assert err.startswith("error: ") and "fix:" in err
    assert "Traceback" not in err
    assert err.count("error:") == 1


def test_a_full_disk_is_told_without_flags_that_only_training_has(capsys):
    assert show_error(OSError(errno.ENOSPC, "No space left on device")) == 1  # of stdout, say, which has no name
    err = capsys.readouterr().err
    assert err.startswith("error: the disk is full\nfix:   free some space, or write to another one: ")
    assert "--output-dir" not in err and "--cache-dir" not in err


def test_a_data_set_name_that_means_nothing_is_found_in_a_dry_run(run):
    for flag in ("--dataset", "--eval-dataset"):
        code, out, err = run("sft", "--model", "m/x", flag, "a/b#many", "--dry-run")
        assert (code, out) == (2, "") and "#many is not a count" in err and f"where: {flag} a/b#many" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dpo --loss sigmod", "did you mean `sigmoid`"),
        ("dpo --loss kto", "unknown loss `kto`"),
        ("dpo --loss sigmoid:-1", "weight"),
        ("kto --loss kto apo_zero_unpaired", "one loss"),
        ("kto --loss sigmoid", "apo_zero_unpaired"),
        ("dpo --label-smoothing 0.1 --loss hinge", "--label-smoothing does not act on the loss hinge"),
        ("dpo --simpo-gamma 0.3", "--loss simpo"),
    ],
)
def test_a_loss_that_is_not_there_or_not_served_is_found_in_a_dry_run(run, line, said):
    code, out, err = run(*line.split(), "--model", "m/x", "--dry-run")
    assert (code, out) == (2, "")
    assert said in err and err.startswith("error: ") and "loss" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dpo --label-smoothing 0.1 --loss hinge", "--label-smoothing does not act on the loss hinge"),
        ("dpo --label-smoothing 0.5", "[0, 0.5)"),
        ("dpo --loss exo_pair", "--label-smoothing 0.001"),
        ("dpo --simpo-gamma 0.3", "--loss simpo"),
        ("dpo", "these are messages rows"),
        ("kto", "these are messages rows"),
    ],
)
def test_preference_options_are_checked_before_weights_load(
    run, monkeypatch, tmp_path, tiny_model, write_rows, chat_rows, line, said
):
    from swiftlite.training import run as run_module

    monkeypatch.setattr(run_module, "build_trainee", lambda *_: pytest.fail("the weights were loaded"))
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    code, _, err = run(*line.split(), *flags(values))
    assert code == 2
    assert said in err and err.startswith("error: ") and err.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(run):
    code, _, err = run("sft", "--debug", "--model", "/nowhere/model", "--dataset", "d/x")
    assert code == 2
    assert "Traceback" in err


def test_what_was_not_foreseen_is_one_block_and_exit_code_1(run, monkeypatch):
    def explode(resolved):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("swiftlite.cli.dry_run.show_plan", explode)
    code, _, err = run("sft", "--model", "m/x", "--dry-run")
    assert code == 1
    assert err.startswith("error: ZeroDivisionError: oh")


def test_a_run_from_the_command_line(run, tmp_path, tiny_model, write_rows, chat_rows):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    code, out, err = run("sft", *flags(values))
    assert code == 0, err
    assert "step 4/4" in out and "swiftlite infer" in out
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    code, out, _ = run("report", tmp_path / "out")
    assert code == 0
    code, out, err = run("sft", *flags(values))
    assert code == 2 and "--resume auto" in err
    code, out, err = run("infer", "--model", tmp_path / "out", "--prompt", "Who are you?", "--max-new-tokens", "4")
    assert code == 0, err


def test_runs_that_begin_in_one_second_have_folders_of_their_own(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_output_dir", lambda *_: "runs/now")
    began = []

    def launch(config, *_):
        began.append(config.output_dir)
        if len(began) < 3:
            run("sft", "--model", "some/model", "--dataset", "some/rows")

    monkeypatch.setattr("swiftlite.training.launch.launch", launch)
    run("sft", "--model", "some/model", "--dataset", "some/rows")
    assert began == ["runs/now", "runs/now-2", "runs/now-3"]
    assert not list(tmp_path.iterdir())  # nothing was written into them


def test_the_default_length_fits_the_model_and_says_so(run, tmp_path, tiny_model, write_rows, chat_rows):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    del values["max_length"]
    code, out, err = run("sft", *flags(values))
    assert code == 0, err
    assert "--max-length is 512, not 2048" in out
    code, _, err = run("sft", *flags(values | {"max_length": 2048, "output_dir": tmp_path / "other"}))
    assert code == 2 and "512 positions" in err


def test_inspect_shows_trained_tokens_and_the_audit(run, tmp_path, tiny_model, write_rows, chat_rows):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    del values["save_steps"]
    code, out, err = run("inspect", *flags(values), "--rows", "1")
    assert code == 0, err
    assert "⟦" in out and "used" in out


def test_rows_that_are_wrong_name_file_and_line(run, tmp_path, tiny_model):
    data = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    bad = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    data.write_text(f"{good}\n{good}\n{bad}\n")
    values = settings(tmp_path, tiny_model("llama"), data)
    code, _, err = run("sft", *flags(values))
    assert code == 2 and "rows.jsonl:3" in err and "assistant" in err
    data.write_text(f"{good}\n{{broken\n{good}\n")
    code, _, err = run("sft", *flags(values))
    assert code == 2 and "rows.jsonl:2" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["sft", "eval"])
def test_processes_show_tracebacks_where_a_recipe_asks_for_them(run, tmp_path, monkeypatch, command):
    reports = []
    monkeypatch.setattr("swiftlite.training.launch.launch", lambda config, layout, report, *_: reports.append(report))
    recipe = tmp_path / "r.yaml"
    for debug in ("true", "false"):
        recipe.write_text(f"model: m/x\ndataset: d/x\ndebug: {debug}\n")
        assert run(command, "--recipe", recipe)[0] == 0
    assert [report.keywords["debug"] for report in reports] == [True, False]


def test_recipes_are_copied_but_never_over_a_file(run, tmp_path, monkeypatch):
    code, out, _ = run("recipes", "copy", "llama3/8b-sft-lora", tmp_path)
    assert code == 0 and (tmp_path / "8b-sft-lora.yaml").is_file()
    code, _, err = run("recipes", "copy", "llama3/8b-sft-lora", tmp_path)
    assert code == 2 and "exists" in err
    for name in shipped_recipes():
        run("recipes", "copy", name, tmp_path / f"{name.replace('/', '-')}.yaml")
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves `~` alone in quotes
    for destination in ("~/home.yaml", "~/sub/"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        assert run("recipes", "copy", "llama3/8b-sft-lora", destination)[0] == 0
    assert (tmp_path / "home.yaml").is_file() and (tmp_path / "sub" / "8b-sft-lora.yaml").is_file()
    copied = load_recipe(str(tmp_path / "smollm2-135m-quickstart.yaml")).entries["dataset"].value
    assert len(copied) == 2 and all(Path(path).is_file() for path in copied)  # they lie beside the recipe, not the copy
    assert load_recipe(str(tmp_path / "qwen3-8b-sft-lora.yaml")).entries["dataset"].value == "alpaca-cleaned"
    source = tmp_path / "here"
    source.mkdir()
    for name in ("a.jsonl", "my b.jsonl", "t.jinja", "r.py"):
        (source / name).touch()
    lines = "model: x/y\ndataset:\n  - a.jsonl#5\n  - 'my b.jsonl'\n  - c/d\nchat_template: t.jinja  # ours\n"
    lines += "reward: r.py:one*0.5 package.module.two\n"
    (source / "r.yaml").write_text(lines)
    run("recipes", "copy", source / "r.yaml", tmp_path / "r.yaml")
    entries = load_recipe(str(tmp_path / "r.yaml")).entries
    assert entries["dataset"].value == [f"{source}/a.jsonl#5", f"{source}/my b.jsonl", "c/d"]
    assert (entries["model"].value, entries["chat_template"].value) == ("x/y", f"{source}/t.jinja")
    assert entries["reward"].value == f"{source}/r.py:one*0.5 package.module.two"
    code, out, _ = run("recipes", "schema")
    assert "max_length" in json.loads(out)["properties"]
