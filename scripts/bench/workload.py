"""The one workload of all tools: a random tiny Qwen2 model, its tokenizer, and 2,000 chat rows, all from one seed.

The text is made of invented words whose frequencies fall as Zipf's law says, so that the tokenizer has something to
learn and nothing has to be downloaded. Each row is one question and one answer, since LitGPT reads single turns only.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 8192
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID = 0  # LitGPT pads with 0, whatever the tokenizer says; so 0 is the padding of everyone and is in no text
SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 768, "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS, SHORTEST, LONGEST, MEDIAN, SPREAD = 2000, 22, 693, 118, 0.78  # tokens a row; spread of a log-normal
LEXICON = 12_000
SETTINGS = {"format": 3, "rows": ROWS, "median": MEDIAN, "spread": SPREAD, "lexicon": LEXICON}


class Workload:
    """Where the files of the workload lie.

    model: Hugging Face folder; chat: folder with `train.jsonl` (`messages`); llamafactory: folder with its
    `dataset_info.json`; litgpt: folder with `train.json` and `val.json`; litgpt_model: LitGPT's own checkpoint folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.chat, self.rows = folder / "model", folder / "chat", folder / "chat" / "train.jsonl"
        self.llamafactory, self.litgpt = folder / "llamafactory", folder / "litgpt"
        self.litgpt_model = folder / "litgpt-model"

    def facts(self) -> dict:
        return json.loads((self.folder / "facts.json").read_text())


def make_workload(folder: Path, seed: int, shape: Mapping[str, Any] = SHAPE) -> Workload:
    """The workload of `seed` under `folder`, made now unless it is there and made by these settings.

    shape: of the model, whose embedding may have more rows than the tokenizer has tokens.
    """
    settings = {**SETTINGS, **shape, "seed": seed}
    workload = Workload(folder)
    facts = folder / "facts.json"
    if facts.is_file() and json.loads(facts.read_text())["settings"] == settings:
        return workload
    shutil.rmtree(folder, ignore_errors=True)
    for part in (workload.model, workload.chat, workload.llamafactory, workload.litgpt):
        part.mkdir(parents=True)
    words = Words(seed)
    tokenizer = train_tokenizer(words)
    write_model(workload.model, tokenizer, seed, shape)
    rows, lengths = make_rows(words, tokenizer, seed)
    write_rows(workload, rows)
    described = {
        "rows": len(rows), "tokens": sum(lengths), "shortest": min(lengths), "median": statistics.median(lengths),
        "mean": round(statistics.mean(lengths), 1), "longest": max(lengths),
    }  # fmt: skip
    facts.write_text(json.dumps({"settings": settings, "described": described}))
    return workload


class Words:
    """An endless stream of sentences of invented words."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        starts = ["", *"bdfgklmnprstv", "br", "dr", "gl", "pl", "st", "tr"]
        middles, ends = [*"aeiou", "ai", "ou"], ["", *"nrsltm", "nd"]
        found: dict[str, None] = {}
        while len(found) < LEXICON:
            parts = self._random.choices([1, 2, 3, 4], [2, 5, 4, 1])[0]
            found["".join(self._syllable(starts, middles, ends) for _ in range(parts))] = None
        self._words = list(found)
        weights = [1 / (rank + 10) for rank in range(LEXICON)]  # Zipf-Mandelbrot
        self._cumulative = [sum(weights[:1])]
        for weight in weights[1:]:
            self._cumulative.append(self._cumulative[-1] + weight)

    def _syllable(self, starts: list[str], middles: list[str], ends: list[str]) -> str:
        return self._random.choice(starts) + self._random.choice(middles) + self._random.choice(ends)

    def pieces(self, mark: str) -> Iterator[str]:
        """Sentences that end in `mark`, as pieces that the tokenizer never joins: words with their space, and marks."""
        first = True
        while True:
            sentence = self._random.choices(self._words, cum_weights=self._cumulative, k=self._random.randint(5, 16))
            sentence[0] = sentence[0].capitalize()
            for word in sentence:
                yield word if first else f" {word}"
                first = False
            yield mark


def train_tokenizer(words: Words):
    """A byte-level BPE of exactly VOCABULARY tokens, special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )  # fmt: skip
    stream = words.pieces(".")
    text = ["user\nassistant\n" + "".join(next(stream) for _ in range(200)) for _ in range(1500)]
    tokenizer.train_from_iterator(text, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}: too little text")
    return tokenizer


def piece_budget(words: Words, tokenizer) -> Callable[[str, int], tuple[str, int]]:
    """A function of (mark, budget): sentences that end in `mark` with at most `budget` tokens, and how many."""
    sizes: dict[str, int] = {}

    def text(mark: str, budget: int) -> tuple[str, int]:
        pieces, used = [], 0
        for piece in words.pieces(mark):
            if piece not in sizes:
                sizes[piece] = len(tokenizer.encode(piece).ids)
            if used + sizes[piece] > budget and pieces:
                return "".join(pieces), used
            pieces.append(piece)
            used += sizes[piece]
        raise AssertionError("the stream of words is endless")

    return text


def make_rows(words: Words, tokenizer, seed: int) -> tuple[list[dict], list[int]]:
    """(rows with `question` and `answer`, tokens of each row with the chat template's)."""
    chance = random.Random(seed + 1)
    text = piece_budget(words, tokenizer)
    frame = f"{START}user\n{END}\n{START}assistant\n{END}\n"
    overhead = len(tokenizer.encode(frame).ids)
    rows, lengths = [], []
    for _ in range(ROWS):
        length = round(math.exp(chance.gauss(math.log(MEDIAN), SPREAD)))
        content = min(max(length, SHORTEST), LONGEST) - overhead
        question, asked = text("?", max(3, round(content * chance.uniform(0.15, 0.35))))
        answer, answered = text(".", max(3, content - asked))
        rows.append({"question": question, "answer": answer})
        lengths.append(overhead + asked + answered)
    return rows, lengths


def write_rows(workload: Workload, rows: list[dict]) -> None:
    """The same rows in the form that each tool reads."""
    with workload.rows.open("w") as file:
        for row in rows:
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    information = {
        "bench": {
            "file_name": str(workload.rows.resolve()), "formatting": "sharegpt", "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        }
    }  # fmt: skip
    (workload.llamafactory / "dataset_info.json").write_text(json.dumps(information))
    alpaca = [{"instruction": row["question"], "output": row["answer"]} for row in rows]
    (workload.litgpt / "train.json").write_text(json.dumps(alpaca))
    (workload.litgpt / "val.json").write_text(json.dumps(alpaca[:4]))  # LitGPT insists on a validation set


def write_model(folder: Path, tokenizer, seed: int, shape: Mapping[str, Any] = SHAPE) -> None:
    """A Qwen2 folder as `save_pretrained` would write it: random fp32 weights with a spread of 0.02, tied head."""
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    weights = {"model.embed_tokens.weight": (shape["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.input_layernorm.weight": (hidden,), f"{name}.post_attention_layernorm.weight": (hidden,)}
        for part, rows in (("q", hidden), ("k", keys), ("v", keys)):
            weights |= {f"{name}.self_attn.{part}_proj.weight": (rows, hidden),
                        f"{name}.self_attn.{part}_proj.bias": (rows,)}  # fmt: skip
        weights |= {
            f"{name}.self_attn.o_proj.weight": (hidden, hidden), f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden), f"{name}.mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    tensors = {}
    for name, extent in weights.items():
        if name.endswith("norm.weight"):
            tensors[name] = np.ones(extent, np.float32)
        elif name.endswith("bias"):
            tensors[name] = np.zeros(extent, np.float32)
        else:
            tensors[name] = generator.normal(0, 0.02, extent).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token_id": None, "eos_token_id": tokenizer.token_to_id(END), "pad_token_id": PAD_ID}
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "dtype": "float32",
        "tie_word_embeddings": True, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "use_sliding_window": False, **shape, **special,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(special))
    write_tokenizer(folder, tokenizer)


def write_tokenizer(folder: Path, tokenizer) -> None:
    """The tokenizer's files with the chat template, as a model folder holds them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1_000_000,
        "eos_token": END, "pad_token": PAD, "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
