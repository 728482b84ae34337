"""The training methods, and what some of them have in common."""

from typing import Literal

Method = Literal["sft", "pretrain", "dpo", "kto", "rm"]

PAIRED = ("dpo", "rm")  # compare two answers to one prompt
PREFERENCE = (*PAIRED, "kto")
