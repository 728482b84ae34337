"""Blocks and files of other tools that stand for settings: of axolotl, DeepSpeed and LLaMA-Factory."""

import json

import pytest

from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve
from swiftlite.config.validate import Given
from swiftlite.errors import UserError

BASE = "base_model: org/model\nmethod: {}\n"
CHAT = "  - path: org/a\n    type: chat_template\n"
PAIRS = "  - path: org/a\n    type: chat_template.default\n"


@pytest.fixture
def recipe(tmp_path):
    """A factory: text -> the recipe, from a file."""

    def write(text, method="sft"):
        path = tmp_path / "recipe.yaml"
        path.write_text(BASE.format(method) + text)
        return load_recipe(str(path))

    return write


@pytest.mark.parametrize(
    ("text", "dataset", "columns"),
    [
        (CHAT, ["org/a"], {}),
        (CHAT + "    name: main\n    split: test\n", ["org/a:main@test"], {}),
        (CHAT + "    split: train[:5%]\n", ["org/a@train[:5%]"], {}),
        (CHAT + "    split: train\n    roles_to_train: [assistant]\n    train_on_eos: turn\n", ["org/a"], {}),
        (
            CHAT + "    field_messages: conversations\n"
            "    message_property_mappings:\n      role: from\n      content: value\n",
            ["org/a"],
            {},
        ),
        (
            CHAT + "    field_messages: said\n  - path: rows.json\n    ds_type: json\n    type: chat_template\n"
            "    field_messages: said\n",
            ["org/a", "rows.json"],
            {"messages": "said"},
        ),
        (
            PAIRS + "    field_messages: said\n    field_chosen: good\n    field_rejected: rejected\n"
            "    roles:\n      user: [user, human]\n      assistant: [assistant]\n",
            ["org/a"],
            {"messages": "said", "chosen": "good"},
        ),
    ],
)
def test_data_sets_of_axolotl_are_taken_where_they_say_no_more(recipe, text, dataset, columns):
    made = resolve(None, {}, recipe("datasets:\n" + text, method="dpo" if PAIRS in text else "sft"), env={})
    assert made.config.dataset == dataset and made.config.columns == columns
    (note,) = (note for note in made.notes if "datasets" in note)
    assert all(name in note for name in (*dataset, *columns.values()))


def test_rows_of_type_alpaca_are_written_as_alpacas(recipe):
    sets = "  - path: org/a\n    type: alpaca\n"
    made = resolve(None, {}, recipe("datasets:\n" + sets + "test_datasets:\n" + sets.replace("/a", "/b")), env={})
    assert (made.config.dataset, made.config.chat_template) == (["org/a"], "alpaca")
    assert "the recipe's datasets is read as `dataset: org/a` and `chat_template: alpaca`" in made.notes


def test_data_sets_to_test_on_are_those_of_an_evaluation(recipe):
    made = resolve(None, {}, recipe("datasets:\n" + CHAT + "test_datasets:\n" + CHAT.replace("/a", "/b")), env={})
    assert (made.config.dataset, made.config.eval_dataset) == (["org/a"], ["org/b"])


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("  - path: org/a\n    type: alpaca_chat.load_qa\n", "of type alpaca_chat.load_qa", "`dataset: org/a`"),
        (CHAT + "  - path: org/b\n    type: alpaca\n", "some of the data sets are of type alpaca", "`chat_template`"),
        ("  - path: org/a\n    type: completion\n    field: said\n", "of type completion", "`swiftlite pretrain`"),
        ("  - path: org/a\n    split: test\n    type: llama3.ultra\n", "of type llama3.ultra", "`dataset: org/a@test`"),
        ("  - path: org/a\n    type:\n", "of no type", "`dataset: org/a`"),
        ("  - path: org/a\n    type: {format: x}\n", "of a type of its own", "`columns`"),
        ("  - type: chat_template\n", "no path", "NAME_OR_PATH"),
        (CHAT + "    split: train[:5%]+test\n", "train[:5%]+test", "write `dataset: org/a` instead"),
        (CHAT + "    roles_to_train: [user]\n", "roles_to_train", "`dataset: org/a`"),
        (CHAT + "    train_on_eos: all\n", "train_on_eos", "`dataset: org/a`"),
        (CHAT + "    message_property_mappings: {role: who}\n", "message_property_mappings", "`dataset: org/a`"),
        (CHAT + "    roles: {user: [assistant]}\n", "roles", "`dataset: org/a`"),
        (CHAT + "    roles: {user: [{}]}\n", "roles", "`dataset: org/a`"),
        (CHAT + "    field_chosen: good\n", "field_chosen", "`dataset: org/a`"),
        (CHAT + "    ds_type: json\n", "ds_type", "`dataset: org/a`"),
        (CHAT + "    shards: 4\n", "shards", "`dataset: org/a`"),
        (CHAT + "    field_messages: said\n" + CHAT, "different keys", "rename"),
        ("  - &a [*a]\n", "goes round in itself", "`dataset: a, b, ...`"),
        ("  - &a {path: b, type: [x, x]}\n" + "  - *a\n" * 100, "too long", "`dataset: a, b, ...`"),
    ],
)
def test_what_a_data_set_of_axolotl_says_more_is_told(recipe, text, what, fix):
    with pytest.raises(UserError) as caught:
        recipe("datasets:\n" + text)
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.where.endswith("recipe.yaml:3: datasets")


AUTO = {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": "auto", "steps_per_print": 2000}
MEMORY = {"device": "cpu", "pin_memory": True}


@pytest.fixture
def deepspeed(tmp_path):
    """A factory: what a file says, ZeRO's part of it -> the run that names it, by a recipe beside it."""

    def run(zero, flags=None, **more):
        (tmp_path / "ds.json").write_text(json.dumps({**AUTO, "zero_optimization": zero, **more}))
        path = tmp_path / "recipe.yaml"
        path.write_text(BASE.format("sft") + "dataset: org/rows\ndeepspeed: ds.json\nnproc_per_node: 2\n")
        given = {name: Given(value, f"--{name}", "flag") for name, value in (flags or {}).items()}
        return resolve(None, given, load_recipe(str(path)), env={})

    return run


@pytest.mark.parametrize(
    ("zero", "more", "wanted"),
    [
        ({"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": "auto", "sub_group_size": 1e9}, {},
         ("full", "none", "auto")),
        ({"stage": 2, "contiguous_gradients": True, "offload_optimizer": {"device": "none"}}, {},
         ("grad_op", "none", "auto")),
        ({"stage": 3, "offload_optimizer": MEMORY, "offload_param": MEMORY}, {"bf16": {"enabled": True}},
         ("full", "cpu", "bf16")),
    ],
)  # fmt: skip
def test_a_file_of_deepspeed_that_says_how_to_shard_is_read(deepspeed, zero, more, wanted):
    made = deepspeed(zero, **more)
    assert (made.config.sharding, made.config.offload, made.config.precision) == wanted
    assert made.notes[0].startswith(f"ds.json is read as sharding {wanted[0]}")


def test_what_is_given_wins_over_a_file_of_deepspeed(deepspeed):
    offloaded = {"stage": 3, "offload_optimizer": MEMORY, "offload_param": MEMORY}
    assert deepspeed(offloaded, {"offload": "none"}).config.offload == "none"
    assert deepspeed(offloaded, {"sharding": "grad_op"}).config.offload == "none"  # the file is not read then


@pytest.mark.parametrize(
    ("zero", "more", "said"),
    [
        ({"stage": 1}, {}, "stage 1"),
        ({"stage": 2, "offload_optimizer": MEMORY}, {}, "offload_optimizer cpu"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, {}, "offload_param nvme"),
        ({"stage": 3, "zero_quantized_weights": True}, {}, "zero_quantized_weights"),
        ({"stage": 3}, {"gradient_clipping": 0.5}, "gradient_clipping"),
        ({"stage": 3}, {"optimizer": {"type": "AdamW"}}, "optimizer"),
        ({"stage": 3}, {"bf16": 1}, "cannot be read"),
    ],
)
def test_a_file_of_deepspeed_that_says_more_is_told(deepspeed, zero, more, said):
    with pytest.raises(UserError, match="DeepSpeed's file") as caught:
        deepspeed(zero, **more)
    assert said in caught.value.what and "ding" in caught.value.fix and caught.value.where.endswith("ds.json")


FSDP = """\
fsdp: [{words}]
fsdp_config:
  fsdp_version: 2
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  state_dict_type: FULL_STATE_DICT
  {key}
"""


@pytest.mark.parametrize(
    ("words", "key", "wanted"),
    [
        ("full_shard, auto_wrap", "fsdp_offload_params: false", ("fsdp", "full_shard", "none", "auto")),
        ("auto_wrap", "offload_params: true", ("fsdp", None, "cpu", "auto")),
        ("shard_grad_op, offload", "activation_checkpointing: true", ("fsdp", "shard_grad_op", "cpu", "full")),
        ("auto_wrap", "reshard_after_forward: false", ("fsdp", "grad_op", "none", "auto")),
    ],
)
def test_what_transformers_says_of_fsdp_is_taken(recipe, words, key, wanted):
    read = recipe(FSDP.format(words=words, key=key))
    names = ("parallel", "sharding", "offload", "activation_checkpointing")
    defaults = {"offload": "none", "activation_checkpointing": "auto"}
    found = tuple(read.entries[name].value if name in read.entries else defaults.get(name) for name in names)
    assert found == wanted and all("the recipe's fsdp" in note for note in read.notes) and len(read.notes) == 2
    assert resolve(None, {}, read, env={}, needs_rows=False).config.parallel == "fsdp"


@pytest.mark.parametrize(("words", "key"), [("magic", "version: 2"), ("auto_wrap", "min_num_params: 5")])
def test_what_transformers_says_beyond_that_is_refused(recipe, words, key):
    with pytest.raises(UserError, match="has no equal here") as caught:
        recipe(FSDP.format(words=words, key=key))
    assert "`parallel: fsdp`" in caught.value.fix


TABLE = {
    "own": {"file_name": "own.json"},
    "asked": {"file_name": "q.jsonl", "num_samples": 7, "columns": {"prompt": "q", "response": "a", "tools": "tools"}},
    "chats": {
        "hf_hub_url": "org/chats", "file_name": "own.json", "subset": "main", "split": "test", "formatting": "sharegpt",
        "columns": {"messages": "messages", "tools": "tools"}, "tags": {"role_tag": "role", "user_tag": "user"},
    },
    "said": {"file_name": "own.json", "formatting": "sharegpt", "columns": {"messages": "said", "kto_tag": "good"}},
    "pairs": {"ms_hub_url": "org/pairs", "ranking": True, "columns": {"prompt": "instruction", "chosen": "good"}},
    "texts": {"file_name": "own.json", "columns": {"prompt": "content"}},
    "pictures": {"file_name": "own.json", "columns": {"images": "images"}},
    "odd": {"file_name": "own.json", "formatting": "sharegpt", "tags": {"user_tag": "asker"}},
    "scripted": {"script_url": "make.py"},
    "listed": {"file_name": "own.json", "columns": ["a"]},
    "mixed": {"file_name": "own.json", "columns": {"prompt": "q", "response": "a", "messages": "m"}},
    "none": {"features": {}},
}  # fmt: skip


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Settles a recipe in a folder that has the table where LLaMA-Factory looks for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(TABLE))

    def settle(names, **more):
        given = {"model": "m/x", "dataset": names} | more
        return resolve("sft", {name: Given(value, name, "flag") for name, value in given.items()}, env={})

    return settle


@pytest.mark.parametrize(
    ("names", "dataset", "columns"),
    [
        ("own", ["data/own.json"], {}),
        ("own#5*2", ["data/own.json#5*2"], {}),
        ("asked", ["data/q.jsonl#7"], {"instruction": "q", "output": "a"}),
        ("asked#3", ["data/q.jsonl#3"], {"instruction": "q", "output": "a"}),
        ("chats, own", ["org/chats:main@test", "data/own.json"], {}),
        ("chats@train", ["org/chats:main@train"], {}),
        ("said", ["data/own.json"], {"messages": "said", "label": "good"}),
        ("pairs", ["org/pairs"], {"chosen": "good"}),
        ("texts", ["data/own.json"], {"text": "content"}),
        ("mixed", ["data/own.json"], {"instruction": "q", "output": "a"}),
        ("none, org/other", ["none", "org/other"], {}),
    ],
)
def test_names_in_a_table_of_llama_factory_are_read_by_it(factory, names, dataset, columns):
    made = factory(names)
    assert (made.config.dataset, made.config.columns, made.config.dataset_dir) == (dataset, columns, None)
    told = [spec for spec in names.split(", ") if not spec.startswith(("none", "org/"))]
    assert [note.split(" is ")[0] for note in made.notes[: len(told)]] == told
    assert ["columns are " in note for note in made.notes[len(told) :]] == [True] * bool(columns)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("pictures", "columns.images"),
        ("odd", "tags.user_tag asker"),
        ("scripted", "script_url"),
        ("listed", "no mapping"),
        ("own, asked", "different keys"),
    ],
)
def test_what_a_table_says_beyond_that_is_refused(factory, names, said):
    with pytest.raises(UserError, match=said) as caught:
        factory(names)
    assert "dataset_info.json" in caught.value.where and caught.value.fix


def test_a_file_wins_over_a_table_and_a_named_folder_has_to_have_one(factory, tmp_path):
    (tmp_path / "own").write_text("{}")
    assert factory("own").config.dataset == ["own"]
    (tmp_path / "data").rename(tmp_path / "tables")
    assert factory("asked").config.dataset == ["asked"] and not factory("asked").notes
    made = factory("chats", dataset_dir="tables", eval_dataset="asked", columns="x=y")
    assert (made.config.eval_dataset, made.config.columns) == (["tables/q.jsonl#7"], {"x": "y"})
    with pytest.raises(UserError, match="the table of data sets cannot be read"):
        factory("asked", dataset_dir="nowhere")
