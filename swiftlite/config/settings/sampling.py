"""The settings of methods that learn from the model's own answers: who rewards them, and how they are sampled."""

from typing import Annotated, Literal

from pydantic import BaseModel

from swiftlite.config.setting import REINFORCEMENT, flag
from swiftlite.config.types import (
    ON_ALONE,
    Count,
    Names,
    OptionalNotNegative,
    OptionalPositive,
    OptionalText,
    Positive,
    Spelling,
    Whole,
    switch,
)


class SamplingSettings(BaseModel):
    """A part of `RunConfig`."""

    reward: Names = flag(
        [],
        REINFORCEMENT,
        "What rewards answers, of grpo those that it learns from, of sft, dpo and kto those to held-out prompts: "
        "exact_match, contains, last_number, math_equal, think_format, soft_overlong, repetition, your own functions "
        "as FILE.py:NAME or PACKAGE.MODULE.NAME, reward models by folder or hub id; each with *WEIGHT if it is not 1.",
        "reward_funcs",
        shown="needed by grpo",
        metavar="NAME ...",
    )
    tools: Names = flag(
        [], REINFORCEMENT, "Functions that the model may call while it answers, FILE.py:NAME or PACKAGE.MODULE.NAME; "
        "of a class its methods, with an object for each answer.",
        shown="none", metavar="NAME ...",
    )  # fmt: skip
    tool_rounds: Count = flag(
        8, REINFORCEMENT, "How often an answer may call them; several calls at once count once.",
        "max_tool_calling_iterations",
    )  # fmt: skip
    samples: Count = flag(
        8, REINFORCEMENT, "Answers to each prompt, which are compared with one another.", "num_generations",
        "grpo_samples", "num_generations_per_prompt",
    )  # fmt: skip
    max_new_tokens: Count = flag(
        256, REINFORCEMENT, "Longest answer in tokens; prompts have the rest of `--max-length`.",
        "max_completion_length", "max_generated_tokens",
    )  # fmt: skip
    temperature: Positive = flag(
        1.0, REINFORCEMENT, "Of the distribution that answers are drawn from, and that is trained; above 1 is livelier."
    )
    eval_samples: Count = flag(1, REINFORCEMENT, "Answers to each prompt that is evaluated.", "num_generations_eval")
    eval_temperature: OptionalNotNegative = flag(
        None, REINFORCEMENT, "Of the answers that are evaluated; 0 takes the likeliest token each time.",
        shown="0; of several answers --temperature",
    )  # fmt: skip
    minibatches: Count = flag(
        1, REINFORCEMENT, "Parts of a step's prompts that are learnt from one after the other, each by an update.",
        "num_minibatches", "num_mini_batches",
    )  # fmt: skip
    update_epochs: Count = flag(
        1, REINFORCEMENT, "How often a step's answers are learnt from.", "num_iterations", "ppo_epochs",
        "num_ppo_epochs",
    )  # fmt: skip
    epsilon: OptionalPositive = flag(
        None, REINFORCEMENT, "Of later updates of a step: how far a token's probability may have fallen since it "
        "was drawn (0.2: by a fifth) and still be lowered.", "epsilon_low", "clip_ratio_low", "clip_ratio", "cliprange",
        "eps_clip", "ratio_clip_min",
        shown="0.2; 3e-4 for gspo",
    )  # fmt: skip
    epsilon_high: OptionalPositive = flag(
        None, REINFORCEMENT, "The same of what has risen and is raised.", "clip_ratio_high", "ratio_clip_max",
        shown="--epsilon; 4e-4 for gspo, 5 for cispo",
    )  # fmt: skip
    scale_rewards: Annotated[Literal["group", "none"], Spelling({"true": "group", "false": "none"})] = flag(
        "group", REINFORCEMENT, "Divide rewards by how much they differ among the answers to a prompt, or do not.",
        "normalize_rewards", "norm_adv_by_std_in_grpo", phrases={"no_advantage_std_norm": {ON_ALONE: "none"}},
    )  # fmt: skip
    cut_answers: Annotated[Literal["learn", "skip"], Spelling(switch("skip", "learn"))] = flag(
        "learn", REINFORCEMENT, "Learn answers without an end before `--max-new-tokens` as others, or skip them.",
        "mask_truncated_completions", "overlong_filter", "overlong_filtering",
    )  # fmt: skip
    max_resample_times: Whole = flag(
        0, REINFORCEMENT, "How often other prompts are asked in place of those whose answers all have the same reward, "
        "which teach nothing (DAPO's dynamic sampling).",
    )  # fmt: skip
    answers_at_once: Count = flag(64, REINFORCEMENT, "Answers that a process samples at a time.")
    engine_url: Names = flag(
        [], REINFORCEMENT, "vLLM servers that give the answers in place of the model itself, and take its weights over "
        "before they do.", "vllm_server_base_url", shown="none: the model answers itself", metavar="URL ...",
    )  # fmt: skip
    engine_folder: OptionalText = flag(
        None, REINFORCEMENT, "Where weights lie for them, a folder that they see under the same name; best in memory.",
        shown="engine/ in --output-dir", metavar="FOLDER",
    )  # fmt: skip
    engine_ahead: bool = flag(
        False, REINFORCEMENT, "Have the next step's answers given while a step is learnt, by weights that are one step "
        "older.", "async_generate", "async_train",
    )  # fmt: skip
    engine_ratio_cap: Positive = flag(
        2.0, REINFORCEMENT, "How many times a token counts at most that the model finds likelier than the engine did "
        "(truncated importance sampling).", "vllm_importance_sampling_cap", "rollout_is_threshold",
        "tis_imp_ratio_cap",
    )  # fmt: skip
