"""The settings of knowledge distillation: a second model, whose next-token probabilities are learnt."""

from typing import Annotated

from pydantic import BaseModel, Field

from swiftlite.config.setting import OPTIMIZATION, flag
from swiftlite.config.types import Count, Number, OptionalText

Share = Annotated[float, Field(ge=0.001, le=1), Number]  # of less the KL, found as a rest, would not be exact


class TeacherSettings(BaseModel):
    """A part of `RunConfig`."""

    teacher: OptionalText = flag(
        None,
        OPTIMIZATION,
        "A larger model with the same tokens, whose next-token probabilities are learnt beside the text (knowledge "
        "distillation), with grpo on the model's own answers beside rewards, or without any; named as --model is.",
        "teacher_model",
        "teacher_model_name_or_path",
        shown="none",
        metavar="NAME",
    )
    teacher_weight: Share = flag(
        0.5, OPTIMIZATION, "What the teacher counts in the loss; the text, or rewards, count the rest of 1.", "kd_ratio"
    )
    teacher_tokens: Count = flag(
        64, OPTIMIZATION, "How many of the tokens that the teacher finds likeliest are learnt at each place.",
        "teacher_top_k", "gkd_logits_topk", "kd_top_k",
    )  # fmt: skip
