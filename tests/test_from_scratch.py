"""`--from-scratch`: what random weights are, that they are the same in every layout, and runs from them."""

import json
import math
import shutil

import pytest
import torch
import yaml
from test_parity import metrics, settings, train_alone
from test_verify import ZERO_BUBBLE, in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer, xLSTMConfig
from transformers.models.llama import modeling_llama

from swiftlite.checkpoint.catalog import stored_tensors
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.initial import InitialValues
from swiftlite.models.load import build_model, load_config
from swiftlite.models.toys import toy_architectures, toy_config, write_toy
from swiftlite.verification.cases import FULL, Subject
from swiftlite.verification.compare import weights_difference

NEW_TOKENS = [f"<fox {number}>" for number in range(200)]  # more than the toys' vocabulary has rows to spare


def initial(folder, seed=42):
    """Name -> whole tensor, asked for one by one and in the wrong order."""
    config = load_config(str(folder))
    model = build_model(str(folder), config, dtype=torch.float32, attention="eager")
    start = InitialValues(model, seed)
    return {name: start(name).clone() for name, _ in reversed(list(stored_tensors(model)))}


@pytest.fixture
def shape(tmp_path, tiny_model):
    """A factory: family -> a folder of a model without its weights."""

    def make(family="llama"):
        without = shutil.ignore_patterns("*.safetensors*")
        return shutil.copytree(tiny_model(family), tmp_path / f"shape-{family}", ignore=without)

    return make


OTHERS = {  # rules of a model inside the model, which look modules up in it by what they are
    "xlstm": lambda: xLSTMConfig(
        vocab_size=512, hidden_size=64, num_heads=4, num_hidden_layers=2, weight_mode="single"
    ),
}


@pytest.mark.parametrize("family", [*toy_architectures(), *OTHERS])
def test_values_are_those_of_the_model_s_own_class(family, tmp_path, tiny_model):
    config = OTHERS[family]() if family in OTHERS else toy_config(family)
    found = initial(write_toy(tmp_path, config) if family in OTHERS else tiny_model(family))
    torch.manual_seed(0)
    expected = dict(stored_tensors(AutoModelForCausalLM.from_config(config).float()))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted, count = expected[name], max(2, value.numel())
        assert value.shape == wanted.shape and value.dtype == torch.float32
        if value.numel() == 1 or wanted.std() == 0:
            assert torch.equal(value, wanted), name
        else:
            assert abs(math.log(value.std() / wanted.std())) < 0.1 + 4 / math.sqrt(count), name
            assert abs(value.mean() - wanted.mean()) < 6 * wanted.std() / math.sqrt(count), name


def test_layers_that_count_get_smaller_weights(tiny_model):
    found = initial(tiny_model("gpt2"))
    inner, outer = (found[f"transformer.h.0.mlp.{name}.weight"].std().item() for name in ("c_fc", "c_proj"))
    assert outer == pytest.approx(inner / math.sqrt(2 * 2), rel=0.1)  # of two layers, arXiv 1909.08053


def test_values_are_a_function_of_seed_and_name(tiny_model):
    found, same, others = (initial(tiny_model(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(value, same[name]) for name, value in found.items())
    drawn = [name for name, value in found.items() if value.std() > 0]
    assert drawn and not any(torch.equal(found[name], others[name]) for name in drawn)
    layers = [found[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    assert not torch.equal(*layers)
    before = torch.get_rng_state()
    initial(tiny_model())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_curve_in_every_layout(tmp_path):
    subject = Subject("qwen3-moe", "qwen3-moe", FULL | {"from_scratch": True})
    chosen = ("ddp 2", "fsdp full 2, offloaded", "tp 2", "pp 2", *ZERO_BUBBLE, "cp 2", "ep 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, subject):
        assert verdict.passed and verdict.difference is not None, verdict


@pytest.mark.parametrize("more", [{}, {"new_tokens": NEW_TOKENS}, {"teacher": "qwen3", "teacher_tokens": 8}])
def test_a_run_is_that_from_a_folder_with_these_values(tmp_path, tiny_model, shape, write_rows, chat_rows, more):
    more = more | ({"teacher": str(tiny_model(more["teacher"]))} if "teacher" in more else {})
    values = settings(tmp_path, shape("llama"), write_rows("rows.jsonl", chat_rows), max_steps=3, **more)
    train_alone(resolve_config("sft", **values, from_scratch=True))
    made = AutoModelForCausalLM.from_config(toy_config("llama"))
    tokenizer = AutoTokenizer.from_pretrained(values["model"])
    start = initial(values["model"])
    if "new_tokens" in more:  # the embedding is made in its new size
        tokenizer.add_tokens(more["new_tokens"])
        made.resize_token_embeddings(len(tokenizer))
        grown = InitialValues(made.to("meta"), 42)
        start = {name: grown(name).clone() for name, _ in stored_tensors(made)}
        made = AutoModelForCausalLM.from_config(made.config)
    made.load_state_dict(start, strict=False)
    made.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    plain = {"model": str(tmp_path / "folder"), "output_dir": str(tmp_path / "plain"), "new_tokens": []}
    train_alone(resolve_config("sft", **values | plain))
    for one, other in zip(metrics(tmp_path / "out"), metrics(tmp_path / "plain"), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert weights_difference(tmp_path / "out" / "model", tmp_path / "plain" / "model") == 0.0


def test_a_run_goes_on_and_is_evaluated_by_what_it_has_learnt(tmp_path, shape, write_rows, chat_rows):
    from test_eval import evaluate

    more = {"from_scratch": True, "eval_fraction": 0.2, "save_steps": 2, "eval_steps": 4, "learning_rate": None}
    texts = [{"text": row["messages"][1]["content"] * 3} for row in chat_rows]
    values = settings(tmp_path, shape(), write_rows("texts.jsonl", texts), **more)
    config = resolve_config("pretrain", **values | {"tuner": None})
    assert (config.tuner, config.learning_rate) == ("full", 3e-4)
    train_alone(config)
    whole = metrics(tmp_path / "out")
    [found] = evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert found.loss == pytest.approx(whole[-1]["eval_loss"], rel=1e-6)
    assert abs(whole[0]["loss"] - math.log(512)) < 0.5
    resumed = {"resume": str(tmp_path / "out" / "checkpoints" / "step-00000002"), "output_dir": str(tmp_path / "on")}
    train_alone(resolve_config("pretrain", **values | resumed))
    assert [row["loss"] for row in metrics(tmp_path / "on")] == [row["loss"] for row in whole[2:]]
    assert weights_difference(tmp_path / "on" / "model", tmp_path / "out" / "model") == 0.0


def test_what_cannot_start_at_random_is_refused(tmp_path, shape, write_rows, chat_rows, monkeypatch):
    for method, more, what in (("dpo", {}, "knows no text"), ("sft", {"tuner": "lora"}, "trains all weights")):
        with pytest.raises(UserError, match=what):
            resolve_config(method, model="a/b", dataset=["c/d"], from_scratch=True, **more)
    values = settings(tmp_path, shape("llama"), write_rows("rows.jsonl", chat_rows))
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        train_alone(resolve_config("sft", **values))
    monkeypatch.setattr("transformers.models.llama.LlamaPreTrainedModel._init_weights", lambda self, module: None)
    with pytest.raises(UserError, match=r"nothing says what model\.\S+ starts with: LlamaForCausalLM has no rule"):
        train_alone(resolve_config("sft", **values, from_scratch=True))


def test_a_folder_of_codes_that_nobody_reads_has_a_shape(tmp_path, shape, write_rows, chat_rows):
    folder = shape("llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    values = settings(tmp_path, folder, write_rows("rows.jsonl", chat_rows), max_steps=1)
    train_alone(resolve_config("sft", **values, from_scratch=True))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "model" / "config.json").read_text())


def overridden(model, *said):
    config = resolve_config(
        "pretrain", model=str(model), dataset=["c/d"], from_scratch=True, config_overrides=list(said)
    )
    return load_config(config.model, overrides=config.config_overrides)


def test_a_shape_of_one_s_own(tmp_path, tiny_model, shape, write_rows, chat_rows):
    values = settings(tmp_path, shape("llama"), write_rows("rows.jsonl", chat_rows), max_steps=1)
    del values["max_length"]
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 150, "tie_word_embeddings": True}
    config = resolve_config("sft", **values, from_scratch=True, config_overrides=sizes)
    assert config.max_length == 150  # by the new number
    train_alone(config)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config
    assert {name: getattr(saved, name) for name in sizes} == sizes
    assert saved.head_dim == 96 // 4  # made anew
    again = overridden(tiny_model("gpt2"), "hidden_size=48", "n_layer=1", "scale_attn_weights=False")
    assert (again.n_embd, again.n_layer, again.scale_attn_weights, again.n_head) == (48, 1, False, 4)
    joined = overridden(tiny_model("gpt2"), "n_embd=48 n_layer=1", "n_head=2,scale_attn_weights=False")
    assert (joined.n_embd, joined.n_layer, joined.n_head, joined.scale_attn_weights) == (48, 1, 2, False)
    assert overridden(tiny_model("llama"), "eos_token_id=[2, 1]").eos_token_id == [2, 1]
    fewer = overridden(tiny_model("gemma3"), "num_hidden_layers=1", "initializer_range=1")
    assert len(fewer.layer_types) == 1 and type(fewer.initializer_range) is float


def with_settings(folder, source, **changes):
    """A copy of a model's config.json that says other things, None for nothing of one."""
    path = shutil.copytree(source, folder) / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return folder


def test_heads_keep_what_the_other_sizes_make_of_them(tiny_model):
    """Of Qwen3 a head has 128 numbers unless config.json says otherwise."""
    sizes = ["hidden_size=96", "num_attention_heads=2"]
    assert overridden(tiny_model("qwen3"), *sizes).head_dim == 48
    assert overridden(tiny_model("qwen3"), *sizes, "head_dim=32").head_dim == 32
    assert overridden(tiny_model("mamba2"), "num_hidden_layers=1").num_hidden_layers == 1  # it has no such heads


def test_an_override_wins_over_another_name(tmp_path, tiny_model):
    """As Llama 3's files on the hub have it."""
    older = {"rope_type": "linear", "factor": 8.0}
    folder = with_settings(
        tmp_path / "older", tiny_model("llama"), rope_parameters=None, rope_theta=5e5, rope_scaling=older
    )
    assert overridden(folder, "hidden_size=32").rope_parameters == older | {"rope_theta": 5e5}
    wanted = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert overridden(folder, f"rope_parameters={json.dumps(wanted)}").rope_parameters == wanted
    assert overridden(folder, 'rope_scaling={"type": "linear", "factor": 3}').rope_parameters == {
        "rope_type": "linear", "factor": 3, "rope_theta": 5e5
    }  # fmt: skip
    layers = with_settings(tmp_path / "two", tiny_model("gpt2"), num_hidden_layers=5)
    assert overridden(layers, "n_layer=3").num_hidden_layers == 3


@pytest.mark.parametrize(
    ("family", "said", "what"),
    [
        ("llama", ["num_hidden_layers=0"], "num_hidden_layers cannot be 0"),
        ("llama", ["intermediate_size=-1"], "intermediate_size cannot be -1"),
        ("gpt2", ["n_embd=0"], "n_embd cannot be 0"),
        ("qwen2", ["sliding_window=8"], "the class of qwen2 makes None of sliding_window"),  # use_sliding_window is off
        ("gpt2", ["n_layer=3", "num_hidden_layers=2"], "calls two of these the same: n_layer"),
        ("llama", ["hidden_sise=96"], "llama has no setting hidden_sise"),
        ("llama", ["model_type=gpt2"], "llama has no setting model_type"),
        ("llama", ["hidden_size=wide"], "'wide' is no int, which hidden_size is"),
        ("llama", ["_name_or_path=other"], "llama has no setting _name_or_path"),
        ("llama", ["tie_word_embeddings=1"], "1 is no bool"),
        ("llama", ['rope_scaling={"factor": 4.0}'], "like that: Unrecognized keys .*='default': {'factor'}"),
        ("llama", ['rope_scaling={"rope_type": "yarn", "factor": 0}'], "like that: .*factor field must be"),
        ("llama", ['rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta": 1}'], "like that: Unrecognized keys"),
        (
            "gemma3",
            ['rope_parameters={"full_attention": 8}'],
            "8 is no dict, which rope_parameters of full_attention is",
        ),
        ("llama", ["num_attention_heads=7"], "no llama can be like that: .*not a multiple of"),
        ("gemma3", ["num_hidden_layers=7"], "config.json says layer_types of 2 layers"),
    ],
)
def test_shapes_that_are_none(tiny_model, family, said, what):
    with pytest.raises(UserError, match=what) as error:
        overridden(tiny_model(family), *said)
    assert error.value.where.startswith(f"--config-overrides {said[0].partition('=')[0]}")


@pytest.mark.parametrize("said", ["num_hidden_layers=1", "n_embd=48", "vocab_size=600", "head_dim=8"])
def test_weights_keep_their_shape(said):
    with pytest.raises(UserError, match="changes the shape of a model whose weights"):
        resolve_config("pretrain", model="m", dataset=["c/d"], config_overrides=[said])


@pytest.mark.parametrize("said", ["hidden_act=foo", "rope_parameters={rope_type: foo}", "num_key_value_heads=3"])
def test_a_shape_that_shows_while_it_is_built_is_no_fault_of_the_folder(tmp_path, shape, write_rows, chat_rows, said):
    """Neither the config's class nor, of heads, the model's looks at these."""
    values = settings(tmp_path, shape("llama"), write_rows("rows.jsonl", chat_rows), from_scratch=True)
    name, _, value = said.partition("=")
    config = resolve_config("sft", **values, config_overrides={name: yaml.safe_load(value)})
    with pytest.raises(UserError) as error:
        train_alone(config)
    assert error.value.where.startswith(f"--config-overrides {name}=")
    assert "config.json" in error.value.fix


def test_a_run_goes_on_in_its_own_shape(tmp_path, shape, write_rows, chat_rows):
    ours, as_well = ["num_hidden_layers=1", 'rope_parameters={"rope_theta": 5000}'], '{"rope_theta":5000.0}'
    more = {"from_scratch": True, "max_steps": 1, "config_overrides": ours}
    values = settings(tmp_path, shape("llama"), write_rows("rows.jsonl", chat_rows), **more)
    train_alone(resolve_config("sft", **values))
    for other in (["num_hidden_layers=2", ours[1]], ours[:1], []):
        on = {"resume": "auto", "max_steps": 2, "config_overrides": other}
        with pytest.raises(UserError, match="cannot go on with other settings.*--config-overrides num_hidden_layers=1"):
            train_alone(resolve_config("sft", **values | on))
    written_otherwise = {"config_overrides": [f"rope_parameters={as_well}", ours[0]]}
    train_alone(resolve_config("sft", **values | written_otherwise | {"resume": "auto", "max_steps": 2}))
    assert len(metrics(tmp_path / "out")) == 2


def test_what_no_rule_reaches_is_found_in_a_part_and_in_whole_numbers(tiny_model, monkeypatch):
    usual = modeling_llama.LlamaPreTrainedModel._init_weights

    def half(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight[:, : module.in_features // 2].normal_()
        else:
            usual(self, module)

    class Masked(modeling_llama.LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    with monkeypatch.context() as changed:
        changed.setattr(modeling_llama.LlamaPreTrainedModel, "_init_weights", half)
        with pytest.raises(UserError, match="nothing says what lm_head.weight starts with"):
            initial(tiny_model())
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Masked)
    with pytest.raises(UserError, match=r"nothing says what \S+mlp\.mask starts with"):
        initial(tiny_model())


def test_a_model_learns_longer_texts(tmp_path, tiny_model, write_rows, chat_rows):
    """YaRN by what is said equals that of the file, scaled from the frequencies and the length that the model has."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 512}
    base = with_settings(
        tmp_path / "base", tiny_model("llama"), rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    longer = {"rope_parameters": scaled, "max_position_embeddings": 2048}
    written = with_settings(tmp_path / "written", base, **longer)
    values = settings(tmp_path, base, write_rows("rows.jsonl", chat_rows), max_steps=2, max_length=2000)
    said = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048}
    rows = []
    for model, overrides in ((written, {}), (base, said), (base, {"max_position_embeddings": 2048})):
        place = {"model": str(model), "output_dir": str(tmp_path / f"out{len(rows)}"), "config_overrides": overrides}
        train_alone(resolve_config("sft", **values | place))
        rows.append([row["loss"] for row in metrics(tmp_path / f"out{len(rows)}")])
    assert rows[0] == rows[1] != rows[2]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out1" / "model").config
    assert saved.rope_parameters == scaled and saved.max_position_embeddings == 2048
    for more, what in (
        ({"tuner": "lora"}, "an adapter is loaded with"),
        ({"config_overrides": {}}, "the 512 positions"),
    ):
        with pytest.raises(UserError, match=what):
            train_alone(resolve_config("sft", **values | {"config_overrides": said} | more))


def test_what_is_not_said_of_a_rotary_embedding_stays(tmp_path, tiny_model):
    """With a kind of its own it is scaled anew, from its own frequencies; with null not at all."""
    has = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 5e5}
    folder = with_settings(tmp_path / "scaled", tiny_model("llama"), rope_parameters=has)

    def made(said):
        return overridden(folder, f"rope_scaling={json.dumps(said)}").rope_parameters

    assert made({"rope_theta": 1e6}) == has | {"rope_theta": 1e6}
    assert made({"factor": 4.0}) == has | {"factor": 4.0}
    assert made({"type": "linear", "factor": 4.0}) == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert made(None) == {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(UserError, match="no setting rope_theta") as error:
        overridden(folder, "rope_theta=1e6")
    assert error.value.fix == 'write rope_parameters={"rope_theta": 1000000.0}'


def test_rotary_embeddings_of_each_kind_of_layer(tiny_model):
    longer = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    has = load_config(str(tiny_model("gemma3"))).rope_parameters
    made = overridden(tiny_model("gemma3"), f"rope_parameters={json.dumps(longer)}").rope_parameters
    assert made == has | {"full_attention": has["full_attention"] | longer["full_attention"]}
    unscaled = overridden(tiny_model("gemma3"), "rope_parameters=null").rope_parameters
    assert unscaled == {kind: of | {"rope_type": "default"} for kind, of in has.items()}
    with pytest.raises(UserError, match="for each kind of layer, and factor is none") as error:
        overridden(tiny_model("gemma3"), 'rope_scaling={"factor": 8.0, "rope_type": "linear"}')
    assert "full_attention and sliding_attention" in error.value.fix
