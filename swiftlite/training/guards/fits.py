"""What a model, the settings and a layout ask of each other, known without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftlite.config.methods import PAIRED, SAMPLING
from swiftlite.config.names import PLAIN_MODEL, gives_scores, most_positions
from swiftlite.errors import UserError
from swiftlite.host_memory import check_host_memory
from swiftlite.models.anatomy import check_plain_weights, check_trainable_architecture, why_alone
from swiftlite.models.architecture import auto_class
from swiftlite.parallel.context import check_context_parallel, check_shared_prompts
from swiftlite.parallel.experts import check_expert_parallel
from swiftlite.parallel.stages import check_pipeline
from swiftlite.parallel.tensor_plan import check_tensor_parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig
    from swiftlite.planning.choose import Choice
    from swiftlite.training.needs import Outline

PLAIN_WEIGHTS = f"{PLAIN_MODEL}; --quantization nf4 trains it in 4 bits"


def check_config(config: RunConfig, model_config: PretrainedConfig, plain_weights: str = PLAIN_WEIGHTS) -> None:
    """What no layout or device changes. plain_weights: what to do where they are quantized. Raises UserError."""
    check_trainable_architecture(model_config)
    _check_words(config, model_config)
    if not config.from_scratch:  # which reads none
        check_plain_weights(model_config, f"--model {config.model}", plain_weights)
    _check_length(config, model_config)


def check_result(config: RunConfig, model_config: PretrainedConfig) -> None:
    """Raises UserError where nothing would load a result: of some models that take images too transformers has a class
    for the language model alone, but none for the config that this writes. An adapter is loaded with the whole."""
    known = auto_class(model_config, classifier=config.method == "rm")._model_mapping
    trained = known.get(type(model_config), None)
    if config.tuner == "lora" or trained is None or trained.config_class in known:
        return
    raise UserError(
        f"nothing would load the result: {trained.__name__} is the language model alone, and no Auto class of "
        f"transformers knows the type of its config, {trained.config_class.model_type}",
        where=f"--model {config.model}",
        fix="use --tuner lora, whose adapter is loaded with the model that it names, or another model",
    )


def _check_words(config: RunConfig, model_config: PretrainedConfig) -> None:
    """A classifier has no words to give; but where its embedding is its output too, it can be loaded as a model that
    has."""
    if config.method != "rm" and gives_scores(model_config.architectures):
        raise UserError(
            f"the model gives scores, such as those of a reward model, and {config.method} is about words",
            where=f"--model {config.model}",
            fix="name the model that it was made from; `swiftlite rm` goes on with it",
        )


def check_division(config: RunConfig, layout: Layout, model_config: PretrainedConfig) -> None:
    """What tensor, context and pipeline parallelism ask of a model. Raises UserError naming what would work."""
    check_tensor_parallel(model_config, layout.tp, compile_layers=config.compile)
    check_context_parallel(model_config, layout, config.max_length)
    if config.method in (*PAIRED, *SAMPLING) and config.share_prompt:
        check_shared_prompts(model_config, layout, config.max_length)
    if layout.pp > 1:
        number = config.num_microbatches
        check_pipeline(model_config, layout, config.pipeline_schedule, number, compile_layers=config.compile)


def check_layout(config: RunConfig, layout: Layout, base: PreTrainedModel) -> None:
    """Everything that a layout asks. base: on `meta` will do. Raises UserError where it does not fit."""
    check_division(config, layout, base.config)
    check_expert_parallel(base, layout)
    if alone := why_alone(base):
        check_alone(config, layout, base, alone)


def check_alone(config: RunConfig, layout: Layout, base: PreTrainedModel, why: str) -> None:
    """Refuse what needs a row in several processes, or a step in one piece. Raises UserError."""
    if max(layout.tp, layout.pp, layout.cp, layout.expert_parallel) > 1:
        refused, fix = "tensor, pipeline, context or expert parallelism", "use --parallel fsdp or ddp"
    elif config.optimizer_in_backward:  # it would update weights behind each of them
        refused, fix = "--optimizer-in-backward", "leave it out"
    else:
        return
    raise UserError(
        f"documents of {type(base).__name__} cannot share a row, because of {why}: not possible with {refused}",
        where=config.model,
        fix=fix,
    )


def check_host(config: RunConfig, outline: Outline, choice: Choice) -> None:
    """Raises UserError where a process's states are more than its machine's memory."""
    learns = not outline.evaluates
    check_host_memory(
        outline.on_host(config, choice),
        "the model and its optimizer" if learns else "the model's weights",
        where=f"--model {config.model}",
        fix=f"use {', '.join([*_smaller(config, learns), 'a smaller model'])} or more machines; `swiftlite plan` tells "
        "what takes how much",
    )


def _smaller(config: RunConfig, learns: bool) -> list[str]:
    """What of the flags that make a model's states smaller is not in use yet."""
    full = learns and config.tuner != "lora"
    return [
        *(["--tuner lora"] if full and not config.from_scratch else []),
        *(["--pure-bf16"] if full and not config.pure_bf16 else []),
        *(["--precision bf16"] if not full and config.precision == "fp32" else []),
        *(["--quantization nf4"] if learns and not full and config.quantization == "none" else []),
    ]


def _check_length(config: RunConfig, model_config: PretrainedConfig) -> None:
    longest = most_positions(model_config.get_text_config().to_dict())
    if longest and config.max_length > longest:
        raise UserError(
            f"--max-length {config.max_length} is more than the {longest} positions of the model",
            where=config.model,
            fix=f"give --max-length {longest} or less, or teach it more by --config-overrides (docs/data.md)",
        )
