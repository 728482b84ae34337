"""What single values cannot show: settings that contradict one another."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING

from swiftlite.config.losses import LOSSES, losses_of
from swiftlite.config.methods import PREFERENCE, SAMPLING, evaluates
from swiftlite.config.names import SIZE
from swiftlite.config.rollouts import examination_rules, sampling_rules, teacher_rules
from swiftlite.config.types import NEVER
from swiftlite.errors import UserError, all_in_one

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

Rule = tuple[bool, str, tuple[str, ...], str]  # broken, what is wrong, the settings, what to do


def check_together(config: RunConfig, where: Mapping[str, str]) -> None:
    """Raise one UserError for all contradictions. where: of the values that somebody gave."""
    if config.method in LOSSES:
        losses_of(config.method, config.loss, where.get("loss", "--loss"))
    found = [
        UserError(what, where=", ".join(where[name] for name in names if name in where) or None, fix=fix)
        for broken, what, names, fix in [*_data_rules(config), *_training_rules(config)]
        if broken
    ]
    if found:
        raise all_in_one(found, "things are wrong with the settings")


def _data_rules(config: RunConfig) -> list[Rule]:
    return [
        (
            bool(config.eval_dataset) and config.eval_fraction > 0,
            "--eval-dataset and --eval-fraction both say what to evaluate on",
            ("eval_dataset", "eval_fraction"),
            "keep one of them",
        ),
        (
            config.streaming and config.method != "pretrain",
            "--streaming reads plain texts, which only pretrain takes",
            ("streaming",),
            "leave --streaming out: rows are tokenised once and then read from the cache",
        ),
        (
            config.streaming and config.method == "pretrain" and config.max_steps is None,
            "--streaming does not know how many rows there are",
            ("streaming",),
            "add --max-steps",
        ),
        (
            config.streaming and config.eval_fraction > 0,
            "--eval-fraction cannot hold out rows of a stream",
            ("streaming", "eval_fraction"),
            "give --eval-dataset instead",
        ),
        (
            config.streaming and config.max_samples is not None,
            "--max-samples cannot choose rows of a stream, which has not been read",
            ("streaming", "max_samples"),
            "leave it out: --max-steps says how much is read",
        ),
        (
            config.streaming and config.deduplicate,
            "--deduplicate compares rows with all others, and a stream is read as it is trained",
            ("streaming", "deduplicate"),
            "leave one of them out",
        ),
        (
            config.overlong == "split" and config.method in PREFERENCE,
            f"--overlong split would tear answers apart that {config.method} compares",
            ("overlong",),
            "use truncate, drop or error",
        ),
        (
            config.method == "kto"
            and losses_of("kto", config.loss) == [("kto", 1.0)]
            and config.global_batch_size == 1
            and not config.packing,
            "kto takes its reference point from other rows of a step, but a step has one row",
            ("global_batch_size", "packing"),
            "use --global-batch-size 2 or more, or --loss apo_zero_unpaired, which has no such point",
        ),
        (
            not _is_date(config.template_date),
            f"{config.template_date!r} is not a date",
            ("template_date",),
            "write it as YYYY-MM-DD",
        ),
    ]


def _training_rules(config: RunConfig) -> list[Rule]:
    return [
        *_evaluation_rules(
            config, config.early_stopping_patience is not None, "early_stopping_patience", "--early-stopping-patience"
        ),
        *_evaluation_rules(config, config.result == "best", "result", "--result best"),
        (
            config.result == "best" and config.save_steps == NEVER,
            "--result best is a checkpoint, and --save-steps is never",
            ("result", "save_steps"),
            "leave one of them out",
        ),
        (
            config.min_lr is not None and config.min_lr > config.learning_rate,
            f"--min-lr {config.min_lr} is above --learning-rate {config.learning_rate}",
            ("min_lr", "learning_rate"),
            "lower --min-lr, or raise --learning-rate",
        ),
        (
            config.adapter is not None and config.tuner != "lora",
            f"--adapter goes on with a LoRA adapter, but the tuner is {config.tuner}",
            ("adapter", "tuner"),
            "use --tuner lora, or leave --adapter out",
        ),
        (
            config.lora_plus_ratio != 1 and config.tuner != "lora",
            f"--lora-plus-ratio {config.lora_plus_ratio:g} is of LoRA's B matrices, but the tuner is {config.tuner}",
            ("lora_plus_ratio", "tuner"),
            "use --tuner lora, or leave --lora-plus-ratio out",
        ),
        *_scratch_rules(config),
        *_method_rules(config),
        *_memory_rules(config),
        *_backward_rules(config),
        (
            config.tuner == "freeze"
            and config.trainable_layers == 0
            and not (config.trainable_modules or config.new_tokens)
            and config.method != "rm",  # which trains its score head
            "--tuner freeze with --trainable-layers 0 trains nothing",
            ("trainable_layers",),
            "give --trainable-layers 2 or --trainable-modules",
        ),
        (
            config.lr_scheduler == "wsd"
            and config.warmup_steps is None
            and config.warmup_ratio + config.decay_ratio > 1,
            f"warm-up ({config.warmup_ratio:g}) and decay ({config.decay_ratio:g}) are longer than the run",
            ("warmup_ratio", "decay_ratio"),
            "lower --warmup-ratio or --decay-ratio",
        ),
    ]


def _evaluation_rules(config: RunConfig, on: bool, name: str, flag: str) -> list[Rule]:
    """Of a setting that looks at evaluations. on: it does; flag: as it is written then."""
    return [
        (
            on and not evaluates(config),
            f"{flag} needs evaluations",
            (name,),
            "add --eval-fraction 0.05 or --eval-dataset",
        ),
        (
            on and config.eval_steps == NEVER,
            f"{flag} needs evaluations, and --eval-steps is never",
            (name, "eval_steps"),
            "leave one of them out",
        ),
    ]


def _scratch_rules(config: RunConfig) -> list[Rule]:
    return [
        (
            config.from_scratch and config.tuner != "full",
            f"--from-scratch trains all weights, but the tuner is {config.tuner}",
            ("from_scratch", "tuner"),
            "use --tuner full, or leave --from-scratch out",
        ),
        (
            not config.from_scratch and any(map(SIZE.search, config.config_overrides)),
            "--config-overrides changes the shape of a model whose weights have the one that it has",
            ("config_overrides",),
            "add --from-scratch, or leave it out",
        ),
        (
            bool(config.config_overrides) and config.tuner == "lora",
            "--config-overrides makes another model, and an adapter is loaded with the one that is published",
            ("config_overrides", "tuner"),
            "use --tuner full or freeze, or write it into the config.json of a local copy of the model",
        ),
        (
            config.from_scratch and config.method in (*PREFERENCE, *SAMPLING),
            f"--from-scratch starts with a model that knows no text, which {config.method} cannot teach it",
            ("from_scratch",),
            "leave it out, or train by pretrain or sft first",
        ),
    ]


def _method_rules(config: RunConfig) -> list[Rule]:
    """What only some of the methods can do."""
    return [
        (
            config.train_on != "answers" and config.method != "sft",
            f"--train-on {config.train_on} is for sft's conversations, but the method is {config.method}",
            ("train_on",),
            "leave it out",
        ),
        (
            config.neftune_noise_alpha > 0 and config.method in (*PREFERENCE, *SAMPLING),
            f"--neftune-noise-alpha is scaled by the length of a text, and {config.method} compares answers of several "
            "lengths to one prompt, whose noise would be part of what is compared",
            ("neftune_noise_alpha",),
            "leave it out, or train by sft or pretrain first",
        ),
        *sampling_rules(config),
        *examination_rules(config),
        *teacher_rules(config),
        (
            bool(config.router_aux_loss_coef) and config.method == "rm",
            "--router-aux-loss-coef weighs a loss that transformers has for language models alone, and rm trains a "
            "model that gives scores",
            ("router_aux_loss_coef",),
            "leave it out",
        ),
    ]


def _memory_rules(config: RunConfig) -> list[Rule]:
    """What saves memory or time, and the settings that it does not go with."""
    return [
        (
            config.quantization != "none" and config.tuner != "lora",
            f"--quantization {config.quantization} packs weights that are not trained, but the tuner is {config.tuner}",
            ("quantization", "tuner"),
            "use --tuner lora, or leave --quantization out",
        ),
        (
            config.quantization != "none" and config.tensor_parallel_size > 1,
            "tensor parallelism would cut through numbers that share a scale",
            ("quantization", "tensor_parallel_size"),
            "leave --tensor-parallel-size out and use --parallel fsdp, which divides such weights by rows",
        ),
        (
            config.quantization != "none" and config.dora,
            "--dora measures the rows of weights that --quantization has rounded",
            ("quantization", "dora"),
            "leave one of them out",
        ),
        (
            config.pure_bf16 and config.precision in ("fp32", "fp16"),
            f"--pure-bf16 keeps and computes in bf16, but the precision is {config.precision}",
            ("pure_bf16", "precision"),
            "leave one of them out",
        ),
        (
            config.kernels == "liger" and config.tensor_parallel_size > 1,
            "Liger's kernels take whole weights, which tensor parallelism divides",
            ("kernels", "tensor_parallel_size"),
            "use --kernels none",
        ),
        *_compile_rules(config),
        *_fp8_rules(config),
        *_qat_rules(config),
        (
            config.activation_checkpointing == "selective" and config.pipeline_schedule == "zero-bubble",
            "zero-bubble runs through a layer's backward pass twice, and --activation-checkpointing selective keeps "
            "results for one",
            ("activation_checkpointing", "pipeline_schedule"),
            "use --activation-checkpointing full or none, or --pipeline-schedule interleaved-1f1b",
        ),
    ]


def _compile_rules(config: RunConfig) -> list[Rule]:
    return [
        (
            config.kernels == "liger" and config.compile,
            "--compile and --kernels liger fuse the same operations",
            ("kernels", "compile"),
            "leave one of them out",
        ),
        (
            config.sequence_parallel == "always" and config.compile,
            "torch.compile cannot hand on rows of changing length that ranks divide by tokens",
            ("sequence_parallel", "compile"),
            "use --sequence-parallel auto, which leaves tokens whole under --compile, or leave --compile out",
        ),
        (
            config.activation_checkpointing == "offload" and config.compile,
            "compiled layers save their weights beside their inputs, and --activation-checkpointing offload moves both",
            ("activation_checkpointing", "compile"),
            "use --activation-checkpointing full, or leave --compile out",
        ),
    ]


def _qat_rules(config: RunConfig) -> list[Rule]:
    on, name = config.qat != "none", f"--qat {config.qat}"
    return [
        (
            on and config.tuner == "lora",
            f"{name} rounds weights that are trained, and LoRA's are the base's and its own together",
            ("qat", "tuner"),
            "use --tuner full, or leave --qat out",
        ),
        (
            on and config.tensor_parallel_size > 1,
            f"{name} takes whole rows of matrices, which tensor parallelism divides",
            ("qat", "tensor_parallel_size"),
            "use --parallel fsdp, or --qat none",
        ),
        (
            on and (config.compile or config.fp8 != "none"),
            f"{name} makes the products of layers itself, and --compile and --fp8 do",
            ("qat", "compile", "fp8"),
            "leave one of them out",
        ),
        (
            on and config.pipeline_schedule == "zero-bubble",
            "zero-bubble takes the backward pass of a product apart, and --qat makes it in one",
            ("qat", "pipeline_schedule"),
            "use --pipeline-schedule interleaved-1f1b, or leave --qat out",
        ),
    ]


def _fp8_rules(config: RunConfig) -> list[Rule]:
    on = config.fp8 != "none"
    return [
        (
            on and config.tuner == "lora",
            "--fp8 multiplies matrices that are trained, and LoRA trains only adapters, which are too small for it",
            ("fp8", "tuner"),
            "use --tuner full, or leave --fp8 out",
        ),
        (
            on and config.tensor_parallel_size > 1,
            "--fp8 takes whole matrices, which tensor parallelism divides",
            ("fp8", "tensor_parallel_size"),
            "leave --tensor-parallel-size out and use --parallel fsdp",
        ),
        (
            on and config.precision in ("fp32", "fp16"),
            f"--fp8 goes with bf16 for all other products, but the precision is {config.precision}",
            ("fp8", "precision"),
            "use --precision bf16",
        ),
    ]


def _backward_rules(config: RunConfig) -> list[Rule]:
    """What an update in the backward pass cannot do: look at all gradients, or wait for more of them."""
    on, flag = config.optimizer_in_backward, "--optimizer-in-backward"
    return [
        (
            on and config.max_grad_norm > 0,
            f"{flag} updates weights before the norm of all gradients is known, so it cannot clip them",
            ("optimizer_in_backward", "max_grad_norm"),
            "add --max-grad-norm 0",
        ),
        (
            on and config.pipeline_parallel_size > 1,
            f"{flag} takes the gradient of one forward, but a pipeline has several under way",
            ("optimizer_in_backward", "pipeline_parallel_size"),
            "leave --pipeline-parallel-size out and use --parallel fsdp",
        ),
        (
            on and config.gradient_accumulation_steps != 1,
            f"{flag} takes the gradient of one forward, but a step has {config.gradient_accumulation_steps}",
            ("optimizer_in_backward", "gradient_accumulation_steps", "global_batch_size", "micro_batch_size"),
            "give --gradient-accumulation-steps 1, or a --global-batch-size of --micro-batch-size times the data ranks",
        ),
        (
            on and config.precision == "fp16",
            f"{flag} updates weights before fp16 gradients are known not to overflow",
            ("optimizer_in_backward", "precision"),
            "use --precision bf16",
        ),
        (
            on and config.on_nonfinite == "skip",
            f"{flag} updates weights before all gradients are known to be finite, so it cannot skip a step",
            ("optimizer_in_backward", "on_nonfinite"),
            "leave one of them out",
        ),
    ]


def _is_date(text: str | None) -> bool:
    try:
        return datetime.date.fromisoformat(text or "").isoformat() == text
    except ValueError:
        return False
