"""`--router-aux-loss-coef`: against plain PyTorch and a model whose config.json says the same, saved, and refused."""

import json
import math
import shutil

import pytest
import torch
import transformers as hf
from test_attention import lay_out
from test_parity import metrics, planned_rows, render_chat, settings, train_alone
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.anatomy import balances_router, with_router_loss
from swiftlite.models.attention import documents as attention
from swiftlite.models.toys import toy_config
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.serving.generate import Answerer, Sampling
from swiftlite.training import setup

WEIGHT = 0.3


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    data = write_rows("rows.jsonl", chat_rows)
    return settings(tmp_path, tiny_model("qwen3-moe"), data, packing=False, max_steps=2)


def train(base, out, **more):
    """(metrics, the saved config.json)."""
    train_alone(resolve_config("sft", **base | {"output_dir": str(out)} | more))
    return metrics(out), json.loads((out / "model" / "config.json").read_text())


def routed_model(base, tmp_path, **said):
    """The same model, of which config.json says more."""
    folder = tmp_path / "routed"
    shutil.copytree(base["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    return str(folder)


def test_the_loss_of_routers_equals_plain_pytorch(base, tmp_path, chat_rows):
    (row, *_), _ = train(base, tmp_path / "out", router_aux_loss_coef=WEIGHT)
    model = AutoModelForCausalLM.from_pretrained(base["model"], dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(base["model"])
    rows = next(planned_rows(resolve_config("sft", **base)))
    documents = [render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows]
    count, total, routers = sum(sum(trained[1:]) for _, trained in documents), torch.zeros(()), torch.zeros(())
    for ids, trained in documents:
        found = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False)
        logprobs = found.logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        total = total - (logprobs * torch.tensor(trained[1:])).sum() / count
        routers = routers + WEIGHT * found.aux_loss / len(documents)
    (total + routers).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))
    assert row["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert row["router_loss"] == pytest.approx(routers.item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_routers_of_a_model_that_takes_images_too_are_balanced():
    """Whose class has the numbers of its mixture in the config of its text."""
    text = toy_config("qwen3-moe").to_dict() | {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]
    }}  # fmt: skip
    sizes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = hf.Qwen3VLMoeConfig(text_config=text, vision_config=sizes | {"deepstack_visual_indexes": [0]})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        with_router_loss(config, WEIGHT), attn_implementation=attention.register()
    ).float()
    scorer, document = TokenScorer(model, model), torch.randint(3, 500, (17,))
    scorer.check()
    found = scorer(lay_out([document])).router_loss
    model.set_attn_implementation("eager")
    expected = WEIGHT * model(input_ids=document[None], output_router_logits=True, use_cache=False).aux_loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-5) and found.item() > 0


def test_the_flag_says_what_a_config_may_say(base, tmp_path):
    said = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
    routed = base | {"model": routed_model(base, tmp_path, **said)}
    plain, _ = train(base, tmp_path / "plain")
    by_config, saved = train(routed, tmp_path / "config")
    assert said.items() <= saved.items()
    by_flag, saved = train(base, tmp_path / "flag", router_aux_loss_coef=WEIGHT)
    assert (saved["output_router_logits"], saved["router_aux_loss_coef"]) == (False, WEIGHT)
    off, saved = train(routed, tmp_path / "off", router_aux_loss_coef=0.0)
    assert (saved["output_router_logits"], saved["router_aux_loss_coef"]) == (True, 0.0)
    for mine, theirs in ((by_flag, by_config), (off, plain)):
        for name in ("loss", "grad_norm", "router_loss"):
            assert [row.get(name) for row in mine] == [row.get(name) for row in theirs]
    assert by_flag[0]["grad_norm"] != plain[0]["grad_norm"] and "router_loss" not in plain[0]


def test_a_mixture_answers_without_it(base, tmp_path):
    """In a run that balances its routers, where the answers are those of one that does not, and in inference."""
    asked = {"reward": ["contains"], "samples": 2, "max_new_tokens": 6, "minibatches": 2, "max_steps": 1}
    said = []
    for weight in (0.0, WEIGHT):
        out = tmp_path / f"out-{weight}"
        train_alone(resolve_config("grpo", **base | asked | {"output_dir": str(out), "router_aux_loss_coef": weight}))
        said.append((out / "answers.jsonl").read_text())
    assert said[0] == said[1]
    model = AutoModelForCausalLM.from_pretrained(routed_model(base, tmp_path, output_router_logits=True)).eval()
    answerer = Answerer(model, AutoTokenizer.from_pretrained(base["model"]), Sampling(max_new_tokens=4))
    assert len(answerer.answer([[5, 6, 7], [5, 6]])) == 2


def test_models_without_such_a_loss_are_refused_before_weights_load(base, tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(setup, "build_base", lambda *_: pytest.fail("went on"))
    with pytest.raises(UserError, match="llama is no mixture of experts") as error:
        train(base | {"model": str(tiny_model("llama"))}, tmp_path / "out", router_aux_loss_coef=WEIGHT)
    assert error.value.where == "--router-aux-loss-coef 0.3"
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="deepseek_v3 has no such loss in transformers"):
        with_router_loss(hf.DeepseekV3Config(), WEIGHT)
    with pytest.raises(UserError, match="rm trains a model that gives scores"):
        resolve_config("rm", model="a/b", dataset=["c/d"], router_aux_loss_coef=WEIGHT)


def test_what_is_given_stays_as_it_is():
    dense, mixture = toy_config("llama"), toy_config("qwen3-moe")
    for weight in (None, 0.0):
        assert with_router_loss(dense, weight).to_dict() == dense.to_dict()
    before = mixture.to_dict()
    assert balances_router(with_router_loss(mixture, WEIGHT)) and mixture.to_dict() == before
