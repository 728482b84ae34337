"""FLOPs of a step, against what PyTorch counts in a forward and a backward pass of the model itself."""

import pytest
import torch
from curves import family_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from swiftlite.models.anatomy import attention_windows, tokens_in_view
from swiftlite.models.toys import WINDOW, toy_config
from swiftlite.training.flops import FlopCounter

LENGTH = 40


def config_of(family: str):
    if family != "deepseek":
        return family_config(family)
    import transformers as hf

    return hf.DeepseekV3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        first_k_dense_replace=2, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral", "gemma2", "gemma3", "deepseek"])
def test_flops_are_those_of_the_model(family, frozen):
    """Eager attention computes the whole square of a document, of which a token sees less than half."""
    config = config_of(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().requires_grad_(not frozen)
    embedding = model.get_input_embeddings()
    ids = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=embedding(ids).detach().requires_grad_()).logits.sum().backward()
    seen = [tokens_in_view(LENGTH, window) for window in attention_windows(config)]
    flops = FlopCounter(model)
    squares = flops._per_pair * LENGTH * (LENGTH * len(seen) - sum(seen))
    rotary = 0.005 * counted.get_total_flops()  # angles of rotary embeddings are a product, too
    assert flops.step([LENGTH]) + squares == pytest.approx(counted.get_total_flops(), abs=rotary)


@pytest.mark.parametrize(("length", "window"), [(5, None), (40, 8), (40, 40), (40, 100), (1, 8)])
def test_tokens_in_view(length, window):
    seen = sum(min(place + 0.5, window or length) for place in range(length))  # of itself a half
    wanted = tokens_in_view(length, window) * length
    assert wanted == pytest.approx(seen, abs=0.5 * (window or length) if window and window < length else 1e-9)


def test_windows_of_layers():
    assert attention_windows(toy_config("llama", 3)) == [None] * 3
    assert attention_windows(toy_config("mistral", 2)) == [WINDOW] * 2
    assert attention_windows(toy_config("gemma3", 3)) == [WINDOW, None, WINDOW]
    assert attention_windows(toy_config("qwen3.5", 2)) == [0, None]
