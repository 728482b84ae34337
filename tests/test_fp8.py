"""Products in 8-bit floats: what is rounded is nearly what it was, and what cannot be is refused.

The numbers are rounded as on a GPU and multiplied as on any device, where torchao is installed (it is no part of the
extra `test`). The products themselves need a GPU: `scripts/gpu_check.sh`.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftlite import imports
from swiftlite.config.resolve import resolve_config
from swiftlite.data.batches import collate
from swiftlite.data.order import Sequence
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention import documents as attention
from swiftlite.models.kernels import fp8
from swiftlite.models.toys import toy_config
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.training.setup import check_model

RECIPES = ("rowwise", "rowwise_with_gw_hp")
needs_torchao = pytest.mark.skipif(not imports.is_installed("torchao"), reason="pip install 'swiftlite[fp8]'")
ROUNDING = 0.06  # the gap of two numbers with three bits behind the point is an eighth to a sixteenth of them


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = toy_config("llama")
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).train()


def gradients(model, row):
    loss = -TokenScorer(model, model)(row).logprobs.mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def row_of(model, *lengths):
    chance = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    documents = [torch.randint(vocabulary, (length,), generator=chance).numpy() for length in lengths]
    packs = [[Sequence(ids, ids >= 0, f"row {n}") for n, ids in enumerate(documents)]]
    return collate(packs).padded_to(fp8.rounded(sum(lengths), 1))


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_nearly_those_of_exact_products(model, recipe):
    rounded = copy.deepcopy(model)
    fp8.use_fp8(dissect(rounded).layers, recipe, emulated=True)
    row = row_of(model, 19, 30)
    (exact_loss, exact), (loss, found) = gradients(model, row), gradients(rounded, row)
    assert found.keys() == exact.keys()
    assert loss == pytest.approx(exact_loss, rel=1e-2) and loss != exact_loss
    for name, gradient in exact.items():
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert 0 < difference < 2 * ROUNDING, (name, difference)


@needs_torchao
def test_head_and_embedding_are_left_alone(model):
    anatomy = dissect(model)
    fp8.use_fp8(anatomy.layers, "rowwise", emulated=True)
    assert type(anatomy.head) is torch.nn.Linear
    assert {type(m).__name__ for m in anatomy.layers.modules() if isinstance(m, torch.nn.Linear)} == {"Float8Linear"}


@needs_torchao
def test_a_document_is_not_rounded_by_its_neighbours(model):
    fp8.use_fp8(dissect(model).layers, "rowwise", emulated=True)
    scorer = TokenScorer(model, model)
    scorer.check()
    with torch.no_grad():
        alone, packed = scorer(row_of(model, 20)).logprobs, scorer(row_of(model, 20, 40)).logprobs
    assert torch.allclose(packed[: len(alone)], alone, rtol=1e-4)


@needs_torchao
def test_what_is_frozen_or_has_other_sides_is_left_alone(model):
    layers = dissect(model).layers
    for module in layers[0].modules():
        module.requires_grad_(False)
    layers[1].mlp.up_proj = torch.nn.Linear(layers[1].mlp.up_proj.in_features, 24)
    fp8.use_fp8(layers, "rowwise", emulated=True)
    assert "Float8Linear" not in {type(module).__name__ for module in layers[0].modules()}
    assert type(layers[1].mlp.up_proj) is torch.nn.Linear
    with pytest.raises(UserError, match="no trained matrix"):
        fp8.use_fp8(layers, "rowwise")


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"tuner": "lora"}, "adapters", "--tuner full"),
        ({"tensor_parallel_size": 2}, "whole matrices", "--parallel fsdp"),
        ({"precision": "fp16"}, "the precision is fp16", "bf16"),
    ],
)
def test_what_contradicts_is_refused(change, words, fix):
    with pytest.raises(UserError, match=words) as error:
        resolve_config("sft", **{"model": "nowhere", "dataset": ["d"], "tuner": "full", "fp8": "rowwise"} | change)
    assert fix in error.value.fix


def test_what_cannot_have_it_is_told_so(model, monkeypatch):
    with pytest.raises(UserError, match="Hopper"):
        fp8.check_fp8(model.config, fp8.capability_of(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    fp8.check_fp8(model.config, fp8.capability_of(torch.device("cuda")))
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="count the padding"):
        fp8.check_fp8(model.config, fp8.capability_of(torch.device("cuda")))
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda name: None)
    config = resolve_config("sft", model="nowhere", dataset=["d"], tuner="full", fp8="rowwise")
    with pytest.raises(UserError, match="needs the package torchao"):
        check_model(config, None, None, None)
