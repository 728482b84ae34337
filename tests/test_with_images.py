"""Models that transformers has for images and text alone: their language model is trained, the rest stays as it is."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from curves import steps
from safetensors.torch import load_file, save_file
from test_parity import metrics, plain_training, render_chat, settings, train_alone
from test_plan import BYTES, WORK
from test_verify import FULL, in_real_processes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from worlds import run_world

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.data.rows.forms import Chat
from swiftlite.data.tokens.chat_template import written
from swiftlite.data.tokens.template import ChatRenderer
from swiftlite.errors import UserError
from swiftlite.models.anatomy import beside_text, dissect, parts_beside_text
from swiftlite.models.attention import documents as attention
from swiftlite.models.load import build_model, load_config
from swiftlite.models.sampling import answering, sample
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.toys import toy_config, toy_tokenizer, write_toy
from swiftlite.models.tuners import apply_tuner
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.data import DataParallel, reduce_at_last_micro_batch, shard_over_data
from swiftlite.parallel.mesh import build_mesh
from swiftlite.parallel.pipeline import cut_model
from swiftlite.parallel.stages import ONE_FORWARD_ONE_BACKWARD, plan_stages
from swiftlite.planning.communication import ModelShape
from swiftlite.planning.footprint import Blocks, NumberBytes, footprint, footprints
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.training.flops import FlopCounter
from swiftlite.training.setup import check_model
from swiftlite.training.sources import text_alone_in_words
from swiftlite.verification.run import Subject

TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
IN_THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
# kind -> (what its text is like, what more that has, the part for images)
KINDS = {
    "llava_next": ("llama", {}, TOWER | {"model_type": "clip_vision_model", "patch_size": 8}),
    "mistral3": ("mistral", {}, TOWER | {"model_type": "pixtral", "patch_size": 8}),
    "llava": ("llama", {}, TOWER | {"model_type": "clip_vision_model", "patch_size": 8}),
    "internvl": ("qwen2", {}, TOWER | {"image_size": [32, 32], "patch_size": [8, 8]}),
    "qwen2_5_vl": (None, IN_THREE, QWEN),
    "qwen3_vl": (None, IN_THREE, QWEN | {"deepstack_visual_indexes": [0]}),
}
OF_IMAGES = ("vis", "projector", "newline")
# As LLaVA and SmolVLM are published: they write parts of a content, and of a string nothing.
MARKED = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
CLOSED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:"
    "{% else %}: {% endif %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>Assistant:{% endif %}"
)
PROCESSOR = '{"image_processor_type": "PixtralImageProcessor"}'


@pytest.fixture(scope="session")
def with_images(tmp_path_factory):
    """A factory: kind -> folder of a random tiny model."""

    def make(kind: str):
        like, more, tower = KINDS[kind]
        sizes = toy_config("llama").to_dict()
        kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        kept += ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id", "head_dim")
        text = {key: sizes[key] for key in kept} | more | ({} if like is None else {"model_type": like})
        config = CONFIG_MAPPING[kind](text_config=text, vision_config=tower, tie_word_embeddings=False)
        folder = write_toy(tmp_path_factory.mktemp(kind), config)
        (folder / "preprocessor_config.json").write_text(PROCESSOR)
        return folder

    return make


def tower_of(tensors):
    return {name: tensor for name, tensor in tensors.items() if any(w in name for w in OF_IMAGES)}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_plain_pytorch(tmp_path, with_images, write_rows, chat_rows, kind):
    """Of the whole model, called with tokens alone; no tensor for images changes, nor does it decay."""
    model = with_images(kind)
    values = settings(tmp_path, model, write_rows("rows.jsonl", chat_rows[:8]), max_steps=2, global_batch_size=8)
    train_alone(resolve_config("sft", **values, packing=False))
    tokenizer = AutoTokenizer.from_pretrained(model)
    step = [render_chat(tokenizer, row["messages"]) for row in chat_rows[:8]]
    expected = plain_training(model, [step, step], auto=AutoModelForImageTextToText)
    for row, (loss, norm) in zip(metrics(tmp_path / "out"), expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5) and row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert before.keys() == after.keys() and tower_of(before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in tower_of(before).items())
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items() if name not in tower_of(before))
    assert (tmp_path / "out" / "model" / "preprocessor_config.json").read_text() == PROCESSOR
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out" / "model", output_loading_info=True)
    assert not report["missing_keys"] and type(loaded.config) is type(load_config(str(model)))


def test_adapters_are_of_the_language_model_alone(tmp_path, with_images, write_rows, chat_rows, capsys):
    model = with_images("llava")
    rows = write_rows("rows.jsonl", chat_rows)
    for name, targets in (("all", ["all-linear"]), ("some", ["q_proj", "down_proj"])):
        more = {"output_dir": str(tmp_path / name), "target_modules": targets, "max_steps": 1, "tuner": "lora"}
        train_alone(resolve_config("sft", **settings(tmp_path, model, rows, **more)))
        adapted = load_file(tmp_path / name / "model" / "adapter_model.safetensors")
        assert adapted and all(".language_model." in tensor for tensor in adapted)
        said = json.loads((tmp_path / name / "model" / "adapter_config.json").read_text())
        assert set(said["target_modules"]) == {tensor.split(".")[-3] for tensor in adapted}
        assert {each.split(".")[-1] for each in said["exclude_modules"]} <= set(said["target_modules"])
    assert "LoRA leaves out 8 layers that no text goes through" in capsys.readouterr().out
    run_export(ExportOptions(None, str(tmp_path / "all"), tmp_path / "merged"))
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == PROCESSOR
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in tower_of(before).items())


@pytest.mark.parametrize(
    ("option", "values", "word"),
    [
        ("--target-modules", {"tuner": "lora", "target_modules": ["q_proj", "fc1"]}, "fc1"),
        ("--target-modules", {"tuner": "lora", "target_modules": ["q_proj", "gate_up_proj"]}, "gate_up_proj"),
        ("--modules-to-save", {"tuner": "lora", "modules_to_save": ["multi_modal_projector"]}, "multi_modal_projector"),
        ("--trainable-modules", {"tuner": "freeze", "trainable_modules": ["norm", "vision_tower"]}, "vision_tower"),
    ],
)
def test_what_no_text_goes_through_is_not_trained_by_name(with_images, option, values, word):
    """Nor is it passed over: it would learn nothing, in silence."""
    config = resolve_config("sft", model="nowhere", dataset=["rows.jsonl"], **values)
    with pytest.raises(UserError, match=f"'{word}'") as refused:
        apply_tuner(on_meta(with_images("llava")), config, None, lambda _text: None)
    assert refused.value.where == option


def test_what_is_named_like_something_of_the_text_is_told(with_images):
    model, said = on_meta(with_images("llava")), []
    values = {"tuner": "freeze", "trainable_layers": 0, "trainable_modules": [r"layers\.0\."]}
    apply_tuner(model, resolve_config("sft", model="nowhere", dataset=["rows.jsonl"], **values), None, said.append)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".language_model.layers.0." in name for name in trained)
    assert said == [
        "no text goes through 16 tensors that --trainable-modules names by 'layers\\\\.0\\\\.', which stay as they are"
    ]


def test_an_adapter_of_the_tower_too_is_kept_as_it_is(tmp_path, with_images, write_rows, chat_rows, capsys):
    model = with_images("llava")
    adapted = peft.get_peft_model(
        AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32),
        peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    rows = write_rows("rows.jsonl", chat_rows)
    more = {"tuner": "lora", "adapter": str(tmp_path / "adapter"), "max_steps": 1, "precision": "bf16"}
    train_alone(resolve_config("sft", **settings(tmp_path, model, rows, **more)))
    assert "no text goes through 16 tensors of the adapter, which stay as they are" in capsys.readouterr().out
    before, after = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "out/model"))
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert before.keys() == after.keys() and len(same) == 16 and not any(".language_model." in name for name in same)


def on_meta(folder):
    return build_model(str(folder), load_config(str(folder)), dtype=torch.float32, attention="eager")


def test_an_adapter_names_what_it_adapts(with_images):
    """Also where its tower has a layer `proj`, and something else that is called so."""
    config = resolve_config("sft", model="nowhere", dataset=["rows.jsonl"], tuner="lora")
    written = apply_tuner(on_meta(with_images("qwen3_vl")), config, None, lambda _text: None).peft_config["default"]
    attention, feeding = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert written.target_modules == attention | feeding and written.exclude_modules is None


@pytest.mark.parametrize("option", ["new_tokens", "modules_to_save"])
def test_whole_modules_of_a_model_whose_text_says_nothing_of_tied_embeddings(with_images, option):
    """As that of Qwen3-VL, whose config says it for the whole."""
    config = resolve_config("sft", model="nowhere", dataset=["rows.jsonl"], tuner="lora", **{option: ["lm_head"]})
    wrapped = apply_tuner(on_meta(with_images("qwen3_vl")), config, None, lambda _text: None)
    assert set(wrapped.peft_config["default"].modules_to_save) == {"lm_head", *["embed_tokens"] * (option[0] == "n")}


def test_files_have_the_names_that_they_are_published_by(tmp_path, with_images, write_rows, chat_rows):
    """transformers' towers were a level deeper when LLaVA and Gemma 3 were published, and engines know them so."""

    def published(name):
        return name.replace("vision_tower.", "vision_tower.vision_model.")

    model = shutil.copytree(with_images("llava"), tmp_path / "published")
    tensors = {published(name): tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    values = settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), max_steps=2, save_steps=1)
    train_alone(resolve_config("sft", **values))
    trained = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert trained.keys() == tensors.keys() and any(".vision_model." in name for name in tensors)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tower_of(tensors).items())
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000002")
    train_alone(resolve_config("sft", **values, resume="auto"))
    again = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(tensor, again[name]) for name, tensor in trained.items())
    run_export(ExportOptions(str(tmp_path / "out"), None, tmp_path / "rounded", quantization="int8"))
    rounded = load_file(tmp_path / "rounded" / "model.safetensors").keys()
    assert {name for name in rounded if "vision_tower" in name} == {name for name in tensors if "vision_tower" in name}
    values |= {"model": str(tmp_path / "rounded"), "tuner": "lora", "output_dir": str(tmp_path / "on-codes")}
    train_alone(resolve_config("sft", **values))
    run_export(ExportOptions(None, str(tmp_path / "on-codes"), tmp_path / "merged"))
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == tensors.keys()


def test_a_resumed_run_has_all_files_too(tmp_path, with_images, write_rows, chat_rows):
    model = with_images("mistral3")
    values = settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), max_steps=2, save_steps=1)
    train_alone(resolve_config("sft", **values, stop_after=None))
    whole = load_file(tmp_path / "out" / "model" / "model.safetensors")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000002")
    shutil.rmtree(tmp_path / "out" / "model")
    train_alone(resolve_config("sft", **values, resume="auto"))
    again = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert (tmp_path / "out" / "model" / "preprocessor_config.json").read_text() == PROCESSOR


def test_text_alone_takes_no_processor_along(tmp_path, tiny_model, write_rows, chat_rows):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (model / "preprocessor_config.json").write_text(PROCESSOR)
    train_alone(resolve_config("sft", **settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), max_steps=1)))
    assert not (tmp_path / "out" / "model" / "preprocessor_config.json").exists()


def test_a_language_model_of_its_own_class_is_told(with_images):
    given = CONFIG_MAPPING["qwen3_5"]()
    told = text_alone_in_words(build_model("nowhere", given, dtype=torch.float32, attention="eager"), given)
    assert told == ["Qwen3_5ForCausalLM is the language model alone: what the model has for images is left out"]
    for folder in (with_images("llava"), write_toy(with_images("llava") / "text", toy_config("llama"))):
        assert not text_alone_in_words(on_meta(folder), load_config(str(folder)))


def test_a_language_model_that_nothing_loads_is_told_before(tmp_path, write_rows, chat_rows):
    """No Auto class of transformers knows the config of Llama 3.2 Vision's text; an adapter goes with the whole."""
    sizes = {key: value for key, value in toy_config("llama").to_dict().items() if key in ("vocab_size", "hidden_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_global_layers": 1}
    tower |= {"attention_heads": 2, "image_size": 32, "patch_size": 8, "intermediate_layers_indices": [0]}
    text = sizes | {"cross_attention_layers": [], "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    config = CONFIG_MAPPING["mllama"](text_config=text, vision_config=tower | {"vision_output_dim": 64})
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    values = settings(tmp_path, tmp_path / "model", write_rows("rows.jsonl", chat_rows), max_steps=1)
    with pytest.raises(UserError, match="nothing would load .*MllamaForCausalLM.*mllama_text_model") as refused:
        train_alone(resolve_config("sft", **values))
    assert "--tuner lora" in refused.value.fix
    train_alone(resolve_config("sft", **values | {"tuner": "lora"}))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    peft.PeftModel.from_pretrained(base, tmp_path / "out" / "model")


def test_layouts_equal_one_process(tmp_path, with_images):
    kind, chosen = Subject("mistral3", "full", FULL), ("fsdp full 2", "ddp 2", "tp 2", "cp 2", "pp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, kind, model=with_images("mistral3")):
        assert verdict.passed and verdict.difference is not None, verdict


def test_the_first_stage_alone_keeps_what_no_text_goes_through(with_images):
    """LLaVA-NeXT has a parameter beside its modules, too."""
    model = AutoModelForImageTextToText.from_pretrained(with_images("llava_next"))
    whole, beside = dict(model.named_parameters()), set(beside_text(model))
    assert "model.image_newline" in beside and any("vision_tower" in name for name in beside)
    plan = plan_stages(model, 2, ONE_FORWARD_ONE_BACKWARD, length=32)
    first, last = (cut_model(model, model, plan, rank)[0] for rank in range(2))
    assert beside < set(first.names.values()) and not beside & set(last.names.values())
    assert whole.keys() == {name for stage in (first, last) for name in stage.names.values() if name in whole}


def test_what_no_text_goes_through_is_kept_and_not_sent(with_images):
    model = AutoModelForImageTextToText.from_pretrained(with_images("mistral3"))
    text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    idle = sum(parameter.requires_grad_(False).numel() for parameter in beside_text(model).values())
    blocks, alone = Blocks.of(model), Blocks.of(text)
    assert idle == blocks.idle.count > 0 and alone.idle.count == 0
    assert ModelShape.of(model).ends == ModelShape.of(text).ends
    plan = plan_stages(model, 2, ONE_FORWARD_ONE_BACKWARD, length=32)
    both = [footprints(each, Layout(pp=2, dp_shard=2, sharding="full"), plan, BYTES, WORK) for each in (blocks, alone)]
    more = [
        [getattr(a, part) - getattr(b, part) for part in ("weights", "gathered")] for a, b in zip(*both, strict=True)
    ]
    assert more == [[BYTES.stored * idle / 2, 0], [0, 0]]


@pytest.mark.parametrize(
    ("template", "text", "trained"),
    [
        (MARKED, "USER: Hi ASSISTANT: Yes. USER: Who? ASSISTANT: Me.", [" Yes.", " Me."]),
        (
            CLOSED,
            "<|im_start|>User: Hi<|im_end|>\n<|im_start|>Assistant: Yes.<|im_end|>\n<|im_start|>User: Who?<|im_end|>\n"
            "<|im_start|>Assistant: Me.<|im_end|>\n",
            [" Yes.<|im_end|>", " Me.<|im_end|>"],
        ),
    ],
    ids=["marked", "closed"],
)
def test_a_template_that_takes_parts_is_given_parts(template, text, trained):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    said = [("user", "Hi"), ("assistant", "Yes."), ("user", "Who?"), ("assistant", "Me.")]
    messages = [{"role": role, "content": content} for role, content in said]
    [rendered] = ChatRenderer(tokenizer, "2025-01-01").render(Chat(messages, [False, True, False, True]))
    assert rendered.text == text and [rendered.text[start:end] for start, end in rendered.spans] == trained
    assert written(tokenizer, messages[:3], add_generation_prompt=True) == text[: text.index(trained[1])]


def test_a_template_that_the_processor_alone_has_is_the_models(tmp_path, with_images, write_rows, chat_rows):
    model = with_images("llava")
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": CLOSED}))
    train_alone(resolve_config("sft", **settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), max_steps=1)))
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").chat_template == CLOSED
    run_export(ExportOptions(str(tmp_path / "out"), None, tmp_path / "again"))
    (model / "chat_template.json").write_text("{}")
    with pytest.raises(UserError, match=r"chat_template\.json holds no chat template"):
        load_tokenizer(str(model))


def _gathered(rank, folder):
    """(numbers that a step of FSDP gathers of a model, of the tower those that lie here)."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    counted, gather = [], DefaultAllGather.__call__

    def counting(self, output_tensor, *more, **options):
        counted.append(output_tensor.numel())
        return gather(self, output_tensor, *more, **options)

    DefaultAllGather.__call__ = counting
    base = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=attention.register()).train()
    for parameter in beside_text(base).values():
        parameter.requires_grad_(False)
    scorer, mesh = TokenScorer(base, base), build_mesh(Layout(dp_shard=2, sharding="full"), torch.device("cpu"))
    options = DataParallel(torch.float32, "full")
    shard_over_data(scorer, dissect(base).layers, mesh, options, parts_beside_text(base).values())
    for batches in list(steps())[:2]:
        for place, batch in enumerate(batches[:2]):
            reduce_at_last_micro_batch(scorer, is_last=place == 1, sharding="full")
            supervised_loss(scorer(batch).logprobs, 10).backward()
    DefaultAllGather.__call__ = gather
    return sum(counted) / 2, sum(p.to_local().numel() for p in beside_text(base).values())


def test_what_no_text_goes_through_is_divided_and_never_gathered(with_images):
    folder = with_images("llava")
    tensors = load_file(folder / "model.safetensors")
    tower = sum(tensor.numel() for tensor in tower_of(tensors).values())
    [layers, last] = [
        sum(tensor.numel() for name, tensor in tensors.items() if f".layers.{place}." in name and "language" in name)
        for place in range(2)
    ]
    ends = sum(tensor.numel() for tensor in tensors.values()) - tower - layers - last
    ranks = run_world(2, _gathered, folder)
    # the first layer before each forward and backward of two micro-batches, the last one once less each, the ends once
    assert [gathered for gathered, _ in ranks] == [4 * layers + 2 * last + ends] * 2
    assert sum(here for _, here in ranks) == tower


def test_what_no_text_goes_through_is_planned_so(with_images):
    """Whole on each rank of tensor parallelism, divided by FSDP, gathered and sent by none."""
    model = on_meta(with_images("llava"))
    tower = sum(parameter.numel() for parameter in beside_text(model).values())
    model.requires_grad_(False)
    blocks, text = Blocks.of(model), sum(parameter.numel() for parameter in model.parameters()) - tower
    assert blocks.idle.count == tower
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name and "language" in name)
    given = NumberBytes(weight=4, gradient=4, moments=8, frozen=2, stored=2, compute=2), WORK
    held = {tp: footprint(blocks, Layout(tp=tp, dp_shard=2, sharding="grad_op"), None, *given) for tp in (1, 2)}
    assert held[1].weights == text + tower and held[1].gathered == 2 * text
    assert held[2].weights == (text + norms) / 2 + tower and held[2].gathered == text + norms
    shape = ModelShape.of(model)
    assert shape.layers.count + shape.ends.count == text


def test_what_no_text_goes_through_is_no_work(with_images):
    config = load_config(str(with_images("mistral3")))
    with torch.device("meta"):
        both = AutoModelForImageTextToText.from_config(config)
        text = AutoModelForCausalLM.from_config(config.get_text_config())
    assert FlopCounter(both).step([8, 5]) == FlopCounter(text).step([8, 5]) > 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_are_drawn_by_any_number(with_images, kind):
    """These models keep from one answer to the next by how much images shift its places."""
    model = AutoModelForImageTextToText.from_pretrained(with_images(kind), dtype=torch.float32)
    drawn = torch.rand(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    prompts = [[5, 6, 7]] * 2 + [[9] * 11] * 3
    with answering(model, switch=False):
        together = sample(model, prompts, drawn, stops=[2])
        assert sample(model, prompts[:4], drawn[:4], stops=[2]) == together[:4]
        alone = [sample(model, [prompt], drawn[i : i + 1], stops=[2])[0] for i, prompt in enumerate(prompts)]
    assert together == alone


def test_it_gives_no_scores(with_images):
    config = resolve_config("rm", model=str(with_images("mistral3")), dataset=["rows.jsonl"])
    with pytest.raises(UserError, match="mistral3 is no sequence classifier"):
        check_model(config, Layout(), torch.device("cpu"), None)
