"""The settings of what a step costs in memory and time."""

from typing import Annotated, Literal

from pydantic import BaseModel

from swiftlite.config.setting import MEMORY, flag
from swiftlite.config.types import BITS, FP8, FSDP_OFFLOAD, KERNELS, OFFLOAD, ON_ALONE, SWITCH, Spelling


class SpeedSettings(BaseModel):
    """A part of `RunConfig`."""

    activation_checkpointing: Annotated[
        Literal["auto", "none", "full", "selective", "offload"],
        Spelling(SWITCH),
    ] = flag(
        "auto",
        MEMORY,
        "Recompute layers in the backward to save memory, all of them or (`selective`) what is cheap; `auto` does the "
        "least that fits. `offload`: all, and a GPU's layer inputs wait in the host's memory.",
        "gradient_checkpointing",
        "recompute_granularity",
        bare="full",
        phrases=dict.fromkeys(
            ("activation_offloading", "enable_activation_offloading", "activation_cpu_offload"), {ON_ALONE: "offload"}
        ),
    )
    offload: Annotated[Literal["none", "cpu"], Spelling(OFFLOAD)] = flag(
        "none", MEMORY, "Keep weights and optimizer state in the host's memory.", "cpu_offload", bare="cpu",
        phrases={"fsdp": {FSDP_OFFLOAD: "cpu"}},
    )  # fmt: skip
    quantization: Annotated[Literal["none", "nf4", "int8"], Spelling(BITS)] = flag(
        "none",
        MEMORY,
        "QLoRA: keep the frozen matrices of the layers in 4 or 8 bits.",
        "load_in_4bit",
        "quantization_bit",
        "quant_bits",
        bare="nf4",
        phrases={"adapter": {"qlora": "nf4"}, "load_in_8bit": {ON_ALONE: "int8"}},
    )
    qat: Annotated[Literal["none", "fp8", "int8", "int4"], Spelling()] = flag(
        "none",
        MEMORY,
        "Quantization-aware training: multiply weights (fp8, int8: and what they meet) as they will be rounded by "
        "`export --quantization`.",
    )
    pure_bf16: bool = flag(
        False,
        MEMORY,
        "Keep trained weights in bf16 only, rounded stochastically: 12 instead of 16 bytes a trained parameter.",
    )
    optimizer_in_backward: bool = flag(
        False,
        MEMORY,
        "Update each weight as soon as its gradient is there and drop that: 4 bytes less a trained parameter.",
        "optimizer_in_bwd",
    )
    kernels: Annotated[Literal["none", "auto", "liger"], Spelling(KERNELS)] = flag(
        "auto",
        MEMORY,
        "Liger's fused norms, MLPs and rotary embeddings on a GPU; `auto`: where it is installed and has them.",
        "use_liger_kernel",
        "enable_liger_kernel",
        bare="liger",
    )
    fp8: Annotated[Literal["none", "rowwise", "rowwise_with_gw_hp"], Spelling(FP8)] = flag(
        "none",
        MEMORY,
        "Multiply the layers' trained matrices in 8-bit floats, by torchao on a Hopper or Ada GPU; "
        "`rowwise_with_gw_hp` leaves weights' gradients in bf16. Goes well with --compile.",
        "enable_fp8_training",
        bare="rowwise",
    )
    compile: bool = flag(False, MEMORY, "Compile each layer by torch.compile.", "torch_compile")
    profile: bool = flag(
        False, MEMORY, "Record steps 3 and 4: a trace and a table of where their time went, in the output folder."
    )
