"""Names that other tools have and that change nothing here, each with the values with which that is so, and why.

Of ms-swift, Megatron, transformers, TRL, LLaMA-Factory, axolotl and torchtune. `{precision: bf16}` is shown as a flag
or as a recipe's line.
"""

ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none")
EVERY: tuple[str, ...] = ()  # value

_READ_AHEAD = "steps are read ahead in any case"
_EVALUATION = "evaluation takes micro-batches as training does"
_ATTENTION = "attention takes the fastest of PyTorch's own kernels that keeps documents apart"
_NO_PADDING = "rows stand one behind the other, without padding"
_CACHE = "tokens are kept in a cache ({cache_dir}), and made anew where rows or settings change"
WHOLE_STATE = "a checkpoint holds what exact resume needs; {keep_checkpoints: 1} or {save_steps: never} saves disk"
_SPIKES = "{on_loss_spike: stop} ends a run whose loss jumps far above all recent ones"
_OWN_TEMPLATE = "the model's own chat template writes tools and calls, and where an answer ends is learnt from it"
_LEARNT_END = "what the chat template ends a turn with is learnt, and saved as what ends an answer"
_FUSED = "{kernels: auto} takes Liger's where they are installed, and logits are never kept whole"
_KERNEL = "it says how something is computed, not what"
_LOGGED = "it is logged in any case"
_SAFETENSORS = "weights are read and saved as safetensors"
_ANSWERS = "only answers are learnt, as the methods but pretrain do in any case"
_SAID = "a run says what its user should know, {debug} shows more of an error"
_MEAN = "the loss is the mean over the trained tokens of a whole step"
_OWN_DISTRIBUTION = "training draws answers, where it does, from the whole distribution that is trained"
_OWN_ANSWERS = "the model that is trained gives the answers itself"
_LOSS = "the evaluation's loss is what counts, with {reward} the reward"
_PATIENCE = "processes do not wait for data or weights inside a collective"
_STEPS = "steps are counted where nothing else is said"
_FOUR_BITS = "{quantization: nf4} is NF4, computed in {precision}"

# name -> (the values with which it changes nothing, why): such a one is left out, with a note
IDLE: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("dataloader_num_workers", "num_workers_dataloader", "num_workers", "dataloader_prefetch_factor",
         "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_in_order",
         "dataloader_multiprocessing_context"),
        (EVERY, _READ_AHEAD),
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size", "eval_sample_packing", "eval_packing", "batch_eval_metrics",
         "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "val_dataset_shuffle",
         "bf16_full_eval", "fp16_full_eval", "val_batch_size"),
        (EVERY, _EVALUATION),
    ),
    **dict.fromkeys(
        ("attn_implementation", "attn_impl", "attn", "flash_attn", "use_flash_attn", "flash_attention",
         "sdp_attention", "xformers_attention", "flex_attention", "flex_attn_compile_kwargs", "attention_backend",
         "use_fast_kernels"),
        (EVERY, _ATTENTION),
    ),
    **dict.fromkeys(
        ("padding_free", "data_flatten", "pad_to_sequence_len", "pad_to_multiple_of", "padding_side", "pad_token",
         "mlp_padding_free", "use_remove_padding", "packing_samples", "ignore_pad_token_for_loss"),
        (EVERY, _NO_PADDING),
    ),
    **dict.fromkeys(
        ("load_from_cache_file", "overwrite_cache", "lazy_tokenize", "dataset_prepared_path", "cache_requests"),
        (EVERY, _CACHE),
    ),
    **dict.fromkeys(("save_only_model", "no_save_optim", "no_save_rng", "save_optimizer"), (EVERY, WHOLE_STATE)),
    **dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"), (EVERY, _SPIKES)),
    **dict.fromkeys(("agent_template", "eot_tokens"), (EVERY, _OWN_TEMPLATE)),
    "eos_token": (EVERY, _LEARNT_END),
    **dict.fromkeys(
        ("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_cross_entropy",
         "liger_fused_linear_cross_entropy", "cut_cross_entropy"),
        (EVERY, _FUSED),
    ),
    "resize_token_embeddings_to_32x": (EVERY, "the embedding keeps its rows; {new_tokens} adds some"),
    "tf32": (EVERY, "under {precision: bf16} no large product is in fp32, and under {precision: fp32} each is exact"),
    "strict": (OFF, "rows are checked by {on_bad_row}"),
    **dict.fromkeys(
        ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "moe_permute_fusion", "moe_grouped_gemm",
         "moe_shared_expert_overlap", "moe_token_dispatcher_type", "overlap_grad_reduce", "overlap_param_gather",
         "tp_comm_overlap", "gradient_accumulation_fusion", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
         "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "ddp_find_unused_parameters",
         "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_static_graph", "low_cpu_mem_usage",
         "torch_compile_mode", "torch_empty_cache_steps", "bnb_4bit_quant_storage", "use_logits_to_keep",
         "acc_strategy", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion",
         "optimizer_cuda_graph", "manual_gc", "manual_gc_steps", "manual_gc_eval", "te_rng_tracker", "cp_comm_type",
         "overlap_p2p_comm", "batch_p2p_comm", "align_param_gather", "align_grad_reduce", "nccl_comm_warmup",
         "overlap_param_gather_with_optimizer_step", "moe_enable_deepep", "attention_softmax_in_fp32",
         "accumulate_allreduce_grads_in_fp32", "use_cpu_initialization", "packing_num_proc",
         "use_unsloth", "grad_accum_dtype", "overlap_comm", "disable_trace_cache", "zpg"),
        (EVERY, _KERNEL),
    ),
    **dict.fromkeys(
        ("include_mfu", "include_tokens_per_second", "include_num_input_tokens_seen", "log_peak_memory_stats",
         "log_throughput", "skip_memory_metrics", "flop_counter", "save_metrics", "compute_accuracy"),
        (EVERY, _LOGGED),
    ),
    **dict.fromkeys(("ddp_timeout", "distributed_timeout_minutes"), (EVERY, _PATIENCE)),
    **dict.fromkeys(("log_level", "log_level_replica", "log_on_each_node", "verbosity"), (EVERY, _SAID)),
    "local_rank": (EVERY, "processes learn it from who starts them"),
    **dict.fromkeys(("average_tokens_across_devices", "calculate_per_token_loss"), (ON, _MEAN)),
    **dict.fromkeys(("ref_model_sync_steps", "ref_model_mixup_alpha"), (EVERY, "the reference stays as it was")),
    "eval_max_new_tokens": (EVERY, "evaluations that sample answers go by {max_new_tokens}"),
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), (EVERY, _OWN_DISTRIBUTION)),
    "importance_sampling_level": (("token",), "each token has a ratio of its own"),
    **dict.fromkeys(("log_completions", "num_completions_to_print"), (EVERY, "answers.jsonl has some of each step")),
    **dict.fromkeys(("use_vllm", "use_transformers_paged"), (OFF, _OWN_ANSWERS)),
    **dict.fromkeys(
        ("ds3_gather_for_generation", "sleep_level", "move_model_batches", "num_infer_workers"), (EVERY, _OWN_ANSWERS)
    ),
    "steps_per_generation": (("1",), "each step is learnt from answers of its own"),
    **dict.fromkeys(
        ("advantage_estimator", "adv_estimator"), (("grpo",), "an answer is compared with the others to its prompt")
    ),
    "gamma": (("1", "1.0"), "a reward counts for all tokens of its answer"),
    "kl_coef": (("0", "0.0"), "rewards are what {reward} says"),
    **dict.fromkeys(("entropy_coeff", "entropy_coef", "entropy_loss_coef"), (("0", "0.0"), "the loss has no entropy")),
    **dict.fromkeys(("kl_loss_type", "kl_estimator"), (("low_var_kl", "k3"), "the KL is estimated so")),
    "policy_loss_type": (("ppo",), "ratios are bounded by {epsilon}, as PPO's"),
    **dict.fromkeys(
        ("apply_chat_template", "use_chat_template"),
        (ON, "conversations are written by the chat template in any case"),
    ),
    "disable_gradient_checkpointing": (OFF, "{activation_checkpointing: auto} does the least that fits"),
    "multiturn": (EVERY, "each answer of a conversation is learnt, with {train_on: last-answer} the last one alone"),
    "multi_objective_aggregation": (("sum_then_normalize",), "rewards are added up, then compared"),
    **dict.fromkeys(("log_entropy", "enable_channel_loss"), (EVERY, _LOGGED)),
    "use_hf": (ON, "models and data sets come from the Hugging Face hub"),
    "tuner_backend": (("peft",), "adapters are peft's"),
    "lora_task_type": (("causal_lm",), "the method says it"),
    "create_checkpoint_symlink": (ON, "checkpoints/latest and checkpoints/best are links"),
    "add_version": (EVERY, "a run starts in a new or empty folder"),
    "prediction_loss_only": (EVERY, _LOSS),
    "enable_jit_checkpoint": (ON, "a run that is asked to stop saves a checkpoint first"),
    "logging_nan_inf_filter": (EVERY, "{on_nonfinite} says what becomes of such a step"),
    "expert_tensor_parallel_size": (("1",), "experts are divided by {expert_parallel_size}"),
    "muon_momentum": (("0.95",), "Muon's momentum is that"),
    "muon_num_ns_steps": (("5",), "Muon takes so many steps"),
    "muon_use_nesterov": (ON, "Muon's momentum is Nesterov's"),
    "weight_decay_incr_style": (("constant",), "weight decay is constant"),
    **dict.fromkeys(
        ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        (("fp32",), "masters, their gradients and moments are fp32"),
    ),
    **dict.fromkeys(("save_safetensors", "load_safetensors", "safe_serialization"), (ON, _SAFETENSORS)),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), (ON, _ANSWERS)),
    **dict.fromkeys(("train_on_inputs", "train_on_prompt", "train_on_source"), (OFF, _ANSWERS)),
    "loss_scale": (("default",), _ANSWERS),
    "metric_for_best_model": (("loss", "eval_loss", "reward", "eval_reward"), _LOSS),
    "greater_is_better": (EVERY, _LOSS),
    **dict.fromkeys(("quant_method", "quantization_method"), (("bnb", "bitsandbytes"), _FOUR_BITS)),
    "bnb_4bit_quant_type": (("nf4",), _FOUR_BITS),
    "bnb_4bit_compute_dtype": (("bfloat16", "bf16"), _FOUR_BITS),
    **dict.fromkeys(
        ("save_strategy", "eval_strategy", "evaluation_strategy", "logging_strategy"), (("steps",), _STEPS)
    ),
    "remove_unused_columns": (EVERY, "columns that no row format has are counted and not read"),
    "overwrite_output_dir": (EVERY, "a run starts in a new or empty folder, and nothing is overwritten"),
    "plot_loss": (EVERY, "loss.png is drawn in any case"),
    "disable_tqdm": (EVERY, "progress is shown as a terminal can show it"),
    "hub_strategy": (("end",), "the result is uploaded at the end of the run"),
    "use_cache": (EVERY, "training keeps no keys and values"),
    "do_train": (ON, "the command says what to do"),
    "do_eval": (ON, "there is an evaluation where there are rows for it"),
    "finetune": (ON, "training starts from the weights of {model}"),
    "use_fast_tokenizer": (ON, "that is the tokenizer there is"),
    "tokenizer_type": (EVERY, "the model's folder says it"),
    "recompute_method": (("uniform",), "layers are recomputed one by one"),
    "recompute_num_layers": (("1",), "layers are recomputed one by one"),
    "freeze_trainable_modules": (("all",), "all of the last layers is trained"),
    **dict.fromkeys(("lora_bias", "bias"), (("none",), "no biases are trained")),
    "lora_fan_in_fan_out": (EVERY, "a layer's own class says it"),
    **dict.fromkeys(("init_weights", "init_lora_weights"), (ON, "LoRA starts so")),
    "label_smoothing_factor": (("0", "0.0"), "there is none"),
    "packing_strategy": (("bfd",), "packs are filled so"),
    "f_divergence_type": (("reverse_kl",), "losses take the reverse KL"),
    "fp8_backend": (("auto", "torchao"), "{fp8} is torchao's"),
    "torch_compile_backend": (("inductor",), "{compile} takes that one"),
    **dict.fromkeys(  # switches of what is not there, or is asked for in another way
        ("load_in_8bit", "merge_lora", "group_by_length", "do_predict", "predict_with_generate", "mask_history",
         "use_galore", "use_badam", "use_muon", "use_llama_pro", "use_ray", "auto_find_batch_size", "sync_ref_model",
         "enable_activation_offloading", "activation_cpu_offload", "save_adapter_weights_only", "dataset_streaming",
         "optimizer_cpu_offload", "use_distributed_optimizer", "pissa_init", "bnb_4bit_use_double_quant",
         "double_quantization", "use_bnb_nested_quant", "activation_offloading",
         "dataloader_drop_last", "use_cpu", "ignore_data_skip", "full_determinism", "use_vllm",
         "save_on_each_node", "load_args", "load_data_args", "data_parallel_random_init", "use_weighting",
         "curriculum_sampling", "sample_packing_sequentially", "eval_table_size", "enable_dft_loss",
         "use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_bias_correction_kl", "kl_in_reward", "use_kl_in_reward",
         "dynamic_sample",
         "use_slow_tokenizer", "disable_fast_tokenizer", "dynamic_filtering", "enable_ema",
         "use_liger_loss", "log_unique_prompts", "no_advantage_std_norm",
         "use_leave_one_out_baseline", "reference_free"),
        (OFF, "it is off in any case"),
    ),
}  # fmt: skip

# The same for a name with keys or a list below it: (those keys, why).
IDLE_KEYS = {
    "special_tokens": (("pad_token",), _NO_PADDING),
    "plugins": (
        ("axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"),
        _FUSED,
    ),
}
