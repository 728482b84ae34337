"""The settings of methods that learn from preferences, dpo, kto and rm, and the name of a loss."""

from typing import Annotated, Literal

from pydantic import BaseModel

from swiftlite.config import types
from swiftlite.config.setting import PREFERENCE, flag
from swiftlite.config.types import Names, NotNegative, NullWord, OptionalNotNegative, Positive, Spelling


class PreferenceSettings(BaseModel):
    """A part of `RunConfig`."""

    loss: Names = flag(
        [],
        PREFERENCE,
        "What is made of log-probabilities; several are added up: `sigmoid:0.8 sft:1.0`. dpo: sigmoid, hinge, ipo, "
        "robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop, simpo, cpo, orpo, sft; "
        "kto: kto, apo_zero_unpaired; sft: cross_entropy, dft (weighted by each token's own probability); grpo: dapo, "
        "grpo, dr_grpo, which divide by the step's tokens, each answer's own, and --max-new-tokens; gspo, with "
        "ratios of whole answers; cispo, where what is clipped still teaches.",
        "loss_type",
        "pref_loss",
        phrases=dict.fromkeys(("rlhf_type", "rl"), {types.LOSSES_AS_METHODS: r"\1"})
        | dict.fromkeys(("enable_dft_loss", "use_dft_loss"), {types.ON_ALONE: "dft"})
        | {"loss_agg_mode": types.MEANS, "policy_loss_type": {"(gspo)": r"\1"}},
        shown="sigmoid; kto; cross_entropy; dapo",
        metavar="NAME[:WEIGHT] ...",
    )
    beta: OptionalNotNegative = flag(
        None, PREFERENCE, "How strongly the model is held to the reference; lambda of orpo.", "pref_beta", "rl_beta",
        "orpo_alpha", "kl_coeff", "kl_loss_coef", shown="0.1; 0 for grpo",
    )  # fmt: skip
    label_smoothing: NotNegative = flag(
        0.0, PREFERENCE, "Share of labels taken to be wrong, below 0.5; for sigmoid, robust and exo_pair."
    )
    rpo_alpha: NotNegative = flag(0.0, PREFERENCE, "Weight of the chosen answer's NLL, added to the loss.", "pref_ftx")
    simpo_gamma: OptionalNotNegative = flag(None, PREFERENCE, "Margin of simpo.", shown="0.5")
    reference: Annotated[Literal["precompute", "model"] | None, Spelling(), NullWord] = flag(
        None,
        PREFERENCE,
        "Where the reference's values come from: a pass before training, kept on disk, or a second copy of the model.",
        shown="adapters switched off under lora without --adapter; else model where no answer is scored twice and the "
        "copy takes less than a quarter of the memory left free, or precompute",
        switches={"precompute_ref_log_probs": "precompute"},
    )
    desirable_weight: Positive = flag(
        1.0, PREFERENCE, "kto: weight of desirable answers.", "kto_chosen_weight", "chosen_weight",
        "kto_desirable_weight",
    )  # fmt: skip
    undesirable_weight: Positive = flag(
        1.0, PREFERENCE, "kto: weight of undesirable answers.", "kto_rejected_weight", "rejected_weight",
        "kto_undesirable_weight",
    )  # fmt: skip
    center_rewards: NotNegative = flag(
        0.0,
        PREFERENCE,
        "rm: weight of the squared sum of a pair's scores, which keeps them around 0.",
        "center_rewards_coefficient",
    )
    share_prompt: bool = flag(True, PREFERENCE, "Compute the prompt of a pair, or of a group, once for its answers.")
