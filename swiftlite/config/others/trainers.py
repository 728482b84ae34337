"""What to do instead of names that lm-eval, llama-recipes, unsloth, open-instruct, verl and OpenRLHF have, as `words`
says of others."""

_OUT = "leave it out: "
_BENCHMARKS = "write {dataset: FILE} with rows that have answers; swiftlite brings no benchmarks along"
_CLIPPED = "max_grad_norm: 1.0"
_FREEZE = "write {tuner: freeze} with {trainable_layers: 2}"
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
         "max_batch_size"),
        "micro_batch_size: 1",
    ),
    "train_batch_size": "global_batch_size: 8",
    **dict.fromkeys(
        ("num_unique_prompts_rollout", "rollout_batch_size"), "write {global_batch_size: 8} for the prompts of a step"
    ),
    "ppo_mini_batch_size": "write {minibatches: 4} for a quarter of the step's prompts in each update",
    **dict.fromkeys(("micro_rollout_batch_size", "log_prob_micro_batch_size_per_gpu"), "answers_at_once: 64"),
    **dict.fromkeys(("use_dynamic_bsz", "ppo_max_token_len_per_gpu"), "write {packing: true}, which fills each pass"),
    "batching_strategy": "packing: true",
    **dict.fromkeys(("context_length", "max_token_length", "max_len"), "max_length: 2048"),
    **dict.fromkeys(("max_prompt_token_length", "prompt_max_len"), _LENGTHS),
    **dict.fromkeys(("response_length", "max_response_length", "generate_max_len"), "max_new_tokens: 256"),
    **dict.fromkeys(("num_samples_per_prompt_rollout", "n_samples_per_prompt", "n"), "samples: 8"),
    "eval_n_samples_per_prompt": "eval_samples: 4",
    **dict.fromkeys(("gradient_clipping", "gradient_clipping_threshold", "max_norm"), _CLIPPED),
    **dict.fromkeys(("max_train_step", "max_train_steps", "total_training_steps"), "max_steps: 1000"),
    "total_epochs": "epochs: 1",
    **dict.fromkeys(("total_episodes", "num_episodes"), _LONG),
    "use_fp16": "precision: fp16",
    "param_dtype": "precision: bf16",
    **dict.fromkeys(("peft_method", "use_lora"), "tuner: lora"),
    "use_qlora": "write {tuner: lora} and {quantization: nf4}",
    "full_finetuning": "tuner: full",
    "r": "lora_rank: 16",
    "from_peft_checkpoint": "adapter: FOLDER",
    **dict.fromkeys(("freeze_layers", "num_freeze_layers", "freeze_llm_only"), _FREEZE),
    "one_gpu": _OUT + "a run is one process where nothing asks for more",
    "save_model": _OUT + "OUT/model is the result of any run",
    **dict.fromkeys(
        ("dist_checkpoint_root_folder", "dist_checkpoint_folder", "save_path", "ckpt_path", "default_local_dir"),
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
    "normalize_reward": "scale_rewards: group",
    **dict.fromkeys(("use_kl_loss", "init_kl_coef"), "beta: 0.04"),
    **dict.fromkeys(
        ("critic_warmup", "critic_learning_rate", "critic_pretrain", "freezing_actor_steps", "lambd"), _NO_CRITIC
    ),
    "actor_learning_rate": "learning_rate: 1e-6",
    **dict.fromkeys(("deepspeed_stage", "zero_stage"), "write {sharding: full} for 3, {sharding: grad_op} for 2"),
    **dict.fromkeys(("param_offload", "optimizer_offload", "adam_offload", "ref_offload"), _OFFLOAD),
    **dict.fromkeys(("n_gpus_per_node", "num_learners_per_node", "actor_num_gpus_per_node"), "nproc_per_node: 2"),
    "actor_num_nodes": "nnodes: 1",
    **dict.fromkeys(("ulysses_sequence_parallel_size", "ring_attn_size"), "context_parallel_size: 2"),
    "ds_tensor_parallel_size": "tensor_parallel_size: 2",
    **dict.fromkeys(("checkpointing_steps", "save_freq"), "save_steps: 500"),
    "test_freq": "eval_steps: 500",
    **dict.fromkeys(("keep_last_n_checkpoints", "max_ckpt_num"), "keep_checkpoints: 2"),
    **dict.fromkeys(("load_checkpoint", "resume_mode"), "resume: auto"),
    **dict.fromkeys(("use_wandb", "with_tracking", "logger"), _TRACKER),
    **dict.fromkeys(("exp_name", "experiment_name"), "run_name: NAME"),
    **dict.fromkeys(("chat_template_name", "tokenizer_chat_template", "input_template", "add_bos"), _TEMPLATE),
    **dict.fromkeys(("lr_warmup_ratio", "lr_warmup_steps_ratio"), "warmup_ratio: 0.03"),
    "adam_betas": "write {adam_beta1} and {adam_beta2}",
    "l2": "weight_decay: 0.1",
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
    "stop_strings": _OUT + "what the chat template ends a turn with ends an answer",
    "enable_ema": _OUT + "no average of weights is kept; {result: best} takes the best checkpoint",
}  # fmt: skip
