"""Toy models: each architecture at a width that trains in milliseconds, and a tokenizer to go with them.

`swiftlite verify` and the tests train them; nothing of them is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.models.tokenizer import CHATML
from swiftlite.quick_imports import quick_imports

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

VOCABULARY = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Who are you? I am a small model that answers questions.",
    "user assistant system tool What is two plus two? It is four.",
    "Once upon a time there was a fox who jumped over a lazy dog.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
]
WINDOW = 8  # of sliding attention: shorter than the documents


def _llama_like(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def _kinds(layers: int) -> list[str]:
    return ["sliding_attention" if place % 2 == 0 else "full_attention" for place in range(layers)]


def _hybrid(layers: int) -> list[str]:
    return ["linear_attention" if place % 2 == 0 else "full_attention" for place in range(layers)]


def _builders(layers: int) -> dict[str, Callable[[], PretrainedConfig]]:
    with quick_imports():
        import transformers as hf

    common, heads = _llama_like(layers), {"head_dim": 16}
    window = {"sliding_window": WINDOW}
    return {
        "llama": lambda: hf.LlamaConfig(**common, tie_word_embeddings=False),
        "llama-tied": lambda: hf.LlamaConfig(**common, tie_word_embeddings=True),
        "qwen2": lambda: hf.Qwen2Config(**common, tie_word_embeddings=True),
        "qwen3": lambda: hf.Qwen3Config(**common, **heads, tie_word_embeddings=True),
        "mistral": lambda: hf.MistralConfig(**common, **window),
        "gemma": lambda: hf.GemmaConfig(**common, **heads),
        "gemma2": lambda: hf.Gemma2Config(**common, **heads, **window, query_pre_attn_scalar=16),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **common, **heads, **window, query_pre_attn_scalar=16, layer_types=_kinds(layers)
        ),
        "qwen3-moe": lambda: hf.Qwen3MoeConfig(
            **common, **heads, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
            norm_topk_prob=True, output_router_logits=False,
        ),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=512, n_embd=64, n_layer=layers, n_head=4, bos_token_id=2,
            eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        # Documents of those below have rows of their own.
        "qwen3.5": lambda: hf.Qwen3_5TextConfig(
            **common, **heads, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=16, layer_types=_hybrid(layers),
        ),
        "mamba2": lambda: hf.Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=layers, state_size=16, num_heads=8, head_dim=16,
            n_groups=2, chunk_size=32, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        ),
        "falcon": lambda: hf.FalconConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, bos_token_id=None,
            eos_token_id=2, pad_token_id=0, hidden_dropout=0.0, attention_dropout=0.0,
        ),
    }  # fmt: skip


def toy_config(architecture: str, layers: int = 2) -> PretrainedConfig:
    """Hidden size 64, 4 heads, 512 tokens. Raises KeyError for an architecture that has no toy."""
    return _builders(layers)[architecture]()


def shallow_config(model: str, layers: int) -> PretrainedConfig:
    """The config of a model with fewer layers, everything else in its real size. Raises UserError."""
    from swiftlite.models.anatomy import check_trainable_architecture, keep_layers
    from swiftlite.models.load import load_config

    config = load_config(model)
    check_trainable_architecture(config)
    text = config.get_text_config()
    keep_layers(text, range(min(text.num_hidden_layers, layers)))
    return config


def toy_architectures() -> list[str]:
    return list(_builders(2))


def toy_tokenizer() -> PreTrainedTokenizerBase:
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
    backend.train_from_iterator(TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def toy_rows(count: int) -> list[dict[str, Any]]:
    """Short conversations of unequal length, some of several turns, to train them on."""
    rows = []
    for i in range(count):
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


def toy_pairs(count: int) -> list[dict[str, Any]]:
    """Preference pairs: right and wrong answers of unequal length."""
    return [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:2],
            "rejected": [{"role": "assistant", "content": f"I think {2 * i + 4}." + " No." * (i % 3)}],
        }
        for i, row in enumerate(toy_rows(count))
    ]


def toy_judged(count: int) -> list[dict[str, Any]]:
    """Single answers, every other one of them wrong, labelled so."""
    return [
        {"prompt": pair["prompt"], "completion": pair["rejected" if i % 2 else "chosen"], "label": i % 2 == 0}
        for i, pair in enumerate(toy_pairs(count))
    ]


def write_toy(folder: Path, config: PretrainedConfig) -> Path:
    """A folder with a random fp32 model of this config and the toy tokenizer. Returns the folder."""
    import torch
    from transformers.utils import logging as hf_logging

    from swiftlite.models.architecture import auto_class

    hf_logging.disable_progress_bar()
    torch.manual_seed(0)
    auto_class(config, classifier=False).from_config(config).float().save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder
