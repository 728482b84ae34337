"""`RunConfig`: every setting of a run. The only source of flags, aliases, recipe keys, defaults, help and JSON schema.

One line or two a setting: its type, its default, the help sentence, and the names that other tools use for it. The flag
is the name with dashes. A default of None is filled in by `resolve`; `shown` says in the help how.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict

from swiftlite.config import types
from swiftlite.config.methods import Method
from swiftlite.config.setting import (
    DATA,
    MODEL,
    OPTIMIZATION,
    PARALLELISM,
    RUN,
    flag,
)
from swiftlite.config.settings.output import OutputSettings
from swiftlite.config.settings.preference import PreferenceSettings
from swiftlite.config.settings.sampling import SamplingSettings
from swiftlite.config.settings.speed import SpeedSettings
from swiftlite.config.settings.survival import SurvivalSettings
from swiftlite.config.settings.teaching import TeacherSettings
from swiftlite.config.settings.tuning import TunerSettings
from swiftlite.config.types import (
    BelowOne,
    Columns,
    Count,
    Fraction,
    Limit,
    Names,
    NotNegative,
    NullWord,
    OffForNull,
    OptionalCount,
    OptionalNotNegative,
    OptionalPort,
    OptionalPositive,
    OptionalText,
    OptionalWhole,
    Overrides,
    Passes,
    Positive,
    Spelling,
    Whole,
    ZeroForNull,
)


class RunConfig(
    TunerSettings,
    PreferenceSettings,
    SamplingSettings,
    TeacherSettings,
    SurvivalSettings,
    OutputSettings,
    SpeedSettings,
):
    """Everything that defines one run. Made by `resolve`; immutable afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    method: Annotated[Method, Spelling({"pt": "pretrain"})] = flag(
        "sft",
        RUN,
        "What to train: `sft` on answers, `pretrain` on texts, `grpo` on its own answers, the others on preferences.",
        "stage",
        "rlhf_type",
        "rl",
        phrases=dict.fromkeys(("rlhf_type", "rl"), {types.LOSSES_AS_METHODS: "dpo"}),
        shown="by the command",
    )

    model: str = flag(
        "",
        MODEL,
        "Hub id, local folder, or a short name such as `llama3-8b` or `qwen-7b`.",
        "model_name_or_path",
        "model_type",
        "model_id_or_path",
        "base_model",
        shown="needed",
        metavar="NAME|PATH",
        short="m",
    )
    tokenizer: OptionalText = flag(
        None,
        MODEL,
        "Hub id or folder of another tokenizer.",
        "tokenizer_name_or_path",
        "tokenizer_name",
        shown="the model's",
        metavar="NAME|PATH",
    )
    chat_template: OptionalText = flag(
        None,
        MODEL,
        "Built-in chat template (`chatml`; for base models `instruction` or `alpaca`, plain headers) or a Jinja file.",
        "template",
        "chat_template_path",
        shown="the tokenizer's",
        metavar="NAME|FILE",
    )
    revision: OptionalText = flag(
        None, MODEL, "Branch, tag or commit of the model on the hub.", "model_revision", shown="main",
        metavar="REVISION",
    )  # fmt: skip
    trust_remote_code: bool = flag(
        False, MODEL, "Run Python code that comes with the model. Only for sources you trust."
    )
    from_scratch: bool = flag(
        False, MODEL, "Start with random weights of the shape that config.json gives, not with the model's own.",
        "train_from_scratch", "reinit_weights",
    )  # fmt: skip
    config_overrides: Overrides = flag(
        {}, MODEL, "What config.json is to say instead: `max_position_embeddings=65536`; from scratch also sizes.",
        "overrides_of_model_config", shown="none", metavar="KEY=VALUE ...", nested=True,
    )  # fmt: skip
    new_tokens: Names = flag(
        [], MODEL, "Tokens to add. Embedding and head are then trained whole, whatever the tuner.", "add_tokens",
        metavar="TOKEN ...",
    )  # fmt: skip

    dataset: Names = flag(
        [],
        DATA,
        "Rows to train on, one set or several: NAME_OR_PATH, then any of :SUBSET @SPLIT #COUNT *WEIGHT.",
        "train_dataset",
        "dataset_name",
        shown="needed",
        metavar="SPEC ...",
        short="d",
    )
    dataset_dir: OptionalText = flag(
        None, DATA, "Folder of LLaMA-Factory's dataset_info.json, by which names of `--dataset` are read.",
        shown="data, where it has one", metavar="PATH",
    )  # fmt: skip
    eval_dataset: Names = flag(
        [],
        DATA,
        "Rows to evaluate on, written like `--dataset`.",
        "val_dataset",
        "validation_dataset",
        shown="none",
        metavar="SPEC ...",
    )
    eval_fraction: BelowOne = flag(
        0.0, DATA, "Part of the training rows to hold out for evaluation.", "split_dataset_ratio", "val_size",
        "val_set_size",
    )  # fmt: skip
    columns: Columns = flag(
        {},
        DATA,
        "Where a format's keys are in your files: `instruction=question output=answer`.",
        shown="none",
        metavar="KEY=COLUMN ...",
    )
    max_samples: OptionalCount = flag(None, DATA, "Rows of each data set that names no #COUNT of its own.", shown="all")
    deduplicate: bool = flag(
        False, DATA, "Leave rows out of training that are the same as one before, or as a row of --eval-dataset.",
        "dataset_exact_deduplication",
    )  # fmt: skip
    system: str | None = flag(
        None,
        DATA,
        "System message of conversations that have none: the text, or a .txt file of it.",
        "default_system",
        "default_system_message",
        shown="none",
        metavar="TEXT|FILE",
    )
    placeholders: Columns = flag(
        {}, DATA, "Texts for words in double braces in the rows: `name=Robo` for {{name}}.", shown="none",
        metavar="KEY=TEXT ...", phrases={"model_name": types.NAME, "model_author": types.AUTHOR},
    )  # fmt: skip
    train_on: Annotated[Literal["answers", "last-answer", "all"], Spelling()] = flag(
        "answers", DATA, "What of a conversation `sft` learns: its answers, the last of them, or all of its text.",
        phrases=dict.fromkeys(("train_on_inputs", "train_on_prompt"), {types.ON_ALONE: "all"})
        | dict.fromkeys(("assistant_only_loss", "completion_only_loss"), {types.OFF_WORDS: "all"})
        | {"mask_history": {types.ON_ALONE: "last-answer"}, "loss_scale": {"all": "all", "last_round": "last-answer"}},
    )  # fmt: skip
    max_length: Count = flag(
        2048,
        DATA,
        "Longest sequence (and pack) in tokens.",
        "max_seq_length",
        "cutoff_len",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "sequence_len",
    )
    packing: bool = flag(
        True, DATA, "Fill sequences with several rows, isolated from one another.", "neat_packing", "sample_packing"
    )
    overlong: Annotated[Literal["truncate", "drop", "split", "error"] | None, Spelling(types.OVERLONG), NullWord] = (
        flag(
            None,
            DATA,
            "What to do with rows longer than `--max-length`; always counted.",
            "truncation_strategy",
            "excess_length_strategy",
            shown="truncate; split for pretrain, drop for grpo",
        )
    )
    on_bad_row: Annotated[Literal["error", "skip"], Spelling()] = flag(
        "error", DATA, "A row that cannot be used: stop, or skip it, count it and list it in rejected_rows.jsonl."
    )
    sample_by: Annotated[Literal["line", "paragraph", "document"], Spelling()] = flag(
        "line", DATA, "What a row is in a .txt file."
    )
    streaming: bool = flag(
        False,
        DATA,
        "Read texts while training instead of beforehand; for pretraining data that do "
        "not fit memory. Needs `--max-steps`.",
    )
    shuffle: bool = flag(
        True,
        DATA,
        "Visit the rows in random order, another one each epoch.",
        "dataset_shuffle",
        "shuffle_dataset",
        "train_dataloader_shuffle",
    )
    template_date: OptionalText = flag(
        None, DATA, "Date (YYYY-MM-DD) for chat templates that ask for today's.", shown="today", metavar="DATE"
    )
    workers: OptionalCount = flag(
        None, DATA, "Processes that tokenise.", "dataset_num_proc", "preprocessing_num_workers",
        "dataset_processes", shown="all cores",
    )  # fmt: skip
    cache_dir: OptionalText = flag(None, DATA, "Folder of the token cache.", shown="~/.cache/swiftlite", metavar="PATH")

    epochs: Passes = flag(1.0, OPTIMIZATION, "Passes over the rows.", "num_train_epochs", "num_epochs", "max_epochs")
    max_steps: Limit = flag(
        None,
        OPTIMIZATION,
        "Optimizer steps; wins over `--epochs`, repeating rows if need be.",
        "train_iters",
        shown="by epochs",
    )
    global_batch_size: OptionalCount = flag(
        None, OPTIMIZATION, "Sequences (packs) per optimizer step over all ranks.", shown="8"
    )
    micro_batch_size: OptionalCount = flag(
        None, OPTIMIZATION, "Sequences per forward on one rank.", "per_device_train_batch_size", shown="1"
    )
    gradient_accumulation_steps: OptionalCount = flag(
        None,
        OPTIMIZATION,
        "Forwards per optimizer step; another way to give the global batch.",
        "grad_accum",
        shown="from the batch sizes",
    )
    learning_rate: OptionalPositive = flag(
        None,
        OPTIMIZATION,
        "Peak learning rate.",
        "lr",
        shown="lora 1e-4, else 1e-5; dpo, kto a tenth; pretrain 2e-5; from scratch 3e-4",
    )
    lr_scheduler: Annotated[
        Literal["cosine", "linear", "constant", "constant_with_warmup", "wsd"],
        Spelling(types.SCHEDULER),
    ] = flag("cosine", OPTIMIZATION, "Shape of the learning rate over the run.", "lr_scheduler_type", "lr_decay_style")
    min_lr_ratio: Fraction = flag(
        0.0, OPTIMIZATION, "Where the decay ends, as a part of the learning rate.",
        "cosine_min_lr_ratio", phrases={"lr_scheduler_kwargs": types.MIN_LR_RATE},
    )  # fmt: skip
    min_lr: OptionalPositive = flag(
        None, OPTIMIZATION, "Learning rate at the end of the decay; wins over `--min-lr-ratio`.", shown="by ratio",
        phrases={"lr_scheduler_kwargs": types.MIN_LR},
    )  # fmt: skip
    decay_ratio: Fraction = flag(0.1, OPTIMIZATION, "`wsd`: the part of the run that decays.")
    warmup_ratio: Fraction = flag(
        0.03, OPTIMIZATION, "Part of the run that warms up.", "lr_warmup_fraction", phrases={"warmup_steps": types.PART}
    )
    warmup_steps: OptionalWhole = flag(
        None,
        OPTIMIZATION,
        "Steps that warm up; wins over `--warmup-ratio`.",
        "num_warmup_steps",
        "lr_warmup_iters",
        shown="by ratio",
    )
    weight_decay: NotNegative = flag(0.0, OPTIMIZATION, "Decoupled weight decay, of matrices.")
    max_grad_norm: NotNegative = flag(
        1.0, OPTIMIZATION, "Clip the gradient to this norm; 0 does not clip.", "clip_grad", "clip_grad_norm"
    )
    optimizer: Annotated[Literal["adamw", "adamw_8bit", "paged_adamw", "muon"], Spelling(types.OPTIMIZERS)] = flag(
        "adamw",
        OPTIMIZATION,
        "AdamW; with moments of 8 bits: 10 instead of 16 bytes a trained parameter; or with moments in the host's"
        " memory: 8 bytes on the GPU; or Muon for the layers' matrices: 12 bytes.",
        "optim",
        phrases={"use_muon": {types.ON_ALONE: "muon"}},
    )
    adam_beta1: BelowOne = flag(0.9, OPTIMIZATION, "Decay of AdamW's mean.")
    adam_beta2: BelowOne = flag(0.95, OPTIMIZATION, "Decay of AdamW's mean of squares.")
    adam_epsilon: Positive = flag(1e-8, OPTIMIZATION, "AdamW's epsilon.", "adam_eps")
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        Spelling(types.DTYPE),
    ] = flag(
        "auto",
        OPTIMIZATION,
        "Type of the computation; `auto` is bf16 where that is faster on the device, else fp32.",
        "mixed_precision",
        "torch_dtype",
        "dtype",
        switches={"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"},
    )
    seed: Whole = flag(42, OPTIMIZATION, "Decides row order, dropout and new weights.", "random_seed")
    on_nonfinite: Annotated[Literal["error", "skip"], Spelling()] = flag(
        "error", OPTIMIZATION, "A loss or gradient that is not finite: stop, or skip and count the step."
    )
    neftune_noise_alpha: ZeroForNull = flag(
        0.0, OPTIMIZATION, "sft, pretrain: noise on embeddings while training, times alpha / sqrt(tokens x width).",
        "neftune_alpha", "noisy_embedding_alpha",
    )  # fmt: skip
    router_aux_loss_coef: OptionalNotNegative = flag(
        None, OPTIMIZATION, "Mixtures of experts: weight of the loss that balances their routers; 0 is none.",
        "moe_aux_loss_coeff", "moe_aux_loss_coef", shown="as the model's config.json says",
    )  # fmt: skip
    early_stopping_patience: OptionalCount = flag(
        None, OPTIMIZATION, "Stop after so many evaluations without a better loss.", "early_stop_interval", shown="off"
    )

    parallel: Annotated[Literal["auto", "none", "ddp", "fsdp", "megatron"], Spelling(types.PARALLEL)] = flag(
        "auto",
        PARALLELISM,
        "How ranks share the work; `megatron` is tensor x pipeline parallel.",
        "parallel_method",
        "fsdp",
        phrases={"fsdp": {types.FSDP_WORDS: "fsdp"}},
    )
    sharding: Annotated[Literal["full", "grad_op", "none", "hybrid"] | None, Spelling(types.SHARDING)] = flag(
        None,
        PARALLELISM,
        "What data ranks shard. Takes PyTorch's FULL_SHARD, SHARD_GRAD_OP, ... too.",
        "sharding_strategy",
        "deepspeed",
        phrases={"fsdp": {types.FSDP_WORDS: r"\1"}},
        shown="by --parallel",
    )
    mesh: OptionalText = flag(
        None,
        PARALLELISM,
        "Hybrid sharding: `2x4` is 2 replicas of 4-way sharding.",
        "device_mesh",
        shown="none",
        metavar="RxS",
    )
    tensor_parallel_size: Count = flag(
        1, PARALLELISM, "Ranks that split each layer.", "tp", "tensor_model_parallel_size", "tp_size"
    )
    sequence_parallel: Annotated[Literal["auto", "always", "never"], Spelling(types.SEQUENCE_PARALLEL)] = flag(
        "auto", PARALLELISM, "Tensor-parallel ranks divide tokens between blocks; auto: on GPUs, not compiled.",
        bare="always",
    )  # fmt: skip
    pipeline_parallel_size: Count = flag(
        1, PARALLELISM, "Stages that split the layers.", "pp", "pipeline_model_parallel_size", "pp_size"
    )
    context_parallel_size: Count = flag(
        1, PARALLELISM, "Ranks that split each sequence.", "cp", "cp_size", "sequence_parallel_size",
        "sequence_parallel_degree",
    )  # fmt: skip
    expert_parallel_size: Count = flag(
        1, PARALLELISM, "Ranks that split the experts.", "ep", "expert_model_parallel_size", "ep_size"
    )
    fsdp_min_params: Whole = flag(
        0, PARALLELISM, "Shard layers with fewer parameters together with the rest of the model.", shown="0"
    )
    sync_every_microbatch: bool = flag(
        False, PARALLELISM, "Reduce gradients after each micro-batch: more traffic, less memory."
    )
    pipeline_schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved-1f1b", "zero-bubble"] | None, Spelling(), NullWord
    ] = flag(None, PARALLELISM, "Order of forwards and backwards on the stages.", shown="1f1b")
    num_microbatches: OptionalCount = flag(
        None, PARALLELISM, "Micro-batches in a pipeline step.", shown="from the batch sizes"
    )
    nproc_per_node: OptionalCount = flag(
        None, PARALLELISM, "Processes to start on this machine.", shown="1", env="NPROC_PER_NODE"
    )
    nnodes: OptionalCount = flag(None, PARALLELISM, "Machines.", shown="1", env="NNODES")
    node_rank: OptionalWhole = flag(None, PARALLELISM, "This machine's number, from 0.", shown="0", env="NODE_RANK")
    master_addr: OptionalText = flag(
        None, PARALLELISM, "Address of machine 0.", shown="127.0.0.1", env="MASTER_ADDR", metavar="HOST"
    )
    master_port: OptionalPort = flag(None, PARALLELISM, "Port on machine 0.", shown="free; 29500", env="MASTER_PORT")

    dry_run: bool = flag(False, RUN, "Show the resolved configuration and the layout, load nothing.")
    debug: OffForNull = flag(False, RUN, "Show tracebacks.")
