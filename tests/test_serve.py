"""`swiftlite serve`: the line that each engine is started with, and what is refused before one starts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swiftlite.cli.app import main
from swiftlite.errors import UserError
from swiftlite.serving import serve
from swiftlite.serving.engines import ENGINES
from swiftlite.serving.serve import ServeOptions, check_address, run_serve

ENGINE = {engine.name: engine for engine in ENGINES}
PYTHON, EXECV = sys.executable, os.execv
FAKE = """#!/bin/sh
printf '%s\\n' $$ "$@" > '{said}'
exit 7
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A factory: names -> these are all the engines there are. One that is started writes its process id and words."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "here" / "python"))
    monkeypatch.setattr(serve, "is_installed", lambda name: True)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was started"))  # in place of the tests

    def install(*names: str) -> Path:
        for name in names:
            (programs / name).write_text(FAKE.format(said=tmp_path / "said"))
            (programs / name).chmod(0o755)
        return programs

    return install


@pytest.fixture
def adapter(tmp_path, tiny_model):
    """A factory: settings -> an adapter folder on the toy Llama. own: it has a tokenizer."""

    def make(own: bool = True, base: Path | None = None, **settings) -> Path:
        folder, base = tmp_path / "mine" / "model", base or tiny_model("llama")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 12, "lora_alpha": 24, "bias": "none"}
        plain |= {"target_modules": ["q_proj"], "modules_to_save": None, "rank_pattern": {}, "use_dora": False}
        plain |= {"base_model_name_or_path": str(base), "init_lora_weights": True}
        (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
        save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
        for file in [*base.glob("tokenizer*"), *base.glob("chat_template*")] if own else ():
            shutil.copy(file, folder)
        return folder

    return make


def line(capsys, **options) -> list[str]:
    """What is run, without the path of the program's folder."""
    run_serve(ServeOptions(**options, dry_run=True))
    program, *words = shlex.split(capsys.readouterr().out)
    return [Path(program).name, *words]


AT = "127.0.0.1"
WHOLE = {
    "vllm": "vllm serve BASE --host 127.0.0.1 --port 8000 --served-model-name NAME",
    "sglang": "sglang serve --model-path BASE --host 127.0.0.1 --port 8000 --served-model-name NAME",
    "lmdeploy": "lmdeploy serve api_server BASE --server-name 127.0.0.1 --server-port 8000 --model-name NAME",
    "transformers": "transformers serve BASE --host 127.0.0.1 --port 8000",
}
ADAPTER = {
    "vllm": "vllm serve BASE --host 127.0.0.1 --port 8000 --tokenizer MINE "
    "--enable-lora --lora-modules mine=MINE --max-lora-rank 16",
    "sglang": "sglang serve --model-path BASE --host 127.0.0.1 --port 8000 --served-model-name base "
    "--tokenizer-path MINE --lora-paths mine=MINE",
    "lmdeploy": "lmdeploy serve api_server BASE --server-name 127.0.0.1 --server-port 8000 "
    "--backend pytorch --adapters mine=MINE",
}
ASKED = {
    "vllm": "--tensor-parallel-size 2 --max-model-len 99 --dtype bfloat16 --trust-remote-code",
    "sglang": "--tp-size 2 --context-length 99 --dtype bfloat16 --trust-remote-code",
    "lmdeploy": "--tp 2 --session-len 99 --dtype bfloat16 --trust-remote-code",
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_is_served_under_the_name_of_its_folder(name, installed, tiny_model, capsys):
    installed(*WHOLE)
    base = tiny_model("llama")
    wanted = [{"BASE": str(base), "NAME": base.name}.get(word, word) for word in WHOLE[name].split()]
    assert line(capsys, model=str(base), engine=name) == wanted


def test_weights_that_are_codes_are_the_engines_to_read(installed, tiny_model, tmp_path, monkeypatch, capsys):
    installed(*WHOLE)
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "codes")
    file = folder / "config.json"
    section = {"quantization_config": {"quant_method": "compressed-tensors"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | section))
    assert line(capsys, model=str(folder), engine="transformers")[-1] == "8000"
    monkeypatch.setattr(serve, "is_installed", lambda name: name != "compressed_tensors")
    assert line(capsys, model=str(folder), engine="vllm")[-1] == "codes"
    with pytest.raises(UserError, match="by the package compressed_tensors, which is not installed") as error:
        line(capsys, model=str(folder), engine="transformers")
    assert "swiftlite[compressed-tensors]" in error.value.fix


@pytest.mark.parametrize("name", ASKED)
def test_flags_are_the_engines_own(name, installed, tiny_model, capsys):
    installed(name)
    asked = {"tensor_parallel_size": 2, "max_length": 99, "precision": "bfloat16", "trust_remote_code": True}
    words = line(capsys, model=str(tiny_model("llama")), **asked, words=["--x_y", "", "--debug"])
    assert " ".join(words).endswith(f" {ASKED[name]} --x_y  --debug") and words[-3:] == ["--x_y", "", "--debug"]


@pytest.mark.parametrize("name", ADAPTER)
def test_an_adapter_is_served_beside_its_base(name, installed, adapter, tiny_model, capsys):
    installed(name)
    names = {"BASE": str(tiny_model("llama")), "MINE": str(adapter())}
    wanted = [names.get(word, word.replace("=MINE", f"={names['MINE']}")) for word in ADAPTER[name].split()]
    run = adapter().parent
    assert line(capsys, model=str(run)) == wanted
    assert line(capsys, adapter=str(run), served_name="a/b") == [word.replace("mine=", "a/b=") for word in wanted]


def test_vllm_is_told_a_rank_that_it_knows_and_no_tokenizer_but_the_adapters_own(installed, adapter, capsys):
    installed("vllm")
    for rank, pattern, told in ((1, {}, "8"), (16, {}, "16"), (8, {"q_proj": 129}, "256"), (512, {}, "512")):
        assert line(capsys, adapter=str(adapter(r=rank, rank_pattern=pattern)))[-1] == told
    assert "--tokenizer" not in line(capsys, adapter=str(adapter(own=False)))


def test_vllm_gets_a_path_with_a_comma_as_json(installed, adapter, tmp_path, capsys):
    installed("vllm")
    shutil.move(adapter(), tmp_path / "a,b")
    words = line(capsys, adapter=str(tmp_path / "a,b"))
    assert json.loads(words[words.index("--lora-modules") + 1]) == {"name": "a-b", "path": str(tmp_path / "a,b")}


def test_folders_of_odd_names(installed, adapter, tiny_model, tmp_path, monkeypatch, capsys):
    """A dash makes no flag of them, and a line to copy is of the words that it shows."""
    installed("vllm", "sglang")
    monkeypatch.chdir(tmp_path)
    base = shutil.copytree(tiny_model("llama"), tmp_path / "-my base")
    assert line(capsys, model="./-my base")[2] == str(base) and line(capsys, model="-my base")[2] == str(base)
    shutil.move(adapter(base=base), tmp_path / "-a b")
    words = line(capsys, adapter="./-a b")
    assert words[words.index("--tokenizer") + 1] == str(tmp_path / "-a b")
    shutil.move(adapter(base=base, use_rslora=True), tmp_path / "c d")
    with pytest.raises(UserError, match="rsLoRA") as refusal:
        run_serve(ServeOptions(adapter="c d", engine="sglang", dry_run=True))
    merge = shlex.split(refusal.value.fix.partition(": ")[2])
    assert merge[:7] == ["swiftlite", "export", "--model", str(base), "--adapter", "c d", "--output-dir"]
    base.rename("gone")
    with pytest.raises(UserError, match="not where it was") as refusal:
        run_serve(ServeOptions(adapter="c d", dry_run=True))
    assert shlex.split(refusal.value.fix)[-2:] == ["--adapter", "c d"]


def test_a_hub_id_keeps_its_name_and_revision(installed, capsys):
    installed(*WHOLE)
    asked = {"model": "org/some-model", "revision": "dev"}
    assert line(capsys, **asked)[2:] == [
        "org/some-model", "--host", AT, "--port", "8000", "--served-model-name", "org/some-model", "--revision", "dev"
    ]  # fmt: skip
    assert line(capsys, **asked, engine="transformers")[2] == "org/some-model@dev"


def refused(**options) -> str:
    with pytest.raises(UserError) as caught:
        run_serve(ServeOptions(**{"dry_run": True} | options))
    assert caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "engines", "said"),
    [
        ({"use_dora": True}, "vllm sglang lmdeploy", "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "vllm sglang lmdeploy", "whole modules"),
        ({"trainable_token_indices": [1]}, "vllm sglang lmdeploy", "rows of the embedding"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "vllm sglang lmdeploy", "experts"),
        ({"bias": "all"}, "vllm sglang lmdeploy", "biases"),
        ({"peft_type": "IA3"}, "vllm sglang lmdeploy", "IA3"),
        ({"use_rslora": True}, "sglang lmdeploy", "rsLoRA"),
        ({"rank_pattern": {"q_proj": 4}}, "sglang lmdeploy", "ranks of single layers"),
        ({"alpha_pattern": {"q_proj": 4}}, "sglang lmdeploy", "scales of single layers"),
        ({"layers_to_transform": [0]}, "lmdeploy", "some layers only"),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, "lmdeploy", "all layers"),
        ({"r": 513}, "vllm", "above 512"),
    ],
)
def test_what_an_engine_would_do_wrongly_with_an_adapter_is_refused(
    settings, engines, said, installed, adapter, capsys
):
    installed(*ADAPTER)
    folder = adapter(**settings)
    for name in ADAPTER:
        if name not in engines.split():
            line(capsys, adapter=str(folder), engine=name)
            continue
        message = refused(adapter=str(folder), engine=name)
        assert ENGINE[name].title in message.splitlines()[0] and said in message.splitlines()[0]
        assert f"--adapter {folder} --output-dir FOLDER" in message


def test_an_adapter_that_is_not_all_in_its_file_is_refused(installed, adapter, capsys):
    installed("sglang")
    assert "init_lora_weights pissa" in refused(adapter=str(adapter(init_lora_weights="pissa_niter_4")))
    line(capsys, adapter=str(adapter(init_lora_weights="gaussian")))


def test_transformers_takes_no_adapter_and_has_fewer_flags(installed, adapter, tiny_model):
    installed("transformers")
    assert "takes no adapters" in refused(adapter=str(adapter()))
    for option, flag in (
        ({"served_name": "x"}, "--served-name x"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"max_length": 9}, "--max-length 9"),
    ):
        assert f"has no flag for it\nwhere: {flag}\n" in refused(model=str(tiny_model("llama")), **option)


def test_transformers_is_given_no_folder_that_it_may_take_for_a_revision(installed, tiny_model, tmp_path, capsys):
    installed("vllm", "transformers")
    folder = str(shutil.copytree(tiny_model("llama"), tmp_path / "it@2"))
    assert "behind @ for a revision" in refused(model=folder, engine="transformers")
    assert line(capsys, model=folder)[-1] == "it-2"


def test_vllm_takes_no_adapter_on_gpt2(installed, adapter, tiny_model):
    installed("vllm", "sglang")
    folder = adapter(base=tiny_model("gpt2"))
    assert "of the type gpt2" in refused(adapter=str(folder))


def test_an_adapter_that_ends_answers_otherwise_is_served_with_its_ends(
    installed, adapter, tiny_model, tmp_path, capsys
):
    installed("vllm", "sglang")
    folder = adapter()
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    words = line(capsys, model=str(folder), engine="vllm")
    assert words[words.index("--generation-config") + 1] == str(folder)
    with pytest.raises(UserError, match="ends answers as the base model does") as refused:
        run_serve(ServeOptions(model=str(folder), engine="sglang", dry_run=True))
    assert "swiftlite export" in refused.value.fix
    base = shutil.copytree(tiny_model("llama"), tmp_path / "same")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 0, 1]}')
    assert "--lora-paths" in line(capsys, model=str(base), adapter=str(folder), engine="sglang")


def test_lmdeploy_takes_an_adapter_that_was_trained_with_the_bases_tokenizer(installed, adapter, capsys):
    installed("lmdeploy")
    folder = adapter()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 7}))
    line(capsys, adapter=str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    assert "another end of text" in refused(adapter=str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "another chat template" in refused(adapter=str(folder))


def test_the_first_engine_that_is_there_is_taken(installed, tiny_model, capsys, monkeypatch):
    base = str(tiny_model("llama"))
    for name in reversed(WHOLE):
        installed(name)
        assert line(capsys, model=base)[0] == name
    monkeypatch.setattr(sys, "executable", str(installed("vllm") / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert line(capsys, model=base)[0] == "vllm"  # beside this Python


def test_an_engine_that_is_not_there_is_named_with_what_to_install(installed, tiny_model, monkeypatch):
    base = str(tiny_model("llama"))
    assert "no engine is installed" in refused(model=base)
    assert "SGLang is not installed\nwhere: --engine sglang\nfix: pip install sglang" in refused(
        model=base, engine="SGLang"
    )
    assert "give auto, vllm, sglang, lmdeploy, transformers" in refused(model=base, engine="vlm")
    installed("transformers")
    monkeypatch.setattr(serve, "is_installed", lambda name: name not in ("openai", "uvicorn"))
    for engine in ("auto", "transformers"):
        message = refused(model=base, engine=engine)
        assert "transformers' own server needs uvicorn, openai" in message and "swiftlite[serve]" in message


def test_a_port_that_is_taken_is_told_before_the_engine_starts(installed, tiny_model):
    installed("vllm")
    with socket.create_server((AT, 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(model=str(tiny_model("llama")), port=port, dry_run=False)
        assert message.startswith("the port is taken") and f"--port {port + 1}" in message
    check_address(AT, port)
    check_address("localhost", port)
    with pytest.raises(UserError, match="no address of this machine"):
        check_address("192.0.2.1", port)  # of no machine, by RFC 5737


def test_models_that_cannot_be_served_are_refused(installed, tiny_model, adapter, tmp_path):
    installed("vllm")
    base = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    assert "no revisions" in refused(model=str(base), revision="main")
    assert "cannot have this name" in refused(model=str(base), served_name="a=b")
    assert "unknown precision" in refused(model=str(base), precision="int8")
    (base / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "has no tokenizer" in refused(model=str(base))
    (base / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refused(model=str(base))
    (base / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    assert "gives scores" in refused(model=str(base))
    assert "gives scores" in refused(adapter=str(adapter(task_type="SEQ_CLS")))
    installed("lmdeploy")
    assert "LMDeploy does not compute in fp32" in refused(
        model=str(tiny_model("llama")), engine="lmdeploy", precision="fp32"
    )


def test_help_names_every_flag_in_a_narrow_terminal_and_others_are_taken(installed, tiny_model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    installed("vllm")
    other = ["--tp", "2", "--served_model_name=it"]
    for words in (["--help"], ["--model", str(tiny_model("llama")), "--dry-run", *other]):
        with pytest.raises(SystemExit) as stopped:
            main(["serve", *words])
        assert stopped.value.code == 0
        told = capsys.readouterr().out
        if words == ["--help"]:
            assert "…" not in told and all(name in told for name in ("--tensor-parallel-size", "--tp.", "--served-"))
    assert "--served-model-name it --tensor-parallel-size 2" in told


def test_the_process_becomes_the_engine(installed, tiny_model, tmp_path):
    """Its own words, its exit code, and the same process, which signals reach."""
    with socket.create_server((AT, 0)) as free:
        port = str(free.getsockname()[1])
    program = f"import sys; sys.executable = {sys.executable!r}; from swiftlite.cli.app import main; main(sys.argv[1:])"
    own = ["serve", "--model", str(tiny_model("llama")), "--port", port, "--served_name", "it", "-e=vllm"]
    installed("vllm")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [PYTHON, "-c", program, *own, "--", "--enforce_eager", "--debug", "", "-o=x"],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate(timeout=60)
    number, *words = (tmp_path / "said").read_text().splitlines()
    assert process.returncode == 7 and number == str(process.pid)
    assert words[-6:] == ["--served-model-name", "it", "--enforce_eager", "--debug", "", "-o=x"]
    assert f"vLLM serves {tiny_model('llama')} as it at http://127.0.0.1:{port}/v1" in out
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions " in out and '"model": "it"' in out


@pytest.mark.parametrize(
    ("engine", "has_template", "told"),
    [
        ("vllm", True, ("/v1/chat/completions ", '"model": "mine"', '"messages"')),
        ("lmdeploy", True, ("/v1/chat/completions ", '"model": "mine"', '"messages"')),
        ("sglang", True, ("/v1/chat/completions ", '"model": "base:mine"', '"messages"')),
        ("vllm", False, ("/v1/completions ", '"model": "mine"', '"prompt"')),
    ],
)
def test_the_line_to_try_names_what_clients_ask_for(
    engine, has_template, told, installed, adapter, tiny_model, tmp_path, monkeypatch, capsys
):
    installed(engine)
    base = shutil.copytree(tiny_model("llama"), tmp_path / "base")
    if not has_template:
        (base / "chat_template.jinja").unlink()
    monkeypatch.setattr(serve, "check_address", lambda host, port: None)
    monkeypatch.setattr(os, "execv", lambda program, words: None)
    run_serve(ServeOptions(adapter=str(adapter(base=base)), host="::", port=9000))
    out = capsys.readouterr().out
    assert "curl http://[::1]:9000/v1" in out and all(words in out for words in told)


def test_an_engine_whose_python_is_gone_is_told(installed, tiny_model, monkeypatch):
    program = installed("vllm") / "vllm"
    program.write_text("#!/nowhere/python\n")
    monkeypatch.setattr(serve, "check_address", lambda host, port: None)
    monkeypatch.setattr(os, "execv", EXECV)
    assert f"vLLM cannot be started: No such file or directory\nwhere: {program}\n" in refused(
        model=str(tiny_model("llama")), dry_run=False
    )


def test_neither_torch_nor_transformers_is_imported_before_the_engine(installed, adapter):
    program = f"import sys; sys.executable = {sys.executable!r}; from swiftlite.cli import app\n"
    program += (
        "try:\n    app.main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    installed("vllm")
    words = ["serve", "--adapter", str(adapter()), "--dry-run"]
    done = subprocess.run([PYTHON, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
