"""Loss and gradient norm of swiftlite's training step against plain PyTorch, on one device, for several families.

The reference runs Hugging Face's own forward in fp32 with eager attention, one document at a time. swiftlite runs all
documents packed, in fp32 and in bf16, as one micro-batch and as two. Small random models; some seconds a family.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 1024
LENGTHS, ALIKE = (5, 130, 64, 1, 33, 257), (256, 256, 256)  # which have a kernel of their own
UNTRAINED = 2  # first tokens of each document: the prompt
# Relative differences that rounding explains: fp32 sums in another order; bf16 has 8 bits of mantissa.
TOLERANCE = {"fp32": (1e-5, 1e-4), "bf16": (2e-4, 1e-2)}


@dataclass(frozen=True)
class Comparison:
    """Relative differences of one family in one precision. rows: what of."""

    family: str
    precision: str
    rows: str
    loss: float
    grad_norm: float

    @property
    def good(self) -> bool:
        loss, norm = TOLERANCE[self.precision]
        return self.loss <= loss and self.grad_norm <= norm


def family_configs() -> dict[str, object]:
    """family -> config of a small model; among them are windows, soft caps, sinks, experts and learned positions."""
    import transformers as hf

    common = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return {
        "llama": hf.LlamaConfig(**common),
        "qwen3": hf.Qwen3Config(**common, head_dim=64, tie_word_embeddings=True),
        "mistral": hf.MistralConfig(**common, sliding_window=48),
        "gemma2": hf.Gemma2Config(**common, head_dim=64, sliding_window=48),
        "qwen3-moe": hf.Qwen3MoeConfig(
            **common, head_dim=64, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
            output_router_logits=False,
        ),
        "gpt-oss": hf.GptOssConfig(
            **common, head_dim=64, sliding_window=48, num_local_experts=4, num_experts_per_tok=2,
        ),
        "gpt2": hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=1024, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=2, eos_token_id=2,
        ),
    }  # fmt: skip


def compare_all(device_name: str) -> list[Comparison]:
    """Every family in both precisions. Two micro-batches are run in fp32 only: rounding differs in bf16."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(device_name)
    found = []
    for family, config in family_configs().items():
        state = _random_state(config)
        for lengths, ways in ((LENGTHS, (("fp32", 1), ("fp32", 2), ("bf16", 1))), (ALIKE, (("bf16", 1),))):
            documents = _documents(lengths)
            wanted = _plain(config, state, documents, device)
            for precision, pieces in ways:
                got = _swiftlite(config, state, documents, device, precision, pieces)
                differences = [abs(ours - plain) / abs(plain) for ours, plain in zip(got, wanted, strict=True)]
                rows = "of one length" if lengths is ALIKE else "in two micro-batches" if pieces == 2 else "packed"
                found.append(Comparison(family, precision, rows, *differences))
    return found


def _documents(lengths: tuple[int, ...]) -> list:
    import torch

    torch.manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,)) for length in lengths]


def _random_state(config) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()


def _build(config, state: dict, device, attention: str):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.load_state_dict(state)
    return model.to(device).train()


def _norm(model) -> float:
    return sum(p.grad.double().pow(2).sum().item() for p in model.parameters() if p.grad is not None) ** 0.5


def _plain(config, state: dict, documents: list, device) -> tuple[float, float]:
    import torch

    model = _build(config, state, device, "eager")
    trained = sum(max(0, len(document) - UNTRAINED) for document in documents)
    total = torch.zeros((), device=device)
    for document in documents:
        ids = document.to(device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, UNTRAINED - 1 : -1].float()
        total = total + torch.nn.functional.cross_entropy(logits, ids[UNTRAINED:], reduction="sum") / trained
    total.backward()
    return total.item(), _norm(model)


def _swiftlite(config, state: dict, documents: list, device, precision_name: str, pieces: int) -> tuple[float, float]:
    import numpy as np

    from swiftlite.config.layout import Layout
    from swiftlite.data.batches import collate
    from swiftlite.data.order import Sequence
    from swiftlite.models.attention import documents as attention
    from swiftlite.objectives.scorer import TokenScorer
    from swiftlite.parallel.mesh import Mesh
    from swiftlite.training.losses import TokenLoss
    from swiftlite.training.precision import resolve_precision
    from swiftlite.training.step import DirectStep

    model = _build(config, state, device, attention.register())
    precision = resolve_precision(precision_name, device)
    sequences = [
        Sequence(document.numpy().astype(np.int32), np.arange(len(document)) >= UNTRAINED, f"document {index}")
        for index, document in enumerate(documents)
    ]
    size = -(-len(sequences) // pieces)
    batches = [collate([sequences[start : start + size]]) for start in range(0, len(sequences), size)]
    scale = precision.loss_scale().value
    step = DirectStep(TokenScorer(model, model), precision, Mesh(Layout(), device), seed=0)
    loss = TokenLoss(sum(batch.trained_tokens for batch in batches))
    outcome = step.train(1, batches, loss, scale, len(batches))
    return outcome.loss, _norm(model) / scale


def report(comparisons: list[Comparison]) -> list[list[str]]:
    """Rows for a table: family, precision, micro-batches, relative differences, verdict."""
    return [
        [c.family, c.precision, c.rows, f"{c.loss:.1e}", f"{c.grad_norm:.1e}", "ok" if c.good else "WRONG"]
        for c in comparisons
    ]
