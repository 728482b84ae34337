"""The training methods, and what some of them have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

Method = Literal["sft", "pretrain", "dpo", "kto", "rm", "grpo"]

PAIRED = ("dpo", "rm")  # compare two answers to one prompt
PREFERENCE = (*PAIRED, "kto")
TOKEN_ACCURACY = "token_accuracy"  # a metric of methods that learn given tokens
COMPARED = ("chosen", "rejected", "accuracy", "margin")  # what their metrics have as rewards/NAME
SAMPLING = ("grpo",)  # learn from answers that the model itself gives to each step's prompts
EXAMINED = ("sft", "dpo", "kto", *SAMPLING)  # whose model may answer held-out prompts, and its answers be rewarded
EXAMINED_BY = (  # beside functions
    "max_new_tokens", "tool_rounds", "answers_at_once", "eval_samples", "eval_temperature",
)  # fmt: skip
KNOWN_REWARDS = (  # functions that come along
    "exact_match", "contains", "last_number", "math_equal", "think_format", "soft_overlong", "repetition",
)  # fmt: skip
PROMPT = ("prompt", "completion")  # of a row, which are no columns to the functions that reward answers, as in TRL
GIVEN = ("prompts", "completions", "completion_ids")  # what they get beside the columns
EXPECTED = "expected"  # what a row itself answers, for those that ask for it and find no such column
LIMIT = "max_new_tokens"  # of an answer, likewise
ENVIRONMENTS = "environments"  # of tools that are a class the object of each answer, likewise


def pack_capacity(config: RunConfig) -> int:
    """Tokens that a pack may hold: of the methods that compare two answers, as many as a pair may have."""
    return config.max_length * (2 if config.method in PAIRED else 1)


def prompt_limit(config: RunConfig) -> int:
    """Tokens that a prompt may have which is answered while training."""
    return config.max_length - config.max_new_tokens


def step_packs(config: RunConfig) -> int:
    """Packs of a step; at most, where they hold as many answers as the prompts get."""
    return config.global_batch_size * (config.samples if config.method in SAMPLING else 1)


def switches_adapters_off(config: RunConfig) -> bool:
    """Whether the trained model without its adapters is the reference, where one is wanted."""
    return config.reference is None and config.tuner == "lora" and config.adapter is None


def is_held(config: RunConfig) -> bool:
    """Whether a model that learns from its own answers is held to what it began as, which is there while training."""
    return config.method in SAMPLING and config.beta > 0


def evaluates(config: RunConfig) -> bool:
    """Whether rows are held out."""
    return bool(config.eval_dataset or config.eval_fraction)


def examines(config: RunConfig) -> bool:
    """Whether evaluations are of answers that the model gives to held-out prompts, beside a loss or alone."""
    return config.method in EXAMINED and bool(config.reward) and evaluates(config)


def answers(config: RunConfig) -> bool:
    """Whether the model is asked anything in the course of a run, or of an evaluation."""
    return config.method in SAMPLING or examines(config)


def as_prompts(config: RunConfig) -> RunConfig:
    """The config by which rows are prompts. Those that cannot be asked are counted: they are none that would be learnt
    wrongly, and where a part of all is held out, most of them are not even asked."""
    others = {"overlong": "drop", "on_bad_row": "skip", "packing": False}
    return config.model_copy(update={"method": SAMPLING[0], **others})


def passes(config: RunConfig) -> int:
    """How often what a step learns from goes through the model to be learnt from."""
    return config.update_epochs if config.method in SAMPLING else 1


def updates(config: RunConfig) -> int:
    """Of a step, where its prompts are enough for all of them."""
    return passes(config) * (config.minibatches if config.method in SAMPLING else 1)


def learns_again(config: RunConfig) -> bool:
    """Whether some update of a step learns from answers of weights that are not there any more."""
    return updates(config) > 1


def teacher_share(config: RunConfig) -> float:
    """What a teacher counts who tells of the model's own answers, 0 without one; all where nothing rewards them."""
    if config.teacher is None:
        return 0.0
    return config.teacher_weight if config.reward else 1.0


def examined_at(config: RunConfig) -> float:
    """The temperature of answers that are evaluated: several would all be the same at 0."""
    if config.eval_temperature is not None:
        return config.eval_temperature
    if evaluates_as_it_samples(config):
        return config.temperature
    return 1.0 if config.eval_samples > 1 else 0.0


def evaluates_as_it_samples(config: RunConfig) -> bool:
    """Whether answers that are evaluated are drawn at the temperature of those that are learnt from."""
    return config.method in SAMPLING and config.eval_samples > 1 and config.eval_temperature is None


def asked_at_once(config: RunConfig) -> int:
    """Prompts of a step of an evaluation."""
    return max(config.global_batch_size, config.answers_at_once)


def keeps_second(config: RunConfig) -> bool:
    """Whether the reference is surely a second model, which is there while training."""
    return config.reference == "model" or (is_held(config) and not switches_adapters_off(config))
