"""Shared fixtures: a small BPE trained here, random tiny models of each family, and rows to train on."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests must never reach for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from threads

import pytest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512

_TEXT = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Who are you? I am a small model that answers questions.",
    "user assistant system tool What is two plus two? It is four.",
    "Once upon a time there was a fox who jumped over a lazy dog.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
]


def build_tokenizer():
    """A byte-level BPE of 512 tokens with ChatML marks; eos is `<|im_end|>`, pad is `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


def tiny_config(family: str):
    """The config of a random tiny model of one family (hidden 64, 2 layers, vocabulary 512)."""
    import transformers as hf

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gpt2":
        return hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=512, n_embd=64, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    builders = {
        "llama": lambda: hf.LlamaConfig(**common, tie_word_embeddings=False),
        "llama-tied": lambda: hf.LlamaConfig(**common, tie_word_embeddings=True),
        "qwen2": lambda: hf.Qwen2Config(**common, tie_word_embeddings=True),
        "qwen3": lambda: hf.Qwen3Config(**common, head_dim=16, tie_word_embeddings=True),
        "mistral": lambda: hf.MistralConfig(**common, sliding_window=8),
        "gemma": lambda: hf.GemmaConfig(**common, head_dim=16),
        "gemma2": lambda: hf.Gemma2Config(**common, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **common, head_dim=16, sliding_window=8, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "qwen3-moe": lambda: hf.Qwen3MoeConfig(
            **common, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
            decoder_sparse_step=1, norm_topk_prob=True, output_router_logits=False,
        ),
    }  # fmt: skip
    return builders[family]()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A factory: family -> folder with a random tiny model in fp32 and its tokenizer, made once a session."""
    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            import torch
            from transformers import AutoModelForCausalLM

            folder = tmp_path_factory.mktemp(f"model-{family}")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config(family))
            model.float().save_pretrained(folder)
            build_tokenizer().save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture
def write_rows(tmp_path):
    """A factory: (name, rows) -> jsonl file in the test's own folder."""

    def write(name: str, rows: list[dict]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chat_rows() -> list[dict]:
    """32 short conversations of unequal length, some of several turns."""
    rows = []
    for i in range(32):
        messages = [
            {"role": "user", "content": f"What is {i} plus {i + 1}? " + "Please answer. " * (i % 5)},
            {"role": "assistant", "content": f"It is {2 * i + 1}." + " Really." * (i % 7)},
        ]
        if i % 3 == 0:
            messages += [
                {"role": "user", "content": "Who are you?"},
                {"role": "assistant", "content": "I am a small model."},
            ]
        rows.append({"messages": messages})
    return rows
