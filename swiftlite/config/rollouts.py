"""What has to hold between the settings of methods that learn from the model's own answers, or from a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftlite.config.losses import policy_loss, weighs_by_probability
from swiftlite.config.methods import PREFERENCE, SAMPLING, answers, evaluates, is_held, prompt_limit

if TYPE_CHECKING:
    from swiftlite.config.checks import Rule
    from swiftlite.config.schema import RunConfig


def sampling_rules(config: RunConfig) -> list[Rule]:
    """Of methods whose answers are the model's own."""
    if config.method not in SAMPLING:
        return []
    return [
        (
            config.samples == 1 and bool(config.reward),
            "of one answer to a prompt nobody can say whether it is better than others",
            ("samples",),
            "give --samples 2 or more",
        ),
        (
            not config.reward and evaluates(config),
            "evaluations are of rewards, and nothing says how answers are rewarded",
            ("eval_dataset", "eval_fraction"),
            "add --reward last_number or another, or leave them out",
        ),
        (
            config.overlong in ("truncate", "split"),
            f"--overlong {config.overlong} would make another question of a prompt",
            ("overlong",),
            "use drop or error",
        ),
        (
            config.reference == "precompute",
            f"--reference precompute scores answers before training, and {config.method} has none then",
            ("reference",),
            "use --reference model, or leave it out",
        ),
        (
            config.optimizer_in_backward,
            "--optimizer-in-backward takes the gradient of one forward, and nobody knows how many the answers need",
            ("optimizer_in_backward",),
            "leave it out",
        ),
        *_update_rules(config),
    ]


def examination_rules(config: RunConfig) -> list[Rule]:
    """Of runs in which the model is asked anything."""
    if not answers(config):
        return []
    return [
        (
            config.eval_samples > 1 and config.eval_temperature == 0,
            "--eval-temperature 0 takes the likeliest token each time, so that --eval-samples are all the same",
            ("eval_samples", "eval_temperature"),
            "leave one of them out",
        ),
        (
            prompt_limit(config) < 1,
            f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt in --max-length {config.max_length}",
            ("max_new_tokens", "max_length"),
            f"give --max-length {2 * config.max_new_tokens}"
            + (f", or --max-new-tokens {config.max_length // 2}" if config.max_length > 1 else ""),
        ),
        *_engine_rules(config),
    ]


def address(url: str) -> str:
    """Of a server, without what OpenAI's clients want behind it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _engine_rules(config: RunConfig) -> list[Rule]:
    """Of runs whose answers engines give."""
    if not config.engine_url:
        return []
    return [
        (
            any(not url.startswith(("http://", "https://")) for url in config.engine_url),
            "--engine-url is the address of a server",
            ("engine_url",),
            "write http://HOST:PORT",
        ),
        (
            len({address(url) for url in config.engine_url}) < len(config.engine_url),
            "--engine-url names a server twice",
            ("engine_url",),
            "name each once: it takes as many prompts at once as it has room for",
        ),
        (
            config.qat != "none",
            "--qat rounds weights in products, and an engine would answer by weights that are not",
            ("engine_url", "qat"),
            "leave one of them out",
        ),
    ]


def _update_rules(config: RunConfig) -> list[Rule]:
    """Of what a step's answers are learnt by."""
    return [
        (
            config.minibatches > config.global_batch_size,
            f"--minibatches {config.minibatches} divides the prompts of a step, of which there are "
            f"{config.global_batch_size}",
            ("minibatches", "global_batch_size"),
            "lower the first, or raise --global-batch-size",
        ),
        (
            config.teacher is not None and policy_loss(config) == "gspo",
            "--loss gspo counts an answer's tokens alike, and --teacher tells of each",
            ("loss", "teacher"),
            "use --loss dapo, or leave --teacher out",
        ),
    ]


def teacher_rules(config: RunConfig) -> list[Rule]:
    """Of a second model whose probabilities are learnt."""
    if config.teacher is None:
        return []
    return [
        (
            config.method in PREFERENCE,
            f"--teacher is learnt from token by token, and {config.method} compares whole answers",
            ("teacher",),
            "leave it out, or train by sft, pretrain or grpo",
        ),
        (
            is_held(config),
            "--beta holds the model to what it was, and --teacher draws it away",
            ("teacher", "beta"),
            "leave one of them out",
        ),
        (
            weighs_by_probability(config),
            "--loss dft weighs the tokens of a text by their probability, and --teacher says itself what each counts",
            ("loss", "teacher"),
            "leave one of them out",
        ),
        (
            bool(config.new_tokens),
            "--teacher knows nothing of --new-tokens",
            ("teacher", "new_tokens"),
            "leave one of them out",
        ),
    ]
