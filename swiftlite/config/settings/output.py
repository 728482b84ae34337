"""The settings of what a run leaves: its folder, checkpoints and result, and what it reports while it trains."""

from typing import Annotated, Literal

from pydantic import BaseModel

from swiftlite.config import types
from swiftlite.config.setting import CHECKPOINTS, LOGGING, flag
from swiftlite.config.types import Count, Every, EveryOrNever, OptionalEvery, OptionalText, Size, Spelling, ToList

Tracker = Annotated[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"], Spelling()]


class OutputSettings(BaseModel):
    """A part of `RunConfig`."""

    output_dir: OptionalText = flag(
        None,
        CHECKPOINTS,
        "Folder for everything the run writes.",
        "save",
        shown="runs/<model>-<method>-<time>",
        metavar="PATH",
        short="o",
    )
    save_steps: EveryOrNever = flag(
        500, CHECKPOINTS, "Steps between checkpoints, part of the run (0.1), `epoch`, `epoch/4`, or `never`.",
        "save_interval", metavar="N|PART|epoch",
        phrases={"save_strategy": types.STRATEGY_OR_NEVER, "saves_per_epoch": types.AN_EPOCH},
    )  # fmt: skip
    keep_checkpoints: Count = flag(2, CHECKPOINTS, "Newest checkpoints to keep.", "save_total_limit")
    result: Annotated[Literal["last", "best"], Spelling()] = flag(
        "last", CHECKPOINTS, "What model/ is: the last weights, or the checkpoint with the best evaluation.",
        phrases={"load_best_model_at_end": {types.ON_ALONE: "best", types.OFF_WORDS: "last"}},
    )  # fmt: skip
    resume: Annotated[str, Spelling(types.RESUME)] = flag(
        "never",
        CHECKPOINTS,
        "`never`, `auto` (the newest complete checkpoint, if any), or the folder of a run or checkpoint.",
        "resume_from_checkpoint",
        metavar="auto|PATH",
        bare="auto",
    )
    max_shard_size: Size = flag("5GB", CHECKPOINTS, "Largest safetensors file of the result.", metavar="SIZE")
    save_dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Spelling(types.DTYPE)] = flag(
        "auto", CHECKPOINTS, "Type of the saved weights; `auto` is the source model's."
    )

    log_steps: Every = flag(
        1, LOGGING, "Steps between rows of metrics.jsonl, written like `--save-steps`.", "logging_steps",
        "log_interval", "log_every_n_steps", metavar="N|PART|epoch", phrases={"logging_strategy": types.STRATEGY},
    )  # fmt: skip
    log_first_step: bool = flag(
        False, LOGGING, "Log the first step too, whatever `--log-steps` says.", "logging_first_step"
    )
    eval_steps: OptionalEvery = flag(
        None, LOGGING, "Steps between evaluations, written like `--save-steps`.", "eval_interval",
        shown="as --save-steps", metavar="N|PART|epoch",
        phrases=dict.fromkeys(("eval_strategy", "evaluation_strategy"), types.STRATEGY_OR_NEVER)
        | {"evals_per_epoch": types.AN_EPOCH},
    )  # fmt: skip
    eval_on_start: bool = flag(False, LOGGING, "Evaluate before the first step too, as step 0.", "val_before_train")
    report_to: Annotated[list[Tracker], ToList] = flag(
        [],
        LOGGING,
        "Trackers to report to: in project `swiftlite`, or WANDB_PROJECT, SWANLAB_PROJ_NAME, MLFLOW_EXPERIMENT_NAME.",
        shown="none",
    )
    run_name: OptionalText = flag(
        None, LOGGING, "Name of the run in trackers.", shown="the output folder's", metavar="NAME"
    )
    push_to_hub: bool = flag(
        False, CHECKPOINTS, "Upload the result to the Hugging Face hub at the end. Needs `hf auth login`, or HF_TOKEN."
    )
    hub_model_id: OptionalText = flag(
        None, CHECKPOINTS, "Repository of `--push-to-hub`: NAME, or OWNER/NAME.", shown="the output folder's name",
        metavar="NAME",
    )  # fmt: skip
    hub_private: bool = flag(
        False, CHECKPOINTS, "Make a new repository of `--push-to-hub` private.", "hub_private_repo"
    )
