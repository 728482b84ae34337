"""Blocks and files of other tools that stand for settings: axolotl's `datasets` and DeepSpeed's JSON."""

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


def test_data_sets_to_test_on_are_those_of_an_evaluation(recipe):
    made = resolve(None, {}, recipe("datasets:\n" + CHAT + "test_datasets:\n" + CHAT.replace("/a", "/b")), env={})
    assert (made.config.dataset, made.config.eval_dataset) == (["org/a"], ["org/b"])


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("  - path: org/a\n    type: alpaca\n", "of type alpaca", "`dataset: org/a`"),
        ("  - path: org/a\n    type: completion\n    field: said\n", "of type completion", "`swiftlite pretrain`"),
        ("  - path: org/a\n    split: test\n    type: llama3.ultra\n", "of type llama3.ultra", "`dataset: org/a@test`"),
        ("  - path: org/a\n    type:\n", "of no type", "`dataset: org/a`"),
        ("  - path: org/a\n    type: {format: x}\n", "of a type of its own", "`columns`"),
        ("  - type: chat_template\n", "no path", "NAME_OR_PATH"),
        (CHAT + "    split: train[:5%]\n", "train[:5%]", "`dataset: org/a@train#1000`"),
        (CHAT + "    roles_to_train: [user]\n", "roles_to_train", "`dataset: org/a`"),
        (CHAT + "    train_on_eos: all\n", "train_on_eos", "`dataset: org/a`"),
        (CHAT + "    message_property_mappings: {role: who}\n", "message_property_mappings", "`dataset: org/a`"),
        (CHAT + "    roles: {user: [assistant]}\n", "roles", "`dataset: org/a`"),
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
