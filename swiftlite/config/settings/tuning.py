"""The settings of what is trained: adapters, all weights or some of the layers."""

from typing import Annotated, Literal

from pydantic import BaseModel

from swiftlite.config.setting import TUNER, flag
from swiftlite.config.types import BelowOne, Count, Integer, Names, NullWord, OptionalText, Ratio, Spelling, Targets


class TunerSettings(BaseModel):
    """A part of `RunConfig`."""

    tuner: Annotated[Literal["lora", "full", "freeze"] | None, Spelling(), NullWord] = flag(
        None,
        TUNER,
        "Train adapters, all weights, or the last layers.",
        "tuner_type",
        "train_type",
        "finetuning_type",
        "sft_type",
        switches={"use_peft": "lora"},
        phrases={"adapter": {"q?lora": "lora"}},  # axolotl's kind of tuning
        shown="lora; full for pretrain",
    )
    adapter: OptionalText = flag(
        None,
        TUNER,
        "Folder of an existing LoRA adapter to go on from.",
        "adapters",
        "adapter_name_or_path",
        "lora_model_dir",
        shown="none",
        metavar="PATH",
    )
    lora_rank: Count = flag(16, TUNER, "Rank of the LoRA matrices.", "lora_r")
    lora_alpha: Count = flag(32, TUNER, "LoRA scale: the update is multiplied by alpha / rank.")
    lora_dropout: BelowOne = flag(0.0, TUNER, "Dropout in front of the LoRA matrices.", "lora_dropout_p")
    target_modules: Targets = flag(
        ["all-linear"],
        TUNER,
        "Layers that get LoRA: `all-linear`, or names.",
        "lora_target",
        "lora_target_modules",
        switches={"lora_target_linear": "all-linear"},
        metavar="NAME ...",
    )
    modules_to_save: Names = flag(
        [],
        TUNER,
        "Modules trained whole beside LoRA, such as `lm_head`.",
        "additional_target",
        "lora_modules_to_save",
        shown="none",
        metavar="NAME ...",
    )
    dora: bool = flag(False, TUNER, "Weight-decomposed LoRA.", "use_dora", "peft_use_dora")
    rslora: bool = flag(
        False, TUNER, "Rank-stabilised LoRA: scale by alpha / sqrt(rank).", "use_rslora", "peft_use_rslora"
    )
    lora_plus_ratio: Ratio = flag(
        1.0, TUNER, "LoRA+: the B matrices learn at so many times the learning rate.", "loraplus_lr_ratio",
        "lorap_lr_ratio", "lora_lr_ratio",
    )  # fmt: skip
    trainable_layers: Integer = flag(
        2, TUNER, "`--tuner freeze`: train the last N layers; negative: the first N.", "freeze_trainable_layers"
    )
    trainable_modules: Names = flag(
        [],
        TUNER,
        "`--tuner freeze`: further parameters, by part of the name or regex.",
        "freeze_extra_modules",
        "trainable_parameters",
        shown="none",
        metavar="NAME ...",
    )
