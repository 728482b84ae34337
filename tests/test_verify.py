"""The parity matrix: layouts train the curve of one process, and a broken reduction, divisor or tie is seen."""

import json
import math
import os
import subprocess
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save_file
from test_launch import ENV, SWIFTLITE
from worlds import run_ranks

from swiftlite.cli import verify as command
from swiftlite.cli.app import main
from swiftlite.cli.errors import show_error
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.parallel.stages import SPLITS_CORRECTLY
from swiftlite.parallel.start import Machines, start_processes
from swiftlite.verification.cases import FULL, LORA, Case, Subject, cases
from swiftlite.verification.compare import Difference, compare
from swiftlite.verification.run import VERDICTS, Verdict, read_verdicts, verify_in_process, write_rows

ZERO_BUBBLE = ["pp 2 zero-bubble"] if SPLITS_CORRECTLY else []  # else it is refused


def verdicts_of(tmp_path, world: int, *words: str) -> list[dict]:
    report = tmp_path / "verdicts.json"
    command = [*SWIFTLITE, "verify", "--nproc-per-node", str(world), "--json", str(report), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENV | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "UserWarning" not in done.stderr
    return json.loads(report.read_text())


def equal(verdicts: list[dict]) -> set[str]:
    """The layouts, of runs that went on in another one the last."""
    return {verdict["case"].rpartition(" -> ")[2] for verdict in verdicts if verdict["difference"] is not None}


def test_two_processes_in_every_layout(tmp_path):
    verdicts = verdicts_of(tmp_path, 2, "-a", "llama-tied", "-a", "qwen3-moe", "--method", "sft")
    assert {"ddp 2", "fsdp full 2", "fsdp grad_op 2", "fsdp full 2, offloaded", "tp 2", "pp 2", "pp 2 gpipe",
            "pp 2 interleaved-1f1b", *ZERO_BUBBLE, "cp 2", "ep 2"} <= equal(verdicts)  # fmt: skip
    assert {verdict["case"] for verdict in verdicts if verdict["refused"]} == {"pp 2 zero-bubble"} - {*ZERO_BUBBLE}


def test_preferences_go_on_in_other_layouts(tmp_path):
    pipeline = "pp 2 zero-bubble" if SPLITS_CORRECTLY else "pp 2 gpipe"
    layouts = ["fsdp grad_op 2", "tp 2", pipeline, "cp 2"]
    words = [
        "--resume",
        "--method",
        "dpo",
        "--method",
        "rm",
        "--method",
        "kto",
        *(w for name in layouts for w in ("-l", name)),
    ]
    verdicts = verdicts_of(tmp_path, 2, "-a", "llama-tied", *words)
    assert len(verdicts) == 12 and equal(verdicts) == set(layouts)
    assert [v["case"] for v in verdicts[:2]] == ["one process -> fsdp grad_op 2", "fsdp grad_op 2 -> tp 2"]
    assert {"tp 2 -> cp 2", f"cp 2 -> {pipeline}"} <= {v["case"] for v in verdicts}


def in_real_processes(tmp_path, count, chosen, *subjects, changed: str | None = None, model=None) -> list:
    """Verdicts of these subjects, of one architecture, in these layouts. changed: of CHANGES; model: by default a toy.

    Three steps are enough, but for adapters: a matrix that starts at zero is, after few of them, AdamW's first updates,
    in which rounding counts for most where a gradient is near zero.
    """
    shorter = {"full": {"max_steps": 3}, "lora": {}}
    subjects = [replace(subject, flags=shorter[subject.flags["tuner"]] | subject.flags) for subject in subjects]
    (name,) = {subject.architecture for subject in subjects}
    models = {name: str(model or write_toy(tmp_path / "model", toy_config(name, 4)))}
    write_rows(tmp_path)
    picked = [case for case in cases(count) if case.name in chosen]
    assert len(picked) == len(chosen)
    run_ranks(count, changed_process, changed, str(tmp_path), models, subjects, picked)
    found = read_verdicts(tmp_path)
    assert len(found) == len(picked) * len(subjects)
    return found


def test_three_processes(tmp_path):
    chosen = ("ddp 3", "fsdp full 3", "pp 3", "cp 3")
    for verdict in in_real_processes(tmp_path, 3, chosen, Subject("llama", "llama", FULL)):
        assert verdict.passed and verdict.difference is not None, verdict


def test_four_processes_in_products(tmp_path):
    both = Subject("gemma3", "gemma3", FULL), Subject("gemma3", "gemma3, LoRA", LORA)
    for verdict in in_real_processes(tmp_path, 4, ("hybrid 2x2", "tp 2 x pp 2", "pp 2 x cp 2"), *both):
        assert verdict.passed and verdict.difference is not None, verdict


NOISY = {"loss": ["dft"], "neftune_noise_alpha": 5.0}


def test_noise_weights_of_tokens_and_routers_are_the_same_in_every_layout(tmp_path):
    subject = Subject("qwen3-moe", "qwen3-moe", FULL | NOISY | {"router_aux_loss_coef": 0.3})
    chosen = ("ddp 2", "fsdp full 2, recomputing", "tp 2", "pp 2", *ZERO_BUBBLE, "cp 2", "ep 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, subject):
        assert verdict.passed and verdict.difference is not None, verdict


def test_noise_and_weights_of_tokens_in_products_of_layouts(tmp_path):
    flags = NOISY | {"micro_batch_size": 1, "sequence_parallel": "always"}
    both = Subject("llama-tied", "full", FULL | flags), Subject("llama-tied", "LoRA", LORA | flags)
    for verdict in in_real_processes(tmp_path, 4, ("hybrid 2x2", "tp 2 x pp 2", "tp 2 x cp 2"), *both):
        assert verdict.passed and verdict.difference is not None, verdict


def test_answers_of_a_step_with_fewer_micro_batches_than_stages(tmp_path):
    few = FULL | {"packing": False, "max_steps": 2, "micro_batch_size": 1}  # of eight rows, and of one
    rows = {"dpo": "pairs.jsonl#9", "kto": "judged.jsonl#9", "rm": "pairs.jsonl#9"}
    subjects = [Subject("llama", name, few | {"dataset": [str(tmp_path / rows[name])]}, name) for name in rows]
    for verdict in in_real_processes(tmp_path, 2, ("pp 2", *ZERO_BUBBLE), *subjects):
        assert verdict.passed and verdict.difference is not None, verdict


def test_products_by_oneDNN(tmp_path):
    both = Subject("llama-tied", "full", FULL), Subject("llama-tied", "LoRA", LORA)
    chosen = ("fsdp full 2, recomputing", "fsdp full 2, offloaded", "tp 2", "pp 2", *ZERO_BUBBLE, "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *both, changed="with_oneDNN"):
        assert verdict.passed and verdict.difference is not None, verdict


def test_tokens_divided_as_on_a_gpu(tmp_path):
    always = {"sequence_parallel": "always"}
    both = Subject("gemma3", "full", FULL | always), Subject("gemma3", "LoRA", LORA | always)
    for verdict in in_real_processes(tmp_path, 4, ("tp 2 x pp 2",), *both):
        assert verdict.passed and verdict.difference is not None, verdict


def test_equal_weights_are_equal_files_in_every_layout(tmp_path):
    still = Subject("llama", "llama", FULL | {"learning_rate": 1e-30})  # too small to change a weight
    chosen = ("fsdp full 2", "fsdp full 2, offloaded", "tp 2", "pp 2", *ZERO_BUBBLE, "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, still):
        assert verdict.difference.weights == 0 and verdict.difference.same_files, verdict


def test_wide_heads_and_longer_documents(tmp_path):
    """Attention of such goes in blocks on a CPU, and a row is longer than a chunk of the head."""
    config = toy_config("llama", 2)
    config.head_dim = 128
    said = ["please", "answer", "two", "plus", "Paris"]
    texts = [" ".join(said[(i * k) % 5] for k in range(20 + i * 3)) for i in range(24)]  # to 200 tokens
    chats, pairs = tmp_path / "long-chats.jsonl", tmp_path / "long-pairs.jsonl"
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[9:]}] for text in texts]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    compared = [{"prompt": text, "chosen": text[::-1], "rejected": text[7:]} for text in texts]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in compared))
    flags = FULL | {"max_length": 512, "max_steps": 2}
    subjects = [Subject("llama", "sft", flags | {"dataset": [str(chats)]})]
    subjects += [Subject("llama", "dpo", flags | {"dataset": [str(pairs)]}, "dpo")]
    model = write_toy(tmp_path / "wide", config)
    for verdict in in_real_processes(tmp_path, 2, ("fsdp full 2", "tp 2", "pp 2", "cp 2"), *subjects, model=model):
        assert verdict.passed and verdict.difference is not None, verdict


# bf16 has 8 bits of mantissa: sums in another order differ by up to 2^-8 in a value, much less in a mean.
BF16_LOSS, BF16_NORM = 2**-9, 2**-6


def test_bf16_layouts_differ_from_one_process_by_rounding_alone(tmp_path):
    kinds = [Subject("llama", name, flags | {"precision": "bf16"}) for name, flags in (("full", FULL), ("lora", LORA))]
    chosen = ("fsdp full 2", "ddp 2", "tp 2", "pp 2", "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *kinds):
        assert 0 < verdict.difference.loss < BF16_LOSS and verdict.difference.norm < BF16_NORM, verdict


def test_layers_in_bf16_behind_an_embedding_in_fp32(tmp_path):
    """FSDP's units compute in bf16, and what is left of the model in fp32: GPT-2's layer norms get both."""
    kind = Subject("gpt2", "full", FULL | {"precision": "bf16"})
    for verdict in in_real_processes(tmp_path, 2, ("fsdp full 2", "ddp 2"), kind):
        assert 0 < verdict.difference.loss < BF16_LOSS and verdict.difference.norm < BF16_NORM, verdict


def test_products_in_8_bits_differ_by_rounding_alone(tmp_path):
    """Weights' gradients stay in bf16 here: in 8 bits their rounding depends on which tokens a process has.

    A weight that differs in its last bit can be rounded to the next number of 8 bits, up to an eighth away.
    """
    pytest.importorskip("torchao")
    eight = Subject("llama", "fp8", FULL | {"fp8": "rowwise_with_gw_hp", "precision": "bf16", "pure_bf16": True})
    chosen = ("fsdp full 2", "fsdp full 2, recomputing", "ddp 2", "pp 2", "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, eight, changed="with_emulated_fp8"):
        assert 0 < verdict.difference.loss < BF16_LOSS and verdict.difference.norm < 2**-3, verdict


def without_reduction() -> None:
    from swiftlite.parallel.data import reduce_at_last_micro_batch
    from swiftlite.training import step

    step.reduce_at_last_micro_batch = lambda root, _is_last, kind: reduce_at_last_micro_batch(root, False, kind)


def with_local_divisor() -> None:
    from swiftlite.training import losses

    losses.supervised_loss = lambda logprobs, _tokens: -logprobs.sum() / max(1, len(logprobs))


def without_tied_sum() -> None:
    from swiftlite.parallel.pipeline import Pipeline

    Pipeline.sum_tied_gradients = lambda self: None


def with_tie_counted_twice() -> None:
    from swiftlite.training.setup import Trainee

    Trainee.uncounted = lambda self: set()


def with_a_first_rank_that_refuses() -> None:
    from swiftlite.errors import UserError
    from swiftlite.training import resume

    def refuse(config, *_arguments):
        if "reference" not in config.output_dir:
            raise UserError("this rank alone does not want to")

    resume._find_resume = refuse


def with_oneDNN() -> None:
    """No fault: every product by oneDNN, as on the processors that it is faster on, however small."""
    from swiftlite.models.kernels import products

    products.SMALLEST = 1
    products.prefers_onednn = lambda: True


def with_emulated_fp8() -> None:
    """No fault: numbers are rounded to 8 bits, and multiplied as any device can."""
    from functools import partial

    from swiftlite.models.kernels import fp8

    fp8.check_fp8 = lambda *_: None
    fp8.use_fp8 = partial(fp8.use_fp8, emulated=True)


CHANGES = {
    change.__name__: change
    for change in (
        without_reduction, with_local_divisor, without_tied_sum, with_tie_counted_twice, with_a_first_rank_that_refuses,
        with_oneDNN, with_emulated_fp8,
    )
}  # fmt: skip


def changed_process(_rank: int, change: str | None, *arguments) -> None:
    if change is not None:
        CHANGES[change]()
    verify_in_process(*arguments, show_error)


def changed_start(*arguments) -> int:
    changed_process(0, *arguments)
    return 0


@pytest.mark.parametrize(
    ("fault", "flags"),
    [
        (None, {"pipeline_parallel_size": 2}),
        ("without_reduction", {"parallel": "fsdp"}),
        ("with_local_divisor", {"parallel": "ddp"}),
        ("without_tied_sum", {"pipeline_parallel_size": 2}),
        ("with_tie_counted_twice", {"pipeline_parallel_size": 2}),
    ],
)
def test_a_fault_turns_the_matrix_red(tmp_path, fault, flags):
    models = {"llama-tied": str(write_toy(tmp_path / "model", toy_config("llama-tied")))}
    write_rows(tmp_path)
    subjects, cases = [Subject("llama-tied", "tied", {"tuner": "full"})], [Case("broken", flags)]
    run_ranks(2, changed_process, fault, str(tmp_path), models, subjects, cases)
    (verdict,) = read_verdicts(tmp_path)
    assert verdict.passed == (fault is None), verdict


def test_what_one_rank_alone_refuses_is_no_refusal(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    models = {"llama": str(write_toy(tmp_path / "model", toy_config("llama")))}
    write_rows(tmp_path)
    fault = "with_a_first_rank_that_refuses"
    arguments = (str(tmp_path), models, [Subject("llama", "one", FULL)], [Case("ddp 2", {"parallel": "ddp"})])
    with pytest.raises(SystemExit) as ended:
        start_processes(Machines(2), changed_start, fault, *arguments)
    assert ended.value.code == 2
    assert "this rank alone does not want to" in capfd.readouterr().err
    assert not read_verdicts(tmp_path)


def test_numbers_that_are_none_and_other_files_differ(tmp_path):
    rows = [{"step": step, "loss": 1.0, "grad_norm": 1.0} for step in (1, 2)]
    folders = [tmp_path / name for name in ("mine", "theirs")]
    for folder in folders:
        folder.mkdir()
        save_file({"a": torch.ones(2), "b": torch.ones(2)}, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text("{}")
    assert compare(rows, rows, *folders).agrees
    for name in ("loss", "grad_norm"):
        assert not compare([rows[0], rows[1] | {name: math.nan}], rows, *folders).agrees
    judged = [row | {"trained_tokens": 50, "token_accuracy": 0.5} for row in rows]
    for right, agrees in ((25, True), (26, True), (27, False)):  # of one token rounding may decide
        others = [judged[0], judged[1] | {"token_accuracy": right / 50}]
        assert compare(others, judged, *folders).agrees is agrees
    save_file({"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}, folders[0] / "model.safetensors")
    assert compare(rows, rows, *folders).weights == math.inf
    save_file({"a": torch.ones(2), "b": torch.tensor([1.0, 1 + 1e-6])}, folders[0] / "model.safetensors")
    assert compare(rows, rows, *folders).agrees
    (folders[0] / "tokenizer.json").unlink()
    assert not compare(rows, rows, *folders).agrees


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-a", "llamma"], "llama-tied"),
        (["-l", "nothing"], "fsdp full 2"),
        (["--nproc-per-node", "1"], "2, 4 or 8"),
        (["--method", "ppo"], "sft, dpo, rm, kto"),
    ],
)
def test_bad_words(words, said):
    done = subprocess.run([*SWIFTLITE, "verify", *words], capture_output=True, text=True, timeout=60, env=ENV)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_numbers_of_a_verdict_stand_in_one_line_each(capsys, monkeypatch):
    monkeypatch.setattr("swiftlite.cli.console.WIDTH", 60)
    found = Difference(1e-7, 2e-7, 3e-8, same_files=True, same_rest=True)
    equal = Verdict("qwen3-moe, dpo", "dp 2 x tp 2 x pp 2 zero-bubble", 12.3, found)
    command._show([equal, Verdict("llama", "tp 2", 0.0, None, "it has an odd number of heads")])
    told = capsys.readouterr().out
    assert all(text in told for text in ("1.0e-07", "2.0e-07", "3.0e-08", "12.3", "gradient norm", " equal"))


@pytest.mark.parametrize(("compared", "code"), [(False, 1), (True, 0)])
def test_refusals_alone_prove_nothing(monkeypatch, compared, code):
    refused = Verdict("llama", "tp 2", 0.0, None, "it has an odd number of heads")
    equal = Verdict("llama", "ddp 2", 1.0, Difference(0.0, 0.0, 0.0, same_files=True, same_rest=True))
    rows = "".join(json.dumps(asdict(verdict)) + "\n" for verdict in [refused, equal][: 1 + compared])
    monkeypatch.setattr(command, "_run", lambda folder, *_: (folder / VERDICTS).write_text(rows))
    with pytest.raises(SystemExit) as ended:
        main(["verify", "-a", "llama"])
    assert ended.value.code == code


def test_choices_are_taken_in_any_case(monkeypatch):
    begun = []
    monkeypatch.setattr(command, "_run", lambda *arguments: begun.append(arguments))
    words = ["-a", "LLAMA", "-a", "qwen3_MoE", "-a", "llama", "--method", "DPO", "--method", "sft", "-l", "FSDP"]
    with pytest.raises(SystemExit):
        main(["verify", *words, "-l", "TP"])
    ((_, _, models, subjects, layouts, _),) = begun
    assert list(models) == ["llama", "qwen3-moe"]
    assert [subject.name for subject in subjects].count("llama") == 1
    assert {subject.method for subject in subjects} == {"sft", "dpo"}
    assert {"fsdp full 2", "fsdp grad_op 2", "tp 2"} <= {case.name for case in layouts}


def test_where_verdicts_cannot_be_written_none_are_looked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("began"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["verify", "-a", "llama", "--json", "-"])
    assert ended.value.code == 2 and "name a file" in capsys.readouterr().err
    for report in ("~/", tmp_path, tmp_path / "v.json"):
        with pytest.raises(SystemExit) as ended:
            main(["verify", "-a", "llama", "--json", str(report)])
        assert ended.value.code == 2 and "the file cannot be written" in capsys.readouterr().err
        monkeypatch.setattr("os.access", lambda _path, mode: mode != os.W_OK)  # the tests may run as root


def test_a_difference_without_end_is_null_in_the_file(tmp_path, monkeypatch, capsys):
    """A step that one run has and the other has not, or a loss that is no number: JSON has no word for infinity."""
    verdicts = [Verdict("llama", "tp 2", 1.0, Difference(math.inf, 0.0, 0.5))]
    monkeypatch.setattr(command, "_run", lambda *_: None)
    monkeypatch.setattr("swiftlite.verification.run.read_verdicts", lambda _folder: verdicts)
    with pytest.raises(SystemExit) as ended:
        main(["verify", "-a", "llama", "--json", str(tmp_path / "v.json")])
    assert ended.value.code == 1 and "inf" in capsys.readouterr().out
    [found] = json.loads((tmp_path / "v.json").read_text(), parse_constant=pytest.fail)
    assert (found["difference"]["loss"], found["difference"]["norm"]) == (None, 0.0)


def test_a_verification_that_is_ended_keeps_what_it_found(tmp_path):
    report = tmp_path / "verdicts.json"
    words = ["verify", "--nproc-per-node", "2", "-a", "llama", "--method", "sft", "--json", str(report)]
    process = subprocess.Popen(
        [*SWIFTLITE, *words], stdout=subprocess.PIPE, text=True, env=ENV | {"OMP_NUM_THREADS": "1"}
    )
    line = next(line for line in process.stdout if line.startswith("llama: "))
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 143
    found = json.loads(report.read_text())[0]
    assert line.startswith(f"{found['subject']}: {found['case']}: equal")
