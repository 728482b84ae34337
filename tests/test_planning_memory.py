"""What layers keep for the backward pass, counted against the formula that planning uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.data.batches import collate
from swiftlite.data.order import Sequence
from swiftlite.models.attention import documents as attention
from swiftlite.models.checkpointing import kept_operations
from swiftlite.models.kernels import norms
from swiftlite.models.toys import toy_config
from swiftlite.objectives.inputs import decoder_inputs
from swiftlite.planning.choose import USABLE, Choice
from swiftlite.planning.footprint import Footprint
from swiftlite.planning.memory import Written, activation_bytes_per_token, layer_keeps
from swiftlite.training import needs
from swiftlite.training.precision import Precision

TOKENS = 64


class KeptUnderSelective(TorchDispatchMode):
    """Bytes of the results that selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self._operations, self.kept = kept_operations(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in self._operations:
            tensors = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
            self.kept += sum(x.numel() * x.element_size() for x in tensors)
        return result


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_what_selective_checkpointing_keeps(family):
    from transformers import AutoModelForCausalLM

    config = toy_config(family, 3)
    config._attn_implementation = attention.register()
    model = AutoModelForCausalLM.from_config(config).float()
    ids = np.arange(TOKENS, dtype=np.int32) % config.vocab_size
    batch = collate([[Sequence(ids, np.ones(TOKENS, dtype=np.bool_), "")]])
    with KeptUnderSelective() as counted:
        model.model(**decoder_inputs(batch))
    entering = activation_bytes_per_token(config, torch.float32, "full") * TOKENS
    expected = activation_bytes_per_token(config, torch.float32, "selective") * TOKENS
    assert counted.kept + entering == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("share", "spared", "mode"),
    [
        (1.5, False, "none"),
        (0.9, False, "selective"),
        (0.1, False, "full"),
        (0.9, True, "none"),  # cheap results are made again without checkpointing as well
        (0.1, True, "full"),
    ],
)
def test_auto_recomputes_the_least_that_fits(share, spared, mode):
    config = resolve_config("sft", model="m", dataset=["d"], max_length=128, micro_batch_size=2, compile=not spared)
    shape, precision, cpu = toy_config("llama", 8), Precision("fp32", torch.float32), torch.device("cpu")
    everything = activation_bytes_per_token(shape, torch.float32) * config.max_length
    room = 2 * share * everything
    assert needs.checkpointing_on_host(config, shape, cpu, precision, room) == mode
    split = config.model_copy(update={"pipeline_schedule": "zero-bubble", "pipeline_parallel_size": 2, "compile": True})
    assert needs.checkpointing_on_host(split, shape, cpu, precision, room) == ("none" if share > 1 else "full")


def test_the_states_of_a_share_leave_more_room():
    one = Footprint(weights=40_000, gradients=40_000, moments=80_000, gathered=0, activations=5, workspace=6)
    half = Footprint(weights=20_000, gradients=20_000, moments=40_000, gathered=0, activations=5, workspace=6)
    for held, states in ((one, 160_000), (half, 80_000)):
        assert Choice(Layout(), False, "none", held).room(10**6) == USABLE * 10**6 - states


def test_an_estimate_is_ample_where_tokens_take_less_than_half_of_the_room():
    held = Footprint(weights=40, gradients=40, moments=80, gathered=40, activations=300, workspace=25)
    choice = Choice(Layout(), False, "none", held)
    assert choice.is_ample(1001) and not choice.is_ample(999)


SIZES = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GATED, MIXTURE = {"intermediate_size": 96}, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("family", "sizes", "weights", "written"),
    [
        ("Llama", GATED, torch.bfloat16, Written()),
        ("Llama", GATED, torch.float32, Written()),
        ("Llama", GATED, torch.bfloat16, Written(fused_norms=True)),
        ("Qwen3", GATED, torch.bfloat16, Written(head_norms=True)),
        ("Qwen3", GATED, torch.bfloat16, Written(fused_norms=True, head_norms=True)),
        ("Qwen3Moe", MIXTURE, torch.bfloat16, Written(head_norms=True)),
        ("Qwen3Moe", MIXTURE, torch.bfloat16, Written(fused_norms=True, head_norms=True)),
    ],
)
def test_what_a_layer_keeps(monkeypatch, family, sizes, weights, written):
    """Counted in a forward pass of transformers' own, under autocast; copies of weights are no activations."""
    import transformers

    monkeypatch.setattr(norms, "_norm_of", lambda x, weight: norms._RmsNorm.apply)  # a GPU has one node as well

    def config(layers):
        grouped = {"experts_implementation": "grouped_mm"} if sizes is MIXTURE else {}
        kinds = {"num_hidden_layers": layers, "attn_implementation": "sdpa"}
        return getattr(transformers, f"{family}Config")(**SIZES, **sizes, **kinds, **grouped)

    def kept(layers):
        model, held = getattr(transformers, f"{family}Model")(config(layers)).to(weights), []
        if written.fused_norms:
            norms.fuse_norms(model)
        shapes, places = ({of(p) for p in model.parameters()} for of in (lambda p: tuple(p.shape), _place))
        given = shapes | {shape[::-1] for shape in shapes}  # autocast's copies, as they are and transposed
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.arange(TOKENS + 1)[None] % 64, use_cache=False)
        own = [x for x in held if tuple(x.shape) not in given and _place(x) not in places]
        return sum({_place(x): x.untyped_storage().nbytes() for x in own}.values())

    expected = 2 * layer_keeps(config(2), torch.bfloat16, hidden_dtype=weights, written=written).whole
    assert (kept(3) - kept(1)) / (TOKENS + 1) == pytest.approx(
        expected, rel=0.03 if sizes is MIXTURE else 0.015
    )  # a router keeps more than is counted


def test_experts_of_text_and_of_images_have_widths_of_their_own():
    """Those of ERNIE 4.5 VL: a token of text meets the first."""
    if not hasattr(hf, "Ernie4_5_VLMoeTextConfig"):
        pytest.skip("this release of transformers has no ERNIE 4.5 VL")
    one, other, wider = (
        layer_keeps(hf.Ernie4_5_VLMoeTextConfig(moe_intermediate_size=widths), torch.bfloat16)
        for widths in ([64, 64], [64, 32], [128, 32])
    )
    assert one == other != wider
