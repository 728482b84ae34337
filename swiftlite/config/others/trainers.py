"""What to do instead of names that lm-eval, llama-recipes, unsloth, open-instruct, verl, OpenRLHF and NeMo-RL have, and
of shorter ones that users expect, as `words` says of others."""

_OUT = "leave it out: "
_BENCHMARKS = "write {dataset: FILE} with rows that have answers; swiftlite brings no benchmarks along"
_CLIPPED = "max_grad_norm: 1.0"
_FREEZE = "write {tuner: freeze} with {trainable_layers: 2}"
_ONE_RANK = _OUT + "all layers have {lora_rank} and {lora_alpha}"
_ONE_RATE = _OUT + "all weights learn at {learning_rate}, LoRA's B matrices times {lora_plus_ratio}"
_NO_ENTROPY = _OUT + "the loss has no entropy, which is logged; a higher {temperature: 1.2} keeps answers lively"
_FOLDER = "output_dir: FOLDER"
_HYBRID = "write {mesh: 2x4}: 2 replicas of 4-way sharding"
_HUB = "hub_model_id: OWNER/NAME"
_LENGTHS = "write {max_length: 2048} for a prompt with its answer, {max_new_tokens: 256} for the answer"
_LONG = "write {max_steps: 1000} or {epochs: 1}"
_NO_CRITIC = _OUT + "there is no critic, an answer is compared with the others to its prompt"
_OFFLOAD = "write {optimizer: paged_adamw} (moments in the host's memory) or {offload: cpu} (weights too)"
_TEMPLATE = _OUT + "conversations are written by the model's chat template; {chat_template: FILE} is another one"
_TRACKER = "report_to: wandb"

INSTEAD: dict[str, str] = {
    "model_args": "write {model: NAME}, with {revision}, {precision} and {trust_remote_code}",
    **dict.fromkeys(("tasks", "num_fewshot", "fewshot_as_multiturn", "include_path"), _BENCHMARKS),
    "limit": "max_samples: 100",
    "output_path": "use `swiftlite eval --json FILE` for numbers, {output_dir: FOLDER} for a run",
    "log_samples": "use `swiftlite eval --answers FILE` with {reward: NAME}",
    "system_instruction": "system: TEXT",
    "gen_kwargs": "write {eval_temperature: 0.7} and {max_new_tokens: 256}",
    "write_out": "use `swiftlite inspect`, which shows rows as the model sees them",
    "show_config": "write {dry_run}",
    "predict_only": "use `swiftlite infer --input FILE`",
    **dict.fromkeys(("enable_fsdp", "low_cpu_fsdp"), "parallel: fsdp"),
    "run_validation": "write {eval_dataset: FILE} or {eval_fraction: 0.05}",
    **dict.fromkeys(
        ("batch_size_training", "micro_train_batch_size", "micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu",
         "max_batch_size", "forward_batch_size"),
        "micro_batch_size: 1",
    ),
    "train_batch_size": "global_batch_size: 8",
    **dict.fromkeys(
        ("num_unique_prompts_rollout", "rollout_batch_size", "num_prompts_per_step"),
        "write {global_batch_size: 8} for the prompts of a step",
    ),
    "ppo_mini_batch_size": "write {minibatches: 4} for a quarter of the step's prompts in each update",
    **dict.fromkeys(
        ("micro_rollout_batch_size", "log_prob_micro_batch_size_per_gpu", "local_rollout_forward_batch_size"),
        "answers_at_once: 64",
    ),
    **dict.fromkeys(("use_dynamic_bsz", "ppo_max_token_len_per_gpu"), "write {packing: true}, which fills each pass"),
    "batching_strategy": "packing: true",
    **dict.fromkeys(("context_length", "context_len", "ctx_len", "max_token_length", "max_len"), "max_length: 2048"),
    **dict.fromkeys(("max_prompt_token_length", "prompt_max_len", "max_tokens"), _LENGTHS),
    **dict.fromkeys(("response_length", "max_response_length", "generate_max_len"), "max_new_tokens: 256"),
    **dict.fromkeys(("num_samples_per_prompt_rollout", "n_samples_per_prompt", "n"), "samples: 8"),
    "eval_n_samples_per_prompt": "eval_samples: 4",
    **dict.fromkeys(("gradient_clipping", "gradient_clipping_threshold", "max_norm", "grad_clip"), _CLIPPED),
    **dict.fromkeys(
        ("max_train_step", "max_train_steps", "total_training_steps", "max_steps_per_epoch", "steps"), "max_steps: 1000"
    ),
    "total_epochs": "epochs: 1",
    **dict.fromkeys(("total_episodes", "num_episodes"), _LONG),
    "use_fp16": "precision: fp16",
    "param_dtype": "precision: bf16",
    **dict.fromkeys(("peft_method", "use_lora", "lora"), "tuner: lora"),
    "use_qlora": "write {tuner: lora} and {quantization: nf4}",
    "full_finetuning": "tuner: full",
    "r": "lora_rank: 16",
    **dict.fromkeys(("from_peft_checkpoint", "lora_path"), "adapter: FOLDER"),
    "create_new_adapter": "use `swiftlite export`, which merges the adapter, and train the result",
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "lora_rank_pattern"), _ONE_RANK),
    **dict.fromkeys(("apply_lora_to_mlp", "apply_lora_to_output"), "write {target_modules: all-linear}, or names"),
    **dict.fromkeys(("embedding_lr", "embedding_lr_scale", "lr_groups"), _ONE_RATE),
    **dict.fromkeys(("freeze_layers", "num_freeze_layers", "freeze_llm_only"), _FREEZE),
    "one_gpu": _OUT + "a run is one process where nothing asks for more",
    "save_model": _OUT + "OUT/model is the result of any run",
    **dict.fromkeys(
        ("dist_checkpoint_root_folder", "dist_checkpoint_folder", "save_path", "ckpt_path", "default_local_dir", "out"),
        _FOLDER,
    ),
    "save_hf_ckpt": _OUT + "a checkpoint holds the model as transformers loads it",
    **dict.fromkeys(
        ("save_method", "save_gguf"),
        "use `swiftlite export` after training, which merges; llama.cpp's convert_hf_to_gguf.py reads what it writes",
    ),
    **dict.fromkeys(("use_profiler", "profiler_dir"), "write {profile}"),
    **dict.fromkeys(
        ("fsdp_activation_checkpointing", "use_gradient_checkpointing", "enable_gradient_checkpointing"),
        "activation_checkpointing: full",
    ),
    **dict.fromkeys(("hsdp", "sharding_group_size", "replica_group_size"), _HYBRID),
    "random_state": "seed: 42",
    "push_model": "push_to_hub: true",
    **dict.fromkeys(("hub_path", "hf_entity", "hf_repo_id"), _HUB),
    **dict.fromkeys(
        ("dataset_mixer", "dataset_mixer_list"), "write {dataset: NAME*0.5}, several with commas, each with *WEIGHT"
    ),
    **dict.fromkeys(("dataset_mixer_eval_list", "val_files"), "eval_dataset: PATH"),
    **dict.fromkeys(("train_file", "train_files", "prompt_data"), "dataset: PATH"),
    **dict.fromkeys(("input_key", "prompt_key"), "columns: prompt=NAME"),
    **dict.fromkeys(("output_key", "response_key"), "columns: completion=NAME"),
    **dict.fromkeys(("ground_truths_key", "label_key"), "write {columns: answer=NAME}, of judged rows label=NAME"),
    "sft_messages_key": "columns: messages=NAME",
    "chosen_key": "columns: chosen=NAME",
    "rejected_key": "columns: rejected=NAME",
    **dict.fromkeys(("apply_verifiable_reward", "verification_reward"), "reward: last_number"),
    "custom_reward_function": "reward: FILE.py:NAME",
    "remote_rm_url": "write {reward: FOLDER} for a reward model, {reward: FILE.py:NAME} for what asks a server",
    **dict.fromkeys(
        ("multi_turn_scheduler", "tool_config_path", "function_tool_path", "environment_factory", "agent_func_path"),
        "write {tools: FILE.py:NAME} for functions that answers may call, or a class with an object for each answer",
    ),
    **dict.fromkeys(
        ("max_turns", "max_assistant_turns", "max_user_turns"), "write {tool_rounds: 8} for how often tools are called"
    ),
    "normalize_reward": "scale_rewards: group",
    **dict.fromkeys(("use_kl_loss", "init_kl_coef", "reference_policy_kl_penalty"), "beta: 0.04"),
    **dict.fromkeys(
        ("critic_warmup", "critic_learning_rate", "critic_pretrain", "freezing_actor_steps", "lambd", "value_clip",
         "cliprange_value", "vf_coef"),
        _NO_CRITIC,
    ),
    "gamma": "write {simpo_gamma: 0.5} for simpo's margin; of rewards leave it out: one counts for all of its answer",
    "use_leave_one_out_baseline": _OUT + "an answer is compared with the mean of all to its prompt, its own too",
    **dict.fromkeys(("entropy_coeff", "entropy_coef", "entropy_loss_coef", "top_entropy_quantile"), _NO_ENTROPY),
    **dict.fromkeys(("kl_loss_type", "kl_estimator"), _OUT + "the KL is estimated as in GRPO's paper (k3, low_var_kl)"),
    "kl_target": _OUT + "{beta: 0.04} stays what it is",
    "ptx_coef": _OUT + "grpo learns from its own answers alone; train on texts by sft, before or after",
    "loss_agg_mode": "write {loss: dapo} for the mean over tokens, {loss: grpo} for that of each answer's mean",
    "policy_loss_type": "write {loss: gspo} for ratios of whole answers, {loss: dapo} or another for those of tokens",
    "eps_clip_low_high": "write {epsilon: 0.2} and {epsilon_high: 0.28}",
    "no_advantage_std_norm": "scale_rewards: none",
    "whiten_rewards": "write {scale_rewards: group}, as it is by default",
    "missing_eos_penalty": "write {cut_answers: skip}, so that answers without an end are not learnt",
    "reference_free": "write {loss: simpo}, or another loss that has no reference",
    **dict.fromkeys(
        ("ref_adapter_name", "model_adapter_name", "ref_model_adapters"),
        _OUT + "the reference is the model, with {adapter}, as it was before training",
    ),
    "ld_alpha": _OUT + "each token of an answer counts alike",
    "actor_learning_rate": "learning_rate: 1e-6",
    **dict.fromkeys(
        ("deepspeed_stage", "zero_stage", "zero"), "write {sharding: full} for 3, {sharding: grad_op} for 2"
    ),
    **dict.fromkeys(("param_offload", "optimizer_offload", "adam_offload", "ref_offload"), _OFFLOAD),
    **dict.fromkeys(("n_gpus_per_node", "num_learners_per_node", "actor_num_gpus_per_node"), "nproc_per_node: 2"),
    "actor_num_nodes": "nnodes: 1",
    **dict.fromkeys(("ulysses_sequence_parallel_size", "ring_attn_size"), "context_parallel_size: 2"),
    "ds_tensor_parallel_size": "tensor_parallel_size: 2",
    **dict.fromkeys(("checkpointing_steps", "save_freq", "save_period", "save_every"), "save_steps: 500"),
    **dict.fromkeys(("test_freq", "val_period", "eval_every"), "eval_steps: 500"),
    **dict.fromkeys(("keep_last_n_checkpoints", "max_ckpt_num", "keep_top_k"), "keep_checkpoints: 2"),
    **dict.fromkeys(("load_checkpoint", "resume_mode"), "resume: auto"),
    **dict.fromkeys(("model_path", "model_dir", "model_id"), "model: NAME"),
    **dict.fromkeys(
        ("checkpoint", "ckpt", "checkpoint_dir"),
        "write {model: FOLDER} for the model, {resume: FOLDER} to go on with a run, {output_dir: FOLDER} for a new one",
    ),
    **dict.fromkeys(("dp", "dp_size"), "write {nproc_per_node: 8}: what no other size divides is data parallel"),
    **dict.fromkeys(("use_wandb", "with_tracking", "logger"), _TRACKER),
    **dict.fromkeys(("exp_name", "experiment_name"), "run_name: NAME"),
    **dict.fromkeys(
        ("chat_template_name", "tokenizer_chat_template", "input_template", "add_bos", "response_prefix"), _TEMPLATE
    ),
    **dict.fromkeys(("lr_warmup_ratio", "lr_warmup_steps_ratio"), "warmup_ratio: 0.03"),
    "warmup": "write {warmup_ratio: 0.03} or {warmup_steps: 100}",
    **dict.fromkeys(("l2", "wd"), "weight_decay: 0.1"),
    "sched": "lr_scheduler: cosine",
    "custom_dataset_info": "dataset: FILE",
    "buffer_size": _OUT + "texts of {streaming: true} are shuffled in windows, and these among one another",
    **dict.fromkeys(("peft_layers_to_transform", "lora_layers_to_transform"), _OUT + "all layers get adapters"),
    "int8": "write {quantization: int8} to train so; `swiftlite export` rounds a result",
    "adam_betas": "write {adam_beta1} and {adam_beta2}",
    "filter_overlong_prompts": "overlong: drop",
    "truncation": "overlong: truncate",
    "dpo_loss_type": "loss: sigmoid",
    "dpo_beta": "beta: 0.1",
    "ipo": "loss: ipo",
    "nll_loss_coef": "rpo_alpha: 1.0",
    **dict.fromkeys(("aux_loss_coef", "load_balancing_loss"), "router_aux_loss_coef: 0.001"),
    "pretrain": "model: NAME",
    "pretrain_mode": "use `swiftlite pretrain`",
    "clean_checkpoints_at_end": _OUT + "older checkpoints go while training, as {keep_checkpoints} says",
    **dict.fromkeys(("stop_strings", "stop_token"), _OUT + "what the chat template ends a turn with ends an answer"),
    "enable_ema": _OUT + "no average of weights is kept; {result: best} takes the best checkpoint",
}  # fmt: skip
