"""Real shapes of the models that recipes name, and what their weights, gradients and moments take on one GPU.

Shapes: `config.json` in the model's repository on the hub, https://huggingface.co/<id>/blob/main/config.json.
Parameters: the model card. Both are written down apart, so that a slip in either shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from swiftlite.config.layout import Layout

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

GIB = 2**30
FULL_BYTES = 4 + 4 + 8  # fp32 weight, gradient and two AdamW moments
FROZEN_BYTES = 2

TABLE = """
model                                     family       parameters layers hidden heads kv head    ff  vocab tied length
HuggingFaceTB/SmolLM2-135M                llama         134515008     30    576     9  3   64  1536  49152  yes   8192
HuggingFaceTB/SmolLM2-135M-Instruct       llama         134515008     30    576     9  3   64  1536  49152  yes   8192
HuggingFaceTB/SmolLM2-360M-Instruct       llama         361821120     32    960    15  5   64  2560  49152  yes   8192
HuggingFaceTB/SmolLM2-1.7B-Instruct       llama        1711376384     24   2048    32 32   64  8192  49152  yes   8192
meta-llama/Meta-Llama-3-8B-Instruct       llama        8030261248     32   4096    32  8  128 14336 128256   no   8192
meta-llama/Llama-3.1-8B-Instruct          llama        8030261248     32   4096    32  8  128 14336 128256   no 131072
meta-llama/Llama-3.1-70B-Instruct         llama       70553706496     80   8192    64  8  128 28672 128256   no 131072
meta-llama/Llama-3.2-1B-Instruct          llama        1235814400     16   2048    32  8   64  8192 128256  yes 131072
meta-llama/Llama-3.2-3B-Instruct          llama        3212749824     28   3072    24  8  128  8192 128256  yes 131072
meta-llama/Llama-3.3-70B-Instruct         llama       70553706496     80   8192    64  8  128 28672 128256   no 131072
deepseek-ai/DeepSeek-R1-Distill-Llama-8B  llama        8030261248     32   4096    32  8  128 14336 128256   no 131072
deepseek-ai/DeepSeek-R1-Distill-Llama-70B llama       70553706496     80   8192    64  8  128 28672 128256   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B qwen2        1777088000     28   1536    12  2  128  8960 151936   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B   qwen2        7615616512     28   3584    28  4  128 18944 152064   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B  qwen2       14770033664     48   5120    40  8  128 13824 152064   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B  qwen2       32763876352     64   5120    40  8  128 27648 152064   no 131072
Qwen/Qwen2.5-0.5B-Instruct                qwen2         494032768     24    896    14  2   64  4864 151936  yes  32768
Qwen/Qwen2.5-1.5B-Instruct                qwen2        1543714304     28   1536    12  2  128  8960 151936  yes  32768
Qwen/Qwen2.5-3B-Instruct                  qwen2        3085938688     36   2048    16  2  128 11008 151936  yes  32768
Qwen/Qwen2.5-7B-Instruct                  qwen2        7615616512     28   3584    28  4  128 18944 152064   no  32768
Qwen/Qwen2.5-14B-Instruct                 qwen2       14770033664     48   5120    40  8  128 13824 152064   no  32768
Qwen/Qwen2.5-32B-Instruct                 qwen2       32763876352     64   5120    40  8  128 27648 152064   no  32768
Qwen/Qwen3-0.6B                           qwen3         596049920     28   1024    16  8  128  3072 151936  yes  40960
Qwen/Qwen3-1.7B                           qwen3        1720574976     28   2048    16  8  128  6144 151936  yes  40960
Qwen/Qwen3-4B                             qwen3        4022468096     36   2560    32  8  128  9728 151936  yes  40960
Qwen/Qwen3-8B                             qwen3        8190735360     36   4096    32  8  128 12288 151936   no  40960
Qwen/Qwen3-14B                            qwen3       14768307200     40   5120    40  8  128 17408 151936   no  40960
Qwen/Qwen3-32B                            qwen3       32762123264     64   5120    64  8  128 25600 151936   no  40960
Qwen/Qwen3-30B-A3B                        qwen3_moe   30532122624     48   2048    32  4  128  6144 151936   no  40960
mistralai/Mistral-7B-Instruct-v0.3        mistral      7248023552     32   4096    32  8  128 14336  32768   no  32768
google/gemma-3-1b-it                      gemma3_text   999885952     26   1152     4  1  256  6912 262144  yes  32768
google/gemma-3-4b-it                      gemma3       4300079472     34   2560     8  4  256 10240 262208  yes 131072
google/gemma-3-12b-it                     gemma3      12187325040     48   3840    16  8  256 15360 262208  yes 131072
google/gemma-3-27b-it                     gemma3      27432406640     62   5376    32 16  128 21504 262208  yes 131072
microsoft/phi-4                           phi3        14659507200     40   5120    40 10  128 17920 100352   no  16384
"""
KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv": "num_key_value_heads",
    "head": "head_dim", "ff": "intermediate_size", "vocab": "vocab_size", "length": "max_position_embeddings",
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None, "pad_token_id": None},
    "gemma3_text": {"sliding_window": 512},
}  # fmt: skip
SIGLIP = {  # the image tower of Gemma 3, which text leaves alone
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


def _rows() -> dict[str, dict[str, str]]:
    head, *lines = (line.split() for line in TABLE.strip().splitlines())
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


MODELS = _rows()


def real_config(model: str, layers: int | None = None):  # noqa: ANN201 - transformers' class of the family
    """The config of a model on the hub, made without it. layers: another number of them."""
    from transformers import CONFIG_MAPPING

    row = MODELS[model]
    family, tied = row["family"], row["tied"] == "yes"
    values = {key: int(row[column]) for column, key in KEYS.items()} | FAMILIES.get(family, {})
    values["num_hidden_layers"] = layers or values["num_hidden_layers"]
    if family == "gemma3":
        return CONFIG_MAPPING[family](text_config=values, vision_config=SIGLIP, tie_word_embeddings=tied)
    return CONFIG_MAPPING[family](**values, tie_word_embeddings=tied)


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model: one layer, of which its experts, and everything else; LoRA's likewise, a unit of rank."""

    layers: int
    layer: int
    experts: int
    rest: int
    adapted_layer: int
    adapted_rest: int

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.rest

    def adapters(self, rank: int, layers: int | None = None) -> int:
        """LoRA's on every linear layer, of a model with another number of layers if given."""
        return rank * ((layers or self.layers) * self.adapted_layer + self.adapted_rest)


@cache
def sizes(model: str) -> Sizes:
    """Counted on `meta`, with one layer built."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from swiftlite.models.anatomy import dissect

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(real_config(model, layers=1))
    anatomy, layers = dissect(built), real_config(model).get_text_config().num_hidden_layers
    inside = {id(module) for module in anatomy.layers.modules()}
    linear = [m for m in built.modules() if isinstance(m, nn.Linear) and m is not anatomy.head]
    adapted = {
        place: sum(m.in_features + m.out_features for m in linear if (id(m) in inside) is place)
        for place in (True, False)
    }
    return Sizes(
        layers=layers,
        layer=_count(anatomy.layers),
        experts=sum(p.numel() for name, p in anatomy.layers.named_parameters() if ".experts." in name),
        rest=_count(built) - _count(anatomy.layers),
        adapted_layer=adapted[True],
        adapted_rest=adapted[False],
    )


def _count(module) -> int:  # noqa: ANN001
    return sum(p.numel() for p in module.parameters())


def state_gib(config: RunConfig, layout: Layout) -> float:
    """Weights, gradients and AdamW's moments on one GPU."""
    found = sizes(config.model)
    if config.tuner == "full":
        return found.total * FULL_BYTES / layout.shards / GIB
    return (found.total * FROZEN_BYTES + found.adapters(config.lora_rank) * FULL_BYTES) / layout.shards / GIB
