"""Writes LitGPT's own checkpoint folder from a Qwen2 folder; run by the Python of LitGPT's environment.

LitGPT's converter takes known model names only, so the layout is named here and its weight mapping is called directly.
Usage: python convert_litgpt.py HF_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path


def convert(source: Path, target: Path) -> None:
    import torch
    from litgpt.config import Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_qwen_2_5
    from litgpt.utils import save_config
    from safetensors.torch import load_file

    shape = json.loads((source / "config.json").read_text())
    config = Config(
        name="bench-qwen2", block_size=shape["max_position_embeddings"], vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"], n_layer=shape["num_hidden_layers"], n_embd=shape["hidden_size"],
        n_head=shape["num_attention_heads"], n_query_groups=shape["num_key_value_heads"], rotary_percentage=1.0,
        parallel_residual=False, bias=False, attn_bias=True, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        intermediate_size=shape["intermediate_size"], norm_eps=shape["rms_norm_eps"], rope_base=10000,
    )  # fmt: skip
    weights: dict = {}
    copy_weights_qwen_2_5(config, defaultdict(dict), weights, load_file(source / "model.safetensors"))
    target.mkdir(parents=True)
    torch.save(weights, target / "lit_model.pth")
    save_config(config, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(source / name, target / name)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
