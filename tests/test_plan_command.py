"""The command `swiftlite plan`: what it shows, what it refuses, and the command that it ends in."""

import json
import shlex
from pathlib import Path

import pytest
from model_shapes import real_config

from swiftlite.cli.app import main
from swiftlite.config.resolve import resolve
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.models.toys import toy_config, write_toy

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def shape(tmp_path):
    """A folder with the config of Llama 8B and nothing else."""
    real_config(LLAMA).save_pretrained(tmp_path / "shape")
    return tmp_path / "shape"


def plan(capsys, *words):
    """(exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, words)])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_a_plan_ends_in_the_command_that_trains(capsys, shape):
    code, out, _ = plan(
        capsys, "--model", shape, "--tuner", "full", "--max_length", 4096, "--device", "h100", "--nproc-per-node", 8
    )
    assert code == 0 and "8,030,261,248 parameters" in out and "H100" in out
    words = shlex.split(out.rstrip().splitlines()[-1])
    assert words[:2] == ["swiftlite", "sft"] and "--dry-run" not in words
    assert {"--nproc-per-node", "--max-length", "--parallel", "fsdp", "--sharding"} <= set(words)
    with pytest.raises(SystemExit) as ended:
        main([*words[1:], "--dry-run"])
    assert not ended.value.code
    assert "1 x 1 x 8 x 1 x 1" in capsys.readouterr().out


def test_a_plan_says_how_many_devices_it_takes(capsys, shape):
    code, out, _ = plan(capsys, "--model", shape, "--tuner", "full", "--device", "h100")
    devices = [line.split()[0] for line in out.splitlines() if " GiB " in line and line[1:2].isdigit()]
    assert code == 0 and devices == ["1", "2", "4", "8"] and out.count("too large") == 2
    assert "--nproc-per-node 4" in out
    code, out, _ = plan(capsys, "--model", shape, "--device", "h100", "--tuner", "lora")
    assert code == 0 and "--nproc-per-node" not in out.splitlines()[-1]


def test_what_fits_nowhere_and_what_is_wrong_is_told(capsys, shape):
    code, out, err = plan(capsys, "--model", shape, "--tuner", "full", "--device", "l4", "--nproc-per-node", 2)
    assert code == 2 and "too large" in out
    assert "nothing fits: the nearest needs" in err and "--tuner lora" in err and "Traceback" not in err
    code, _, err = plan(
        capsys, "--model", shape, "--tuner", "full", "--device", "l4", "--nproc-per-node", 2, "--from-scratch"
    )
    assert code == 2 and "nothing fits" in err and "lora" not in err
    code, _, err = plan(capsys, "--model", shape, "--device", "h1000")
    assert code == 2 and "nothing is known of a device 'h1000'" in err and "h200-nvl" in err
    code, _, err = plan(capsys, "--model", shape, "--device-memory", "much", "--device", "h100")
    assert code == 2 and "--device-memory" in err
    code, _, err = plan(capsys, "--model", shape, "--device", "h100", "--tp", 64, "--nproc-per-node", 64)
    assert code == 2 and "32 attention heads do not divide by 64" in err
    code, _, err = plan(capsys, "--model", shape / "none", "--device", "h100")
    assert code == 2 and "neither a folder nor a hub id" in err


@pytest.mark.parametrize("words", [("--link", -5), ("--network", "nan"), ("--link", "inf"), ("--network", 1e-320)])
def test_links_have_a_speed(capsys, shape, words):
    code, _, err = plan(capsys, "--model", shape, "--device", "h100", *words)
    assert code == 2 and err.startswith(f"error: {words[0]} is ")


@pytest.mark.parametrize(("flag", "size", "least"), [("--mesh", "2x4", "8"), ("--pp", 3, "3"), ("--tp", 2, "2")])
def test_sizes_that_are_given_say_how_many_devices_it_takes(capsys, shape, flag, size, least):
    code, out, _ = plan(capsys, "--model", shape, "--device", "h100", flag, size)
    devices = [line.split()[0] for line in out.splitlines() if " GiB " in line and line[1:2].isdigit()]
    assert code == 0 and devices[0] == least
    assert f"--nproc-per-node {least}" in out.splitlines()[-1]


def test_a_size_that_no_number_of_devices_makes_right(capsys, shape):
    code, _, err = plan(capsys, "--model", shape, "--device", "h100", "--tp", 3)
    assert code == 2 and "32 attention heads do not divide by 3" in err


def test_what_training_refuses_of_a_config_is_refused(capsys, shape):
    code, _, err = plan(capsys, "--model", shape, "--device", "h100", "--max-length", 200_000)
    assert code == 2 and "131072 positions" in err
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    code, _, err = plan(capsys, "--model", shape, "--device", "h100")
    assert code == 2 and "weights are quantized (gptq)" in err


def test_ranks_of_a_row_are_named_as_those_that_share_weights(capsys, shape):
    code, out, _ = plan(capsys, "--model", shape, "--device", "h100", "--cp", 2, "--nproc-per-node", 4)
    assert code == 0 and "cp 2, fsdp 2, replicas 2" in out and "cp 2, fsdp full 4" in out


def test_what_some_layouts_cannot_be_is_said_once(capsys, shape):
    config = real_config("Qwen/Qwen2.5-7B-Instruct")
    config.save_pretrained(shape)
    code, out, _ = plan(capsys, "--model", shape, "--device", "a100", "--nproc-per-node", 8)
    assert code == 0 and out.count("28 attention heads do not divide by 8") == 1


def test_a_batch_is_for_the_layouts_that_can_share_it(capsys, shape):
    words = ["--model", shape, "--device", "h100", "--tuner", "full", "--nproc-per-node", 8]
    code, out, _ = plan(capsys, *words, "--global-batch-size", 4)
    table, refused = out.split("\nRefused\n")
    assert code == 0 and "tp 2, fsdp full 4" in table and " fsdp full 8" not in table
    assert "--global-batch-size 4 is not a multiple of micro-batch 1 x 8 data ranks = 8" in refused
    assert "--global-batch-size 4" in out.splitlines()[-1] and "--tensor-parallel-size 2" in out.splitlines()[-1]
    code, _, err = plan(capsys, *words, "--global-batch-size", 4, "--parallel", "fsdp", "--tp", 1, "--pp", 1, "--cp", 1)
    assert code == 2 and "is not a multiple of micro-batch 1 x 8 data ranks" in err
    sizes = {"global_batch_size": 4, "nproc_per_node": 8, "model": str(shape)}
    with pytest.raises(UserError, match="8 data ranks"):
        resolve("sft", {name: Given(size, name, "flag") for name, size in sizes.items()}, env={}, needs_rows=False)


def test_what_many_layouts_cannot_be_is_said_once(capsys, shape):
    code, out, _ = plan(capsys, "--model", shape, "--device", "h100", "--nproc-per-node", 8, "--mesh", "2x4")
    refused = out.split("\nRefused\n")[1].split("\n\n")[0].splitlines()
    assert code == 0 and len(refused) == 1 and "--mesh 2x4 needs 8 data ranks, but there are 4" in refused[0]


@pytest.mark.parametrize(("device", "code"), [("a100", 2), ("a10", 2), ("cpu", 2), ("l4", 0), ("h100", 0), ("b200", 0)])
def test_8_bit_products_are_planned_where_they_train(capsys, shape, device, code):
    small = real_config("Qwen/Qwen2.5-0.5B-Instruct")
    small.save_pretrained(shape)
    words = ["--model", shape, "--device", device, "--device-memory", "80GB", "--tuner", "full", "--nproc-per-node", 1]
    found, out, err = plan(capsys, *words, "--fp8", "rowwise")
    assert found == code and ("Ada or Hopper" in err) == bool(code)
    assert ("--fp8 rowwise" in out.splitlines()[-1]) if not code else "start it" not in out


def test_8_bit_products_that_a_model_cannot_have(capsys, shape):
    words = ["--model", shape, "--device", "h100", "--tuner", "full", "--fp8", "rowwise"]
    real_config("Qwen/Qwen3-30B-A3B").save_pretrained(shape)
    config = json.loads((shape / "config.json").read_text())
    for said, flags in (({}, ["--router-aux-loss-coef", "0.1"]), ({"output_router_logits": True}, [])):
        (shape / "config.json").write_text(json.dumps(config | said))
        code, _, err = plan(capsys, *words, *flags)
        assert code == 2 and "a router that is balanced" in err
    odd = {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 18}
    config = real_config(LLAMA).to_dict() | odd | {"intermediate_size": 100, "num_hidden_layers": 2}
    (shape / "config.json").write_text(json.dumps(config))
    code, _, err = plan(capsys, *words)
    assert code == 2 and "no trained matrix of the layers has sides that are multiples of 16" in err
    code, _, err = plan(capsys, *words, "--tp", 2)
    assert code == 2 and "--fp8 takes whole matrices" in err


def test_a_plan_for_programs(capsys, shape, tmp_path):
    words = ["--model", shape, "--device", "h100", "--tuner", "full", "--nproc-per-node", 8, "--global-batch-size", 4]
    code, out, err = plan(capsys, *words, "--rows", 1, "--json", "-")
    found = json.loads(out)
    assert code == 0 and err.rstrip().endswith(shlex.join(found["command"]))
    assert found["device"]["name"] == "H100" and found["device"]["memory"] == 80e9
    assert found["model"] == {"name": str(shape), "parameters": 8_030_261_248, "trained": 8_030_261_248} | {
        "precision": "bf16"
    }
    best = found["proposals"][0]
    assert len(found["proposals"]) > 8 and best["fits"] and best["flags"]["tensor_parallel_size"] == 2
    assert best["layout"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2} | {
        "expert_parallel": 1, "sharding": "full"
    }  # fmt: skip
    parts = ("weights", "gradients", "moments", "gathered", "activations", "workspace")
    assert best["memory"]["total"] == pytest.approx(sum(best["memory"][part] for part in parts))
    assert best["memory"]["weights"] == pytest.approx(4 * 8_030_261_248 / 8, rel=0.01)
    assert best["memory"]["limit"] == 0.85 * 80e9 and not all(one["fits"] for one in found["proposals"])
    seconds = best["seconds"]
    assert seconds["total"] == pytest.approx(seconds["arithmetic"] + seconds["idle"] + seconds["messages"])
    assert best["tokens_per_second"] == pytest.approx(best["tokens"] / seconds["total"])
    assert "8 data ranks = 8" in found["refused"][0]["what"] and found["refused"][0]["fix"]
    file = tmp_path / "plan.json"
    if Path("/dev/full").exists():  # a disk that fills up on the way
        code, _, err = plan(capsys, *words, "--json", "/dev/full")
        assert code == 1 and "error: the file cannot be written: No space left" in err and "--json /dev/full" in err
    code, out, _ = plan(capsys, *words, "--json", file)
    assert code == 0 and json.loads(file.read_text()) == found and "The best one" in out


def test_a_plan_for_programs_that_fits_nowhere_or_cannot_be_written(capsys, shape, tmp_path):
    words = ["--model", shape, "--device", "l4", "--tuner", "full", "--nproc-per-node", 2]
    code, out, err = plan(capsys, *words, "--json", "-")
    assert code == 2 and json.loads(out)["command"] is None and "nothing fits" in err
    code, out, err = plan(capsys, *words, "--json", tmp_path / "none" / "plan.json")
    assert code == 2 and "there is no such folder" in err and "Layouts" not in out


def test_a_plan_for_the_machine_at_hand(capsys, tmp_path):
    write_toy(tmp_path / "toy", toy_config("llama", 2))
    code, out, _ = plan(capsys, "--model", tmp_path / "toy", "--device", "cpu", "--device-memory", "4GB")
    assert code == 0 and "CPU of this machine, 3.73 GiB" in out


def test_a_plan_needs_a_model(capsys):
    code, _, err = plan(capsys)
    assert code == 2 and "no model is named" in err
    with pytest.raises(UserError, match="no data set is named"):
        resolve("sft", {"model": Given("m", "--model", "flag")}, env={})
