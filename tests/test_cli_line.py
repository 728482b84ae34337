"""The words of a command line, and what the program does with the ways it can end."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from swiftlite.cli import app
from swiftlite.cli.line import read_line
from swiftlite.errors import RunError, UserError


def values(words):
    return read_line("sft", words.split()).values


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-length 5", {"max_length": ["5"]}),
        ("-m a/b -d c -o e", {"model": ["a/b"], "dataset": ["c"], "output_dir": ["e"]}),
        ("--max_length=5", {"max_length": ["5"]}),
        ("--cutoff-len 5", {"max_length": ["5"]}),
        ("--dataset a b c --seed 1", {"dataset": ["a", "b", "c"], "seed": ["1"]}),
        ("--dataset a,b --dataset c", {"dataset": ["a", "b", "c"]}),
        (r"--trainable-modules layers\.\d{1,2}\.,norm", {"trainable_modules": [r"layers\.\d{1,2}\.", "norm"]}),
        ("--columns instruction=q output=a", {"columns": ["instruction=q", "output=a"]}),
        ("--packing", {"packing": ["true"]}),
        ("--no-packing", {"packing": ["false"]}),
        ("--no_packing --seed 1", {"packing": ["false"], "seed": ["1"]}),
        ("--packing False", {"packing": ["false"]}),
        ("--packing=yes", {"packing": ["true"]}),
        ("--packing --seed 1", {"packing": ["true"], "seed": ["1"]}),
        ("--use-dora", {"dora": ["true"]}),
        ("--cpu-offload --seed 1", {"offload": ["cpu"], "seed": ["1"]}),
        ("--gradient-checkpointing false", {"activation_checkpointing": ["false"]}),
        ("--gradient_checkpointing", {"activation_checkpointing": ["full"]}),
        ("--resume", {"resume": ["auto"]}),
        ("--trainable-layers -2", {"trainable_layers": ["-2"]}),
        ("-o runs/x", {"output_dir": ["runs/x"]}),
        ("--seed 1 --seed 2", {"seed": ["2"]}),
        ("--bf16 --seed 1", {"precision": ["bf16"], "seed": ["1"]}),
        ("--bf16 False --fp16 True", {"precision": ["fp16"]}),
        ("--no-bf16 --torch_dtype float32", {"precision": ["float32"]}),
        ("--use-peft --lora_r 4", {"tuner": ["lora"], "lora_rank": ["4"]}),
        ("--lora_target_linear true", {"target_modules": ["all-linear"]}),
        ("--enable_dft_loss true", {"loss": ["dft"]}),
        ("--use-dft-loss", {"loss": ["dft"]}),
        ("--loss_type dft --enable_dft_loss false", {"loss": ["dft"]}),
        ("--no_enable_dft_loss", {}),
        ("--neftune_alpha 5", {"neftune_noise_alpha": ["5"]}),
        ("--moe_aux_loss_coeff 1e-3", {"router_aux_loss_coef": ["1e-3"]}),
        ("--moe-aux-loss-coef 0", {"router_aux_loss_coef": ["0"]}),
        ("--deepspeed zero3", {"sharding": ["zero3"]}),
        ("--fp32 --tp_size 2", {"precision": ["fp32"], "tensor_parallel_size": ["2"]}),
        ("--ratio_clip_min 0.2 --ratio_clip_max 0.3", {"epsilon": ["0.2"], "epsilon_high": ["0.3"]}),
        ("--no_advantage_std_norm", {"scale_rewards": ["none"]}),
        ("--norm_adv_by_std_in_grpo False", {"scale_rewards": ["False"]}),
        ("--loss_agg_mode seq-mean-token-mean", {"loss": ["grpo"]}),
        ("--policy_loss_type ppo --kl_loss_type low_var_kl --entropy_coeff 0 --use_kl_in_reward False", {}),
        ("--excess_length_strategy raise", {"overlong": ["raise"]}),
    ],
)
def test_spellings_of_flags(words, expected):
    assert values(words) == expected


def test_a_comma_in_the_name_of_a_file_does_not_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.jsonl").write_text("")
    assert values("--dataset a,b.jsonl") == {"dataset": ["a,b.jsonl"]}
    assert values("--dataset a,b.jsonl#3*2") == {"dataset": ["a,b.jsonl#3*2"]}
    assert values("--dataset c#1,a,b.jsonl@x,d") == {"dataset": ["c#1", "a,b.jsonl@x", "d"]}


def test_the_recipe_may_stand_anywhere():
    for words in ("--seed 1 --recipe x", "-r x --seed 1", "--config=x --seed 1"):
        line = read_line("sft", words.split())
        assert (line.recipe, line.values) == ("x", {"seed": ["1"]})


def test_a_flag_given_twice_is_noted():
    assert "--lr was given twice" in read_line("sft", ["--learning-rate", "1", "--lr", "2"]).notes[0]
    assert not read_line(
        "sft", ["--torch_dtype", "bfloat16", "--bf16", "--lr", "1e-4", "--learning-rate", "0.0001"]
    ).notes


@pytest.mark.parametrize("words", ["--model a/b --model_type qwen2", "--model-type qwen2 --model_name_or_path a/b"])
def test_the_type_of_a_model_is_no_other_model(words):
    """What ms-swift and axolotl call so is its architecture."""
    line = read_line("sft", words.split())
    assert line.values == {"model": ["a/b"]} and "config.json" in line.notes[0]
    assert values("--model_type qwen-7b") == {"model": ["qwen-7b"]}


def test_how_often_a_thing_is_done_in_the_words_of_others():
    words = "--save_strategy epoch --evaluation-strategy no --evals_per_epoch 4 --logging_strategy=EPOCH"
    line = read_line("sft", [*words.split(), "--save-steps", "500", "--logging_strategy", "steps"])
    assert line.values == {"save_steps": ["epoch"], "eval_steps": ["epoch/4"], "log_steps": ["epoch"]}
    assert line.notes == [
        "--save_strategy epoch is read as --save-steps epoch",
        "--evaluation-strategy no is read as --eval-steps never",
        "--evals_per_epoch 4 is read as --eval-steps epoch/4",
        "--evals_per_epoch was given twice; epoch/4 counts, not never",
        "--logging_strategy EPOCH is read as --log-steps epoch",
        "--save-steps has no effect beside --save_strategy: which decides here",
        "--logging_strategy steps has no effect: steps are counted where nothing else is said",
    ]


def test_a_value_may_be_of_another_setting(tmp_path, monkeypatch):
    assert values("--warmup_steps 0.1 --warmup-steps=5") == {"warmup_ratio": ["0.1"], "warmup_steps": ["5"]}
    assert values("--use_muon True") == values("--optim Muon") | {"optimizer": ["muon"]}
    assert values("--adapter QLoRA") == {"tuner": ["lora"], "quantization": ["nf4"]}
    named = values("--model_name Robo --model_author Us --placeholders A=b")
    assert named == {"placeholders": ["name=Robo", "author=Us", "A=b"]}
    for words in ("--rlhf_type simpo", "--rlhf_type simpo --loss_type sigmoid", "--loss sigmoid ipo --rlhf_type simpo"):
        assert values(words) == {"method": ["dpo"], "loss": ["simpo"]}  # as a recipe has it, whose notes say so
    assert values("""--lr_scheduler_kwargs {"min_lr_rate":0.1}""") == {"min_lr_ratio": ["0.1"]}
    assert values("""--lr_scheduler_kwargs {"min_lr":1e-6}""") == {"min_lr": ["1e-6"]}
    text = read_line("sft", ["--fsdp", "shard_grad_op auto_wrap offload"]).values
    assert text == {"parallel": ["fsdp"], "sharding": ["shard_grad_op"], "offload": ["cpu"]}
    assert values("--fsdp full_shard") == {"parallel": ["fsdp"], "sharding": ["full_shard"]}
    assert values("--fsdp true") == {"parallel": ["true"]}
    assert values("--rlhf_type dpo") == {"method": ["dpo"]}
    assert values("--adapter some/folder") == {"adapter": ["some/folder"]}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qlora").mkdir()
    assert values("--adapter qlora") == {"adapter": ["qlora"]}


@pytest.mark.parametrize(
    ("words", "meant", "left"),
    [
        (
            "--train_on_inputs --seed 1",
            {"train_on": ["all"], "seed": ["1"]},
            "--train_on_inputs is read as --train-on all",
        ),
        ("--train_on_prompt true", {"train_on": ["all"]}, "is read as --train-on all"),
        ("--train_on_inputs false", {}, "has no effect"),
        ("--assistant_only_loss False", {"train_on": ["all"]}, "is read as --train-on all"),
        ("--completion_only_loss true", {}, "has no effect"),
        ("--mask_history True", {"train_on": ["last-answer"]}, "is read as --train-on last-answer"),
        ("--loss_scale last_round", {"train_on": ["last-answer"]}, "is read as --train-on last-answer"),
        ("--loss_scale default", {}, "has no effect"),
        ("--load_in_8bit True --load_in_4bit false", {"quantization": ["int8"]}, "is read as --quantization int8"),
        ("--activation_offloading", {"activation_checkpointing": ["offload"]}, "is read as --activation-checkpointing"),
        ("--load_best_model_at_end", {"result": ["best"]}, "is read as --result best"),
        ("--load_best_model_at_end false", {"result": ["last"]}, "is read as --result last"),
    ],
)
def test_switches_of_others_that_may_stand_without_a_value(words, meant, left):
    line = read_line("sft", words.split())
    assert line.values == meant and left in line.notes[0]


def test_flags_that_change_nothing_are_noted():
    words = "--attn_impl flash_attn --per_device_eval_batch_size=2 --no_remove_unused_columns --save_strategy steps"
    line = read_line("sft", [*words.split(), "--overwrite-output-dir", "--merge-lora", "false", "--seed", "1"])
    assert line.values == {"seed": ["1"]}
    assert [note.split(" has no effect: ")[0] for note in line.notes] == [
        "--attn_impl flash_attn",
        "--per_device_eval_batch_size 2",
        "--no_remove_unused_columns",
        "--save_strategy steps",
        "--overwrite-output-dir",
        "--merge-lora false",
    ]
    assert "attention takes the fastest" in line.notes[0] and "evaluation takes micro-batches" in line.notes[1]


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--max-lenght", "5"], "unknown flag --max-lenght", "--max-length"),
        (["--no-pakcing"], "unknown flag", "--no-packing"),
        (["--no-seed"], "unknown flag", "--help"),
        (["-x"], "unknown flag -x", "--help"),
        (["-r", "a", "--config=b"], "two recipes are named, a and b", "flags"),
        (["--save_strategy", "best"], "unknown flag --save_strategy", "`--save-steps 500`"),
        (["--evals_per_epoch", "2.5"], "unknown flag --evals_per_epoch", "`--eval-steps epoch/2`"),
        (["--model_name", "org/robot"], "unknown flag --model_name", "`--model NAME`"),
        (["--use_galore", "true"], "unknown flag --use_galore", "optimizers are AdamW and Muon"),
        (["--muon_momentum", "0.9"], "unknown flag --muon_momentum", "a momentum of 0.95"),
        (["--loraplus_lr_embedding", "1e-6"], "unknown flag", "`--lora-plus-ratio` counts"),
        (["--bf16", "false"], "--bf16 is off", "`--precision fp32`"),
        (["--no-use-peft"], "--use-peft is off", "`--tuner full`"),
        (["--limit", "100"], "unknown flag --limit", "`--max-samples 100`"),
        (["--tasks", "gsm8k"], "unknown flag --tasks", "brings no benchmarks along"),
        (["--batch_size_training", "4"], "unknown flag", "`--micro-batch-size 1`"),
        (["--use_gradient_checkpointing"], "unknown flag", "`--activation-checkpointing full`"),
        (["--num_samples_per_prompt_rollout", "4"], "unknown flag", "`--samples 8`"),
        (["--prompt_max_len", "512"], "unknown flag", "`--max-new-tokens 256` for the answer"),
        (["--clip_eps", "0.2"], "unknown flag --clip_eps", "`--eps-clip`"),
        (["--kl-coef", "0.1"], "unknown flag --kl-coef", "`--beta 0.04` weighs it"),
        (["--num_prompts_per_step", "8"], "unknown flag", "`--global-batch-size 8` for the prompts"),
        (["--nproc", "2"], "unknown flag --nproc", "`--nproc-per-node 2`"),
        (["--bs", "8"], "unknown flag --bs", "`--micro-batch-size 1`"),
        (["--grad_clip", "1"], "unknown flag --grad_clip", "`--max-grad-norm 1.0`"),
        (["--entropy_coeff", "0.01"], "unknown flag --entropy_coeff", "the loss has no entropy"),
        (["--gamma", "0.5"], "unknown flag --gamma", "`--simpo-gamma 0.5`"),
        (["--lora", "true"], "unknown flag --lora", "`--tuner lora`"),
        (["actor_rollout_ref.actor.loss_agg_mode=token-mean"], "belongs to no flag", "`--loss dapo`"),
        (["actor_rollout_ref.rollout.n=5"], "belongs to no flag", "`--samples 8`"),
        (["trainer.nnodes=2"], "belongs to no flag", "`--nnodes 2`"),
        (["a.yaml"], "'a.yaml' belongs to no flag", "`--recipe a.yaml`"),
        (["lr=1e-5"], "belongs to no flag", "`--learning-rate 1e-5`"),
        (["--seed"], "needs a value", "--seed VALUE"),
        (["--seed", "--lr", "1"], "--seed needs a value", "--seed VALUE"),
        (["--dataset"], "needs a value", "--dataset VALUE"),
        (["--output-dir="], "is empty", "shell"),
        (["--model", ""], "is empty", "shell"),
        (["word"], "'word' belongs to no flag", "flag"),
        (["--seed", "1", "2"], "'2' belongs to no flag", "flag"),
        (["--packing", "maybe"], "'maybe' belongs to no flag", "write --packing alone"),
        (["--packing", __file__], "belongs to no flag", "write --packing alone"),
        ([__file__], "belongs to no flag", f"`--dataset {__file__}`"),
        (["--packing=maybe"], "not true or false", "--packing"),
        (["--no-packing=1"], "takes no value", "--no-packing"),
    ],
)
def test_slips_are_told_with_the_fix(words, what, fix):
    with pytest.raises(UserError) as caught:
        read_line("sft", words)
    assert what in caught.value.what and fix in caught.value.fix


def test_all_unknown_flags_are_told_at_once():
    with pytest.raises(UserError) as caught:
        read_line("sft", ["--modle", "x", "--datset", "a", "b", "--lr", "1", "--batch-siez=3"])
    wrong = caught.value.what
    assert all(text in wrong for text in ("3 flags", "`--model`", "`--dataset`", "batch-siez"))
    assert "belongs to no flag" not in wrong


@pytest.fixture
def run(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            app.main(list(words))
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call


DRY = ("--model", "m/x", "--dataset", "d/x", "--dry-run")


def test_a_command_may_be_told_its_own_method_and_no_other(run):
    assert run("sft", "--method", "sft", *DRY)[0] == 0
    code, _, err = run("sft", "--method", "dpo", *DRY)
    assert code == 2 and "contradicts" in err and "`swiftlite dpo`" in err


def test_the_recipe_may_stand_before_the_command(run):
    code, out, err = run("--recipe", "llama3/8b-sft-fsdp", "sft", "--dry-run")
    assert (code, err) == (0, "") and "Meta-Llama-3-8B" in out


@pytest.mark.parametrize("words", [(), ("recipes",), ("infer", "-h"), ("sft", "--no-such-flag", "--help")])
def test_help_where_it_is_asked_for(run, words):
    code, out, err = run(*words)
    if "--no-such-flag" in words:
        assert code == 2
    else:
        assert (code, err) == (0, "") and "Usage" in out


def test_flags_of_other_commands_take_underscores_and_debug(run, tmp_path):
    code, _, err = run("infer", "--debug", "--max_new_tokens", "4", "--model", str(tmp_path / "none"))
    assert code == 2 and "max" not in err.splitlines()[-1] and "Traceback" in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("wrong", where="here", fix="so"), 2, "error: wrong\nwhere: here\nfix:   so\n"),
        (RunError("broke", fix="so"), 1, "error: broke\nfix:   so\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(143), 143, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (MemoryError(), 1, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/disk/file"), 1, "/disk/file"),
        (ValueError("a\nlong\nstory"), 1, "error: ValueError: a\nfix:"),
        (GeneratorExit("no Exception"), 1, "error: GeneratorExit: no Exception"),
    ],
)
def test_every_end_has_its_code_and_one_block(run, monkeypatch, error, code, said):
    def fail(resolved):
        raise error

    monkeypatch.setattr("swiftlite.cli.dry_run.show_plan", fail)
    got, _, err = run("sft", *DRY)
    assert got == code and said in err
    assert "Traceback" not in err and err.count("error:") <= 1


def test_only_rank_0_speaks_and_of_mistakes_the_first_of_each_machine(run, monkeypatch):
    waited = []
    monkeypatch.setattr(app.time, "sleep", waited.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run("sft", *DRY) == (0, "", "")
    assert run("sft", "--no-such-flag") == (2, "", "")
    assert waited  # for the first, which torchrun would end before it has told
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of another machine, which may have another recipe
    assert "unknown flag" in run("sft", "--no-such-flag")[2]
    for nonsense in ("x", "2"):
        monkeypatch.setenv("RANK", nonsense)
        assert "RANK is" in run("sft", *DRY)[2]
    monkeypatch.setenv("RANK", "0")
    assert "2 (torchrun)" in run("sft", *DRY)[1]
    code, _, err = run("sft", *DRY[:-1])
    assert code == 2 and "MASTER_ADDR" in err


ALONE = [("recipes", "list"), ("infer", "--help"), ("sft", "--help"), ("inspect", "--rows", "x", *DRY), ("exprt",)]


@pytest.mark.parametrize("words", ALONE)
def test_what_is_work_for_one_process_is_done_by_the_first(run, monkeypatch, words):
    told = run(*words)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run(*words) == (0, "", "")
    monkeypatch.setenv("RANK", "0")
    note = "note: one of the 2 processes does this, and the others end\n"
    assert run(*words) == (told[0], told[1], note + told[2])
    if words[0] not in app.run_commands():  # an engine that it starts would look for the others
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()


LONG = "x" * 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", ""), "error: a word of the line is empty\nwhere: swiftlite report\n"),
        (("recipes", "copy", "x", " "), "error: a word of the line is empty\nwhere: swiftlite recipes\n"),
        (("infer", "-m", ""), "error: the value of -m is empty\nwhere: swiftlite infer\n"),
        (("export", "-m", "x", "--output_dir="), "error: the value of --output-dir is empty\n"),
        (("report", LONG), "error: no file or folder can have this name"),
        (("report", "~nobody-here/run"), "\nwhere: run\n"),
        (("recipes", "copy", "135m-quickstart", LONG), "\nwhere: DEST\n"),
        (("export", "-m", "x", "-o", LONG), "\nwhere: --output-dir\n"),
        (("infer", "-m", "no", "--input", LONG), "\nwhere: --input\n"),
        (("infer", "-m", "no", "--prompt"), "`swiftlite infer --help` shows what there is"),
        (("infer", "-m", "no", "--system", "", "-p", "x"), "error: the model is neither a folder nor a hub id\n"),
        (("infer", "-m", "no", "--system=", "-p", "x="), "error: the model is neither a folder nor a hub id\n"),
        (("inspect", "--model", "m/x", "--dataset", "d/x", "--rows", "1.5"), "'1.5', not a whole number"),
    ],
)
def test_words_that_can_be_no_value_are_told(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (2, "") and said in err


def test_a_working_folder_that_is_gone_is_told(run, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, err = run("sft", *DRY)
    assert (code, out) == (2, "") and "the working folder is gone" in err


def test_inspect_has_a_dry_run_too(run):
    code, out, err = run("inspect", *DRY)
    assert (code, err) == (0, "") and "Plan" in out


def test_the_plan_shows_ranks_and_arithmetic(run):
    _, out, _ = run("sft", *DRY, "--tp", "4", "--pp", "2", "--nproc-per-node", "16", "--micro-batch-size", "2")
    text = " ".join(out.split())
    assert "= 2 x 1 x 2 x 1 x 4" in text
    assert "tp: ranks 0 1 2 3 | 4 5 6 7" in text and "pp: ranks 0 8 | 1 9" in text
    assert "2 a forward pass x 2 accumulated x 2 data ranks" in text
    assert "1f1b, 2 micro-batches over 2 ranks; about 33% idle" in text
    for schedule, idle in (("interleaved-1f1b", "about 11% idle"), ("zero-bubble", "over 2 ranks a step")):
        _, out, _ = run("sft", *DRY, "--pp", "2", "--micro-batch-size", "2", "--pipeline-schedule", schedule)
        assert idle in " ".join(out.split())
    long = "runs/" + "long-" * 30
    assert long in run("sft", *DRY, "-o", long)[1]  # whole, for whoever reads it from a pipe


def test_help_shows_choices_defaults_and_other_names(run):
    _, out, _ = run("sft", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert "constant_with_warmup" in text and "--no-packing turns it off" in text
    assert "default: 2048" in text and "--cutoff-len" in text and "NPROC_PER_NODE" in text
    assert "…" not in text  # nothing is cut off at 80 columns


def test_a_closed_pipe_and_a_termination_end_quietly():
    program = [sys.executable, "-m", "swiftlite"]
    for line in ("recipes schema", "recipes show smollm2/135m-quickstart", "plan --help", "--help"):
        reader = subprocess.Popen([*program, *line.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        reader.stdout.close()
        assert reader.stderr.read() == b"" and reader.wait() == 141
    code = "import signal, os\nfrom swiftlite.cli import app, dry_run\n"
    code += "dry_run.show_plan = lambda r: (print('ready', flush=True), signal.pause())\n"
    code += f"app.main({['sft', *DRY]!r})"
    waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waiting.stdout.readline() == b"ready\n"
    os.kill(waiting.pid, signal.SIGTERM)
    assert waiting.communicate()[1] == b"terminated\n" and waiting.returncode == 143


def test_notes_that_nobody_reads_do_not_end_a_training_run(tmp_path):
    words = ["sft", "--model", "m", "--dataset", "d", "-o", str(tmp_path / "out"), "--save-safetensors"]
    code = "import sys\nfrom swiftlite.training import launch\n"
    code += "launch.launch = lambda *_: print('trains', file=sys.stderr)\n"
    code += f"from swiftlite.cli.app import main\nmain({words!r})"
    for closed in (True, False):
        done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if closed:
            done.stdout.close()
            assert (done.stderr.read(), done.wait()) == ("trains\n", 0)
        else:
            assert done.communicate()[0].startswith("note: --save-safetensors has no effect")


def test_ctrl_c_before_anything_is_imported_ends_quietly():
    code = "import sys\nfrom swiftlite.__main__ import main\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
    code += "        if name == 'swiftlite.cli.app':\n            raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Interrupt())\nmain()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == 130 and ended.stderr == b"interrupted\n"


@pytest.mark.parametrize("closed", [">&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(tmp_path, closed):
    file = tmp_path / "copy.yaml"
    code = f"from swiftlite.cli import app; app.main(['recipes', 'copy', 'smollm2/135m-quickstart', {str(file)!r}])"
    assert subprocess.run(["bash", "-c", f'"{sys.executable}" -c "{code}" {closed}']).returncode == 0
    assert "learning_rate" in file.read_text() and "copied" not in file.read_text()


def test_closed_streams_are_no_other_files_of_new_processes(tmp_path):
    seen = tmp_path / "seen"
    started = f"import os; os.fstat(1); open({str(seen)!r}, 'w')"
    code = "import subprocess, sys; from swiftlite.streams import settle_streams; settle_streams(); "
    code += f"subprocess.run([sys.executable, '-c', {started!r}])"
    assert subprocess.run(["bash", "-c", f"{sys.executable} -c {shlex.quote(code)} >&-"]).returncode == 0
    assert seen.exists()


def test_letters_that_a_terminal_does_not_have_are_written_otherwise():
    code = "from swiftlite.cli import app, dry_run\ndry_run.show_plan = lambda r: print('\u27e6a\u27e7')\n"
    code += f"app.main({['sft', *DRY]!r})"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert shown.returncode == 0 and shown.stdout.strip() == b"\\u27e6a\\u27e7", shown.stderr


def test_a_second_signal_while_python_ends_changes_nothing():
    code = "import os, signal\nfrom swiftlite import __main__\nfrom swiftlite.cli import app\n"
    code += "class Last:\n    def __del__(self, kill=os.kill, me=os.getpid()):\n        kill(me, signal.SIGTERM)\n"
    code += "def run():\n    print('told', end='')\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "from swiftlite.ending import end_on_signals\nend_on_signals()\napp.main = run\n"
    code += "signal.last = Last()\n__main__.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, b"told", b"terminated\n")


@pytest.mark.parametrize(
    ("number", "code", "told"), [(signal.SIGTERM, 143, b"terminated\n"), (signal.SIGINT, 130, b"interrupted\n")]
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_that_a_library_swallows_ends_the_program_all_the_same(number, code, told, fails):
    script = "import os, signal\nfrom swiftlite import ending\nfrom swiftlite.cli import app, dry_run\n"
    script += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background has it ignored
    script += "def library(resolved):\n"
    script += f"    try:\n        os.kill(os.getpid(), {int(number)})\n    except BaseException:\n        pass\n"
    script += "    raise ImportError\n" if fails else "    ending.raise_seen_signal()\n    print('went on')\n"
    script += f"dry_run.show_plan = library\napp.main({['sft', *DRY]!r})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", told)


def test_top_level_help_is_quick():
    """Less than half the time of importing torch, whose CPU time this counts as well."""

    def cpu_seconds(*words):
        before = os.times()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    help_time = min(cpu_seconds("-m", "swiftlite", "--help") for _ in range(3))
    assert help_time < cpu_seconds("-c", "import torch") / 2


def test_recipes_show_is_the_file(run):
    from swiftlite.config.recipe import find_recipe

    assert run("recipes", "show", "llama3/8b-sft-fsdp")[1] == find_recipe("llama3/8b-sft-fsdp").read_text()
    code, out, _ = run("recipes", "list")
    assert code == 0 and "llama3/8b-sft-fsdp" in out and "models" not in out.split()
    assert json.loads(run("recipes", "schema")[1])["additionalProperties"] is False


@pytest.mark.parametrize("words", [["--eval-dataset", ""], ["--dataset", "a.jsonl", " "], ["--new-tokens", "a", ""]])
def test_an_empty_word_of_a_list_is_refused(words):
    with pytest.raises(UserError, match="is empty"):
        read_line("sft", words)


def test_a_system_message_may_be_empty_and_begin_with_a_dash():
    assert read_line("sft", ["--system", ""]).values == read_line("sft", ["--system="]).values == {"system": [""]}
    assert read_line("sft", ["--system=- brief\n- clear"]).values == {"system": ["- brief\n- clear"]}
