"""Names that other tools have and the schema lacks: what to do here instead, and which of them change nothing here.

A name that means what a setting of the schema means is an alias there. Here stand the rest, of ms-swift, Megatron,
transformers, TRL, LLaMA-Factory, axolotl and torchtune; in `trainers` those of others. `{precision: bf16}` is shown as
a flag or as a recipe's line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swiftlite.config.others import trainers
from swiftlite.config.others.idle import EVERY, IDLE, IDLE_KEYS, WHOLE_STATE

SETTING = re.compile(r"\{(\w+)(?:: ([^}]*))?\}")

_OUT = "leave it out: "
_GALORE = _OUT + "optimizers are AdamW and Muon; {optimizer: adamw_8bit} and {optimizer: muon} save memory"
_MUON = _OUT + "{optimizer: muon} has a momentum of 0.95 (Nesterov's), five steps, and the scale of AdamW's updates"
_BY_CONFIG = _OUT + "the model's config.json says it"
_WANDB = "write {report_to: wandb}, with {run_name}; WANDB_PROJECT and WANDB_ENTITY are read from the environment"
_FSDP = _OUT + "{parallel: fsdp} takes {sharding}, {offload} and {fsdp_min_params}"
_STAGES = _OUT + "stages are divided so that each has as much to do"
_COUNT = "write #1000 behind a data set's name, for 1000 of its rows"
_WEIGHTS = "write weights behind the losses' names: {loss: sigmoid:0.8 sft:1.0}"
_SPLIT = "write @SPLIT behind the data set's name: {dataset: NAME@train}, {eval_dataset: NAME@test}"
_HOW_OFTEN = "write a number of steps, a part of the run such as 0.1, `epoch`, or `epoch/4` for four times an epoch"
_FILE = "there is no such file;"
_IDENTITY = "write {model: NAME} for a model, {placeholders: name=NAME} for rows about itself"
_ONE_SAMPLER = "write {method: grpo} with {reward: FILE.py:NAME}, the method here that learns from its own answers"
_ENGINE = "start `vllm serve MODEL` and write {engine_url: http://HOST:8000}; without, the model answers itself"
_OWN_REWARD = "write a function that rewards so, and {reward: FILE.py:NAME}"
_TEACHER = "write {teacher: MODEL}, with {teacher_weight} and {teacher_tokens} for how much is learnt of it"
_VISION = _OUT + "swiftlite trains the language model"

# name -> what to do instead. A `key: value` alone is what to write.
INSTEAD: dict[str, str] = trainers.INSTEAD | {
    **dict.fromkeys(
        ("no_gradient_checkpointing", "no_activation_checkpointing", "disable_gradient_checkpointing"),
        "activation_checkpointing: none",
    ),
    "enable_activation_checkpointing": "activation_checkpointing: full",
    "dataloader_drop_last": _OUT + "the last step of an epoch has what is left of its rows",
    "use_cpu": _OUT + "with CUDA_VISIBLE_DEVICES empty a run is on the CPU",
    "full_determinism": _OUT + "on one CPU a run repeats bit for bit; kernels of GPUs may add in another order",
    "use_hf": "download the model by ModelScope, and write {model: FOLDER}",
    "packing_length": _OUT + "a pack holds {max_length} tokens",
    **dict.fromkeys(
        ("interleave_prob", "interleave_probs", "mix_strategy"),
        "write *WEIGHT behind a data set's name: {dataset: a*2,b*0.5}",
    ),
    "delta": _OUT + "ratios are bounded by {epsilon} and {epsilon_high}",
    "importance_sampling_level": "loss: gspo",
    "reward_weights": "write weights behind the functions: {reward: rewards.py:NAME*0.5}",
    **dict.fromkeys(
        ("generation_batch_size", "steps_per_generation"),
        "write {global_batch_size} for the prompts that are answered at a time, {minibatches} for the updates by them",
    ),
    **dict.fromkeys(
        ("use_bias_correction_kl", "kl_in_reward", "use_kl_in_reward", "kl_coef"),
        _OUT + "the KL is a term of the loss, as in GRPO's paper; {beta: 0.04} weighs it",
    ),
    **dict.fromkeys(
        ("dynamic_sample", "dynamic_filtering", "dynamic_filtering_reward_range", "filter_groups"),
        "write {max_resample_times: 3}, and other prompts are asked in place of those whose answers have the same "
        "reward; without, these teach nothing, and are counted",
    ),
    **dict.fromkeys(
        ("eval_causal_lm_metrics", "do_causal_lm_eval"),
        "name what judges answers to held-out rows: {reward: exact_match}; `swiftlite eval` tells perplexity",
    ),
    "external_plugins": "write the functions of the file: {reward: FILE.py:NAME}",
    **dict.fromkeys(
        ("soft_cache_length", "soft_max_length", "overlong_buffer"),
        "write {reward: soft_overlong}, which begins a fifth before {max_new_tokens}, or a function of your own",
    ),
    **dict.fromkeys(("non_stop_penalty", "reward_clip_range"), _OWN_REWARD),
    **dict.fromkeys(
        ("use_vllm", "use_transformers_paged", "fast_inference", "gpu_memory_utilization",
         "max_lora_rank", "colocate_all_models"),
        _ENGINE,
    ),
    "rollout_importance_sampling_threshold": "engine_ratio_cap: 2",
    "use_weighting": _OUT + "pairs count alike",
    "recompute_modules": "activation_checkpointing: selective",
    "liger_kernel_config": "kernels: liger",
    "train_sampling_strategy": _OUT + "{packing: true} leaves hardly any padding",
    "optim_args": "write {adam_beta1}, {adam_beta2} and {adam_epsilon}",
    "virtual_pipeline_model_parallel_size": "pipeline_schedule: interleaved-1f1b",
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), _STAGES),
    **dict.fromkeys(("fp8_format", "fp8_recipe"), "write {fp8: rowwise}"),
    **dict.fromkeys(("no_load_optim", "no_load_rng"), "write {model: RUN/model}, which starts from a run's weights"),
    **dict.fromkeys(("moe_expert_capacity_factor", "moe_token_drop_policy"), _OUT + "experts drop no token"),
    "lr_wsd_decay_iters": "write {decay_ratio: 0.1}, the part of the run that decays",
    **dict.fromkeys(
        ("project", "project_name", "swanlab_project"),
        "write {report_to: wandb} or another; its own variables name it",
    ),
    "save_strategy": "write {save_steps: 500} or {save_steps: epoch}; checkpoints/best is kept in any case",
    "saves_per_epoch": "save_steps: epoch/2",
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"),
        "write {eval_steps: 500} or {eval_steps: epoch}; there is no evaluation without {eval_dataset} or "
        "{eval_fraction}",
    ),
    "evals_per_epoch": "eval_steps: epoch/2",
    "logging_strategy": "log_steps: 1",
    **dict.fromkeys(
        ("gpus", "num_gpus", "n_gpus", "ngpus", "gpus_per_node", "nproc", "num_processes", "world_size",
         "ray_num_workers"),
        "nproc_per_node: 2",
    ),
    "use_ray": _OUT + "{nproc_per_node: 2} starts the processes",
    "device": _OUT + "CUDA_VISIBLE_DEVICES says which GPUs there are",
    "device_map": _OUT + "{parallel: fsdp} divides a model that is too large for one GPU",
    **dict.fromkeys(("fsdp_config", "fsdp_version", "fsdp_transformer_layer_cls_to_wrap", "dp_shard_size"), _FSDP),
    "fp8_enable_fsdp_float8_all_gather": _OUT + "weights are gathered as {precision} says",
    "use_distributed_optimizer": "sharding: grad_op",
    **dict.fromkeys(
        ("optimizer_cpu_offload", "optimizer_offload_fraction"),
        "write {optimizer: paged_adamw} (moments in the host's memory) or {offload: cpu} (weights too)",
    ),
    "use_precision_aware_optimizer": "write {optimizer: adamw_8bit} or {pure_bf16: true}",
    "num_layers_per_virtual_pipeline_stage": "pipeline_schedule: interleaved-1f1b",
    "recompute_activations": "activation_checkpointing: selective",
    **dict.fromkeys(("recompute_method", "recompute_num_layers"), "activation_checkpointing: full"),
    **dict.fromkeys(
        ("batch_size", "bs"),
        "write {micro_batch_size: 1} for one forward pass of a GPU, {global_batch_size: 8} for a step of all",
    ),
    **dict.fromkeys(
        ("batch_size_per_device", "per_gpu_batch_size", "device_batch_size", "mbs"), "micro_batch_size: 1"
    ),
    "gbs": "global_batch_size: 8",
    **dict.fromkeys(("accumulate_grad_batches", "acc_steps"), "gradient_accumulation_steps: 4"),
    "auto_find_batch_size": "write {micro_batch_size: 1}; `swiftlite plan` says what fits",
    "lr_scheduler_kwargs": "write {min_lr: 1e-6} for a least rate, {decay_ratio: 0.1} for wsd's decay",
    "lr_decay_iters": _OUT + "the rate decays over the whole run, as {max_steps} or {epochs} says",
    "cosine_constant_lr_ratio": _OUT + "{lr_scheduler: wsd} has a constant part",
    **dict.fromkeys(("muon_momentum", "muon_num_ns_steps", "muon_use_nesterov"), _MUON),
    **dict.fromkeys(
        ("loraplus_lr_embedding", "lorap_emb_lr"),
        _OUT + "{lora_plus_ratio} counts for the adapter of an embedding too",
    ),
    "label_smoothing_factor": _OUT + "there is no smoothing of tokens; {label_smoothing} is of preferences",
    "data_seed": "write {seed}, which decides the order of rows too",
    "group_by_length": _OUT + "{packing: true} leaves hardly any padding",
    "packing_strategy": "write {packing: true}; {overlong: split} keeps what is longer than a pack",
    **dict.fromkeys(("model_name", "model_author"), _IDENTITY),
    "loss_scale": "write {train_on: last-answer} or another; a message that is not to be learnt has \"train\": false",
    "special_tokens": "write {new_tokens: TOKEN} for tokens the tokenizer lacks; the others are the model's",
    "new_special_tokens": "new_tokens: TOKEN",
    "resize_vocab": "write {new_tokens: TOKEN}, which makes room for them",
    "tokenizer_model": "tokenizer: FOLDER",
    **dict.fromkeys(("max_train_samples", "eval_iters", "max_eval_samples", "max_eval_step"), _COUNT),
    "datasets": "write {dataset: PATH}, several with commas; keys of your own by {columns}",
    **dict.fromkeys(("dataset_train_split", "dataset_test_split", "dataset_mixer_list_splits", "eval_split"), _SPLIT),
    "dataset_config": "write :SUBSET behind the data set's name: {dataset: NAME:SUBSET}",
    "dataset_streaming": "streaming: true",
    "dataset_text_field": "columns: text=NAME",
    "test_datasets": "eval_dataset: PATH",
    **dict.fromkeys(("tokenized_path", "cached_dataset"), "cache_dir: PATH"),
    "data_path": "write {dataset: PATH}, texts as they are, not tokens of preprocess_data.py",
    "split": "eval_fraction: 0.05",
    **dict.fromkeys(("curriculum_sampling", "sample_packing_sequentially"), "shuffle: false"),
    "num_labels": "use `swiftlite rm` with pairs of answers",
    **dict.fromkeys(
        ("reward_model", "reward_model_path", "reward_model_name_or_path", "reward_pretrain"),
        "use `swiftlite rm` with pairs of answers; grpo takes one that is trained: {reward: FOLDER}",
    ),
    "pretraining_dataset": "use `swiftlite pretrain` with {dataset: PATH}; {streaming: true} reads while it trains",
    "strict": "write {on_bad_row: error} to stop at a bad row, {on_bad_row: skip} to leave it out",
    "load": "write {model: FOLDER}, with a model as transformers saves it; {resume: auto} goes on with a run",
    **dict.fromkeys(
        ("ref_model", "ref_pretrain"),
        _OUT + "the reference is the model as it was before training; {reference: model} keeps a copy",
    ),
    "sync_ref_model": _OUT + "the reference stays as it was",
    "loss_weights": _WEIGHTS,
    **dict.fromkeys(
        ("max_prompt_length", "truncation_mode"),
        _OUT + "of a pair too long for {max_length} the prompt is cut first; {overlong: drop} leaves such rows out",
    ),
    "max_model_len": _OUT + "the model's config.json says what it can, {max_length} what is trained",
    "rope_scaling": "write it into {config_overrides}, or under {tuner: lora} into the config.json of a local model",
    "output_router_logits": "write {router_aux_loss_coef: 0.001} to balance routers, 0 not to",
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "ffn_hidden_size",
         "model_kwargs", "shift_attn", "s2_attention"),
        _BY_CONFIG,
    ),
    "save_adapter_weights_only": _OUT + WHOLE_STATE,
    **dict.fromkeys(("auto_resume_from_checkpoints", "resume_only_model"), "resume: auto"),
    "finetune": "write {resume: auto}, which goes on with a run",
    "merge_lora": "use `swiftlite export` after training, which merges",
    "do_predict": "use `swiftlite infer` after training",
    "predict_with_generate": "name what judges answers to the rows that are held out: {reward: exact_match}",
    "generation_max_length": "write {max_new_tokens} for the tokens that an answer may have",
    "generation_num_beams": _OUT + "an answer is of the likeliest token each time, or drawn ({eval_samples})",
    "do_eval": _OUT + "name no {eval_dataset} and no {eval_fraction}",
    "do_train": "use `swiftlite eval` or `swiftlite infer`",
    "hub_token": "log in by `hf auth login`, or set HF_TOKEN: settings are saved where others read them",
    **dict.fromkeys(("wandb_project", "wandb_entity", "wandb_name", "wandb_watch", "wandb_log_model"), _WANDB),
    **dict.fromkeys(("tensorboard_dir", "logging_dir"), "report_to: tensorboard"),
    "use_tensorboard": "report_to: tensorboard",
    **dict.fromkeys(("quant_method", "quantization_method", "bnb_4bit_quant_type"), "quantization: nf4"),
    "bnb_4bit_compute_dtype": "precision: bf16",
    **dict.fromkeys(
        ("bnb_4bit_use_double_quant", "double_quantization", "use_bnb_nested_quant"),
        _OUT + "the scales of {quantization: nf4} are not rounded again",
    ),
    **dict.fromkeys(("use_galore", "use_badam", "use_apollo", "use_adam_mini"), _GALORE),
    **dict.fromkeys(
        ("use_asft_loss", "use_eaft_loss"),
        _OUT + "{loss: dft} weighs the cross-entropy of a token by its probability, else each counts alike",
    ),
    "mixture_of_depths": "write {tuner: lora}, or full",
    **dict.fromkeys(
        ("use_llama_pro", "freeze_trainable_modules", "unfrozen_parameters", "freeze_parameters",
         "freeze_parameters_ratio"),
        "write {tuner: freeze} with {trainable_layers: 2}, which trains whole layers, and {trainable_modules}",
    ),
    **dict.fromkeys(
        ("pissa_init", "pissa_iter", "pissa_convert", "init_weights", "init_lora_weights", "loftq_config"),
        _OUT + "LoRA starts at zero, as in its paper",
    ),
    "plugins": "write {kernels: liger} for Liger's; there are no others here",
    **dict.fromkeys(("freeze_vit", "freeze_aligner", "freeze_llm"), _VISION),
}  # fmt: skip

# What LLaMA-Factory, ms-swift and axolotl call the templates of models that come with one of their own. The others of
# theirs, such as `alpaca` or `default`, are ways of writing that no model has.
TEMPLATES = re.compile(
    "(tokenizer_default|(bailing|cohere|command|deepseek|ernie|exaone|falcon|gemma|glm|gpt_?oss|granite|hunyuan|intern|"
    r"jamba|kimi|lfm|ling|llama-?[234]|mimo|minicpm|minimax|mistral|mixtral|nemotron|olmo|phi|qw|seed|smollm|yi|zephyr)"
    r"[\w-]*(\.\d[\w-]*)?)"  # and no file that is not there
)

# The same for names that begin alike.
BEGINNINGS: tuple[tuple[str, str], ...] = (
    ("galore|badam|apollo", _GALORE),
    ("muon", _MUON),
    ("oft|boft|vera|relora|adalora|fourier|reft|llamapro|lora_ga", "write {tuner: lora}, or full"),
    ("vllm|use_vllm", _ENGINE),
    ("lmbda|seq_kd", _OUT + "sft learns from a teacher on the rows' own answers, grpo on those that the model gives"),
    ("cosine_m(in|ax)_len", _OWN_REWARD),
    ("repetition_(n_grams|max_penalty)", "write {reward: repetition}, of runs of four tokens, with *WEIGHT behind it"),
    ("teacher|kd|gkd", _TEACHER),
    ("vit|aligner", _VISION),
    ("export", "use `swiftlite export` after training, which merges, rounds to 8 or 4 bits and checks the result"),
    ("wandb", _WANDB),
    ("mlflow", "write {report_to: mlflow}, with {run_name}; the environment has MLFLOW_TRACKING_URI"),
    ("trackio|swanlab|comet", "write {report_to: trackio} or another; its own variables say the rest"),
)

# setting -> (a pattern of words that others have for its value, what to write instead)
VALUES: dict[str, tuple[tuple[str, str], ...]] = {
    "method": (
        ("orpo|simpo|cpo|ipo", "write {method: dpo} and {loss: WORD}, with the {beta} that it takes"),
        ("reward|reward_model", "method: rm"),
        ("gkd|opd", "write {teacher: MODEL}, {method: sft} for the rows' answers, {method: grpo} for its own"),
        ("gspo", "write {method: grpo} and {loss: gspo}"),
        ("cispo", "write {method: grpo} and {loss: cispo}"),
        ("ppo|rloo", _ONE_SAMPLER),
    ),
    "sharding": (
        ("zero-?3-offload", "write {sharding: full} and {offload: cpu}"),
        ("zero-?2-offload", "write {sharding: grad_op} and {offload: cpu}"),
        ("zero-?1", "write {sharding: grad_op}, which divides gradients beside the optimizer"),
        (r".*(zero|z|stage)-?3.*\.json", f"{_FILE} write {{sharding: full}}, to offload {{offload: cpu}} too"),
        (r".*(zero|z|stage)-?2.*\.json", f"{_FILE} write {{sharding: grad_op}}, to offload {{offload: cpu}} too"),
        (r".*\.json", f"{_FILE} write {{sharding: full}} for ZeRO-3, {{sharding: grad_op}} for ZeRO-2"),
    ),
    "tuner": (("qlora", "write {tuner: lora} and {quantization: nf4}"),),
    "optimizer": (
        (".*4bit", "write {optimizer: adamw_8bit}, whose moments have 8 bits"),
        ("muon.+|.+muon", "write {optimizer: muon}, which is the plain one"),
    ),
    "precision": (("full", "write {precision: bf16} and {pure_bf16: true}"),),
    "overlong": (("left", "rows keep their beginning, pairs their answers: write {overlong: truncate}, or drop"),),
    "report_to": (("all", "name those that you use"),),
    **dict.fromkeys(("save_steps", "eval_steps", "log_steps"), ((".*", _HOW_OFTEN),)),
    "eval_fraction": ((r"\d{2,}", "for a number of rows write {eval_dataset: FILE#WORD}, with rows apart"),),
}


def why_idle(name: str, value: str | None, *, in_recipe: bool, keys: Sequence[str] = ()) -> str | None:
    """Why a name that no setting has changes nothing with that value; None where it would, or is not known.

    value: None where it is nested, with these keys.
    """
    known, why = IDLE_KEYS.get(name, ((), ""))
    if keys and set(keys) <= set(known):
        return shown(why, in_recipe=in_recipe)
    if name not in IDLE:
        return None
    words, why = IDLE[name]
    plain = None if value is None else value.strip().lower()
    return shown(why, in_recipe=in_recipe) if words == EVERY or plain in words else None


def instead(name: str, *, in_recipe: bool) -> str | None:
    """What a user of another tool does here instead of naming `name`; None where nothing is known of it."""
    if name in INSTEAD:
        return _advice(INSTEAD[name], in_recipe=in_recipe)
    if name not in IDLE:
        found = next((fix for words, fix in BEGINNINGS if re.match(rf"({words})_", f"{name}_")), None)
        return None if found is None else _advice(found, in_recipe=in_recipe)
    return shown(_OUT + IDLE[name][1], in_recipe=in_recipe)


def instead_of_value(setting: str, word: str, *, in_recipe: bool) -> str | None:
    """The same for a value that a setting does not take."""
    plain = word.strip().lower().replace("_", "-")
    found = next((fix for pattern, fix in VALUES.get(setting, ()) if re.fullmatch(pattern, plain)), None)
    return None if found is None else _advice(found, in_recipe=in_recipe).replace("WORD", word.strip())


def is_known(name: str) -> bool:
    """Whether another tool is known to have the name."""
    return name in IDLE or name in INSTEAD


def _advice(text: str, *, in_recipe: bool) -> str:
    return shown(f"write {{{text}}}" if re.fullmatch(r"\w+: \S+", text) else text, in_recipe=in_recipe)


def shown(text: str, *, in_recipe: bool = False) -> str:
    """A text of these tables with its settings as flags, or as a recipe's lines."""

    def show(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if in_recipe:
            return f"`{name}: {value}`" if value else f"`{name}`"
        return f"`--{name.replace('_', '-')}{f' {value}' if value else ''}`"

    return SETTING.sub(show, text)
