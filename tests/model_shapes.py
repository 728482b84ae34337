"""Real shapes of the models that recipes name, and what their weights, gradients and moments take on one GPU.

Shapes: `config.json` in the model's repository on the hub, https://huggingface.co/<id>/blob/main/config.json.
Parameters: the model card. Both are written down apart, and parameters are also counted from the shape by hand, so that
a slip in any shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from swiftlite.config.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

    from swiftlite.config.schema import RunConfig

GIB = 2**30
FULL_BYTES = 4 + 4 + 8  # fp32 weight, gradient and two AdamW moments
FROZEN_BYTES = 2
NF4_BITS = 4 + 16 / 64  # a code, and a bf16 scale for 64 of them

TABLE = """
model                                     family        parameters layers hidden heads kv head    ff  vocab tied length
HuggingFaceTB/SmolLM2-135M                llama          134515008     30    576     9  3   64  1536  49152  yes   8192
HuggingFaceTB/SmolLM2-135M-Instruct       llama          134515008     30    576     9  3   64  1536  49152  yes   8192
HuggingFaceTB/SmolLM2-360M-Instruct       llama          361821120     32    960    15  5   64  2560  49152  yes   8192
HuggingFaceTB/SmolLM2-1.7B-Instruct       llama         1711376384     24   2048    32 32   64  8192  49152  yes   8192
HuggingFaceTB/SmolLM3-3B                  smollm3       3075098624     36   2048    16  4  128 11008 128256  yes  65536
meta-llama/Meta-Llama-3-8B-Instruct       llama         8030261248     32   4096    32  8  128 14336 128256   no   8192
meta-llama/Llama-3.1-8B-Instruct          llama         8030261248     32   4096    32  8  128 14336 128256   no 131072
meta-llama/Llama-3.1-70B-Instruct         llama        70553706496     80   8192    64  8  128 28672 128256   no 131072
meta-llama/Llama-3.2-1B-Instruct          llama         1235814400     16   2048    32  8   64  8192 128256  yes 131072
meta-llama/Llama-3.2-3B-Instruct          llama         3212749824     28   3072    24  8  128  8192 128256  yes 131072
meta-llama/Llama-3.3-70B-Instruct         llama        70553706496     80   8192    64  8  128 28672 128256   no 131072
deepseek-ai/DeepSeek-R1-Distill-Llama-8B  llama         8030261248     32   4096    32  8  128 14336 128256   no 131072
deepseek-ai/DeepSeek-R1-Distill-Llama-70B llama        70553706496     80   8192    64  8  128 28672 128256   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B qwen2         1777088000     28   1536    12  2  128  8960 151936   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B   qwen2         7615616512     28   3584    28  4  128 18944 152064   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B  qwen2        14770033664     48   5120    40  8  128 13824 152064   no 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B  qwen2        32763876352     64   5120    40  8  128 27648 152064   no 131072
Qwen/Qwen2.5-0.5B-Instruct                qwen2          494032768     24    896    14  2   64  4864 151936  yes  32768
Qwen/Qwen2.5-1.5B-Instruct                qwen2         1543714304     28   1536    12  2  128  8960 151936  yes  32768
Qwen/Qwen2.5-3B-Instruct                  qwen2         3085938688     36   2048    16  2  128 11008 151936  yes  32768
Qwen/Qwen2.5-7B-Instruct                  qwen2         7615616512     28   3584    28  4  128 18944 152064   no  32768
Qwen/Qwen2.5-14B-Instruct                 qwen2        14770033664     48   5120    40  8  128 13824 152064   no  32768
Qwen/Qwen2.5-32B-Instruct                 qwen2        32763876352     64   5120    40  8  128 27648 152064   no  32768
Qwen/Qwen2.5-72B-Instruct                 qwen2        72706203648     80   8192    64  8  128 29568 152064   no  32768
Qwen/Qwen2.5-Coder-7B-Instruct            qwen2         7615616512     28   3584    28  4  128 18944 152064   no  32768
Qwen/Qwen2.5-Coder-32B-Instruct           qwen2        32763876352     64   5120    40  8  128 27648 152064   no  32768
Qwen/Qwen2.5-VL-7B-Instruct               qwen2_5_vl    8292166656     28   3584    28  4  128 18944 152064   no 128000
Qwen/Qwen3-VL-8B-Instruct                 qwen3_vl      8767123696     36   4096    32  8  128 12288 151936   no 262144
Qwen/Qwen3-0.6B                           qwen3          596049920     28   1024    16  8  128  3072 151936  yes  40960
Qwen/Qwen3-1.7B                           qwen3         1720574976     28   2048    16  8  128  6144 151936  yes  40960
Qwen/Qwen3-4B                             qwen3         4022468096     36   2560    32  8  128  9728 151936  yes  40960
Qwen/Qwen3-8B                             qwen3         8190735360     36   4096    32  8  128 12288 151936   no  40960
Qwen/Qwen3-14B                            qwen3        14768307200     40   5120    40  8  128 17408 151936   no  40960
Qwen/Qwen3-32B                            qwen3        32762123264     64   5120    64  8  128 25600 151936   no  40960
Qwen/Qwen3-4B-Instruct-2507               qwen3         4022468096     36   2560    32  8  128  9728 151936  yes 262144
Qwen/Qwen3.5-0.8B                         qwen3_5        873438784     24   1024     8  2  256  3584 248320  yes 262144
Qwen/Qwen3.5-2B                           qwen3_5       2274069824     24   2048     8  2  256  6144 248320  yes 262144
Qwen/Qwen3.5-4B                           qwen3_5       4659865088     32   2560    16  4  256  9216 248320  yes 262144
Qwen/Qwen3.5-9B                           qwen3_5       9653104368     32   4096    16  4  256 12288 248320   no 262144
Qwen/Qwen3-30B-A3B                        qwen3_moe    30532122624     48   2048    32  4  128  6144 151936   no  40960
Qwen/Qwen3-30B-A3B-Instruct-2507          qwen3_moe    30532122624     48   2048    32  4  128  6144 151936   no 262144
Qwen/Qwen3-Next-80B-A3B-Instruct          qwen3_next   81324862720     48   2048    16  2  256  5632 151936   no 262144
mistralai/Mistral-7B-Instruct-v0.3        mistral       7248023552     32   4096    32  8  128 14336  32768   no  32768
mistralai/Mistral-Nemo-Instruct-2407      mistral      12247782400     40   5120    32  8  128 14336 131072   no 128000
mistralai/Mistral-Small-24B-Instruct-2501 mistral      23572403200     40   5120    32  8  128 32768 131072   no  32768
mistralai/Mistral-Small-3.1-24B-Instruct-2503 mistral3 24011361280     40   5120    32  8  128 32768 131072   no 131072
google/gemma-3-1b-it                      gemma3_text    999885952     26   1152     4  1  256  6912 262144  yes  32768
google/gemma-3-4b-it                      gemma3        4300079472     34   2560     8  4  256 10240 262208  yes 131072
google/gemma-3-12b-it                     gemma3       12187325040     48   3840    16  8  256 15360 262208  yes 131072
google/gemma-3-27b-it                     gemma3       27432406640     62   5376    32 16  128 21504 262208  yes 131072
microsoft/phi-4                           phi3         14659507200     40   5120    40 10  128 17920 100352   no  16384
microsoft/Phi-4-mini-instruct             phi3          3836021760     32   3072    24  8  128  8192 200064  yes 131072
openai/gpt-oss-20b                        gpt_oss      20914757184     24   2880    64  8   64  2880 201088   no 131072
openai/gpt-oss-120b                       gpt_oss     116829156672     36   2880    64  8   64  2880 201088   no 131072
allenai/OLMo-2-1124-7B-Instruct           olmo2         7298617344     32   4096    32 32  128 11008 100352   no   4096
allenai/OLMo-2-1124-13B-Instruct          olmo2        13716198400     40   5120    40 40  128 13824 100352   no   4096
ibm-granite/granite-3.3-2b-instruct       granite       2533539840     40   2048    32  8   64  8192  49159  yes 131072
ibm-granite/granite-3.3-8b-instruct       granite       8170864640     40   4096    32  8  128 12800  49159  yes 131072
zai-org/GLM-4-9B-0414                     glm4          9400279040     40   4096    32  2  128 13696 151552   no  32768
"""
KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv": "num_key_value_heads",
    "head": "head_dim", "ff": "intermediate_size", "vocab": "vocab_size", "length": "max_position_embeddings",
}  # fmt: skip
DELTA_NET = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt_oss": {"num_experts_per_tok": 4, "sliding_window": 128},
    "mistral": {"sliding_window": None},
    "mistral3": {"model_type": "mistral", "sliding_window": None},
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}},
    "phi3": {"sliding_window": None, "pad_token_id": None},
    "gemma3_text": {"sliding_window": 512},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "qwen3_5": DELTA_NET,
    "qwen3_next": DELTA_NET | {
        "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
OWN = {  # what models of one family have unlike
    "openai/gpt-oss-20b": {"num_local_experts": 32},
    "openai/gpt-oss-120b": {"num_local_experts": 128},
    "microsoft/Phi-4-mini-instruct": {"partial_rotary_factor": 0.75, "sliding_window": 262144},
    "ibm-granite/granite-3.3-2b-instruct": {"attention_multiplier": 0.015625, "logits_scaling": 8.0},
    "ibm-granite/granite-3.3-8b-instruct": {"attention_multiplier": 0.0078125, "logits_scaling": 16.0},
    "Qwen/Qwen3.5-0.8B": {"linear_num_value_heads": 16},
    "Qwen/Qwen3.5-2B": {"linear_num_value_heads": 16},
    "Qwen/Qwen3.5-4B": {"linear_num_value_heads": 32},
    "Qwen/Qwen3.5-9B": {"linear_num_value_heads": 32},
}
IMAGES = {  # the towers of models that take images too, which text leaves alone
    "gemma3": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
    "mistral3": {
        "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14,
    },
    "qwen2_5_vl": {
        "hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": {
        "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "out_hidden_size": 4096,
        "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
TOWERS = {  # those of Qwen3.5, of which a language model is without: width, features and layers
    "Qwen/Qwen3.5-0.8B": (768, 3072, 12),
    "Qwen/Qwen3.5-2B": (1024, 4096, 24),
    "Qwen/Qwen3.5-4B": (1024, 4096, 24),
    "Qwen/Qwen3.5-9B": (1152, 4304, 27),
}
HYBRID = ("qwen3_5", "qwen3_next")
PERIOD = 4  # layers of these, of which the last is attention and the others are gated delta nets
MIXTURES = ("qwen3_moe", "qwen3_next", "gpt_oss")


def _rows() -> dict[str, dict[str, str]]:
    head, *lines = (line.split() for line in TABLE.strip().splitlines())
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


MODELS = _rows()


def real_config(model: str, layers: int | None = None, overrides: Mapping[str, str] | None = None):  # noqa: ANN201
    """The config of a model on the hub, made without it, of transformers' class of the family. layers: another number
    of them; overrides: of `--config-overrides`, whole numbers."""
    from transformers import CONFIG_MAPPING

    row = MODELS[model]
    family, tied = row["family"], row["tied"] == "yes"
    values = {key: int(row[column]) for column, key in KEYS.items()} | FAMILIES.get(family, {}) | OWN.get(model, {})
    values |= {key: int(value) for key, value in (overrides or {}).items()}
    values["num_hidden_layers"] = layers or values["num_hidden_layers"]
    if family in IMAGES:
        return CONFIG_MAPPING[family](text_config=values, vision_config=IMAGES[family], tie_word_embeddings=tied)
    if family == "qwen3_5":
        return CONFIG_MAPPING[family](text_config=values | {"tie_word_embeddings": tied}, tie_word_embeddings=tied)
    return CONFIG_MAPPING[family](**values, tie_word_embeddings=tied)


@dataclass(frozen=True)
class Layer:
    """Parameters of one layer, of which its experts, and its matrices that quantization packs; LoRA's, a unit of rank,
    in a mixture on what is before the experts."""

    count: int
    experts: int
    matrices: int
    adapted: int


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model: its layers, and everything else, of which an output head of its own, and what images go
    through; LoRA's there, a unit of rank."""

    layers: tuple[Layer, ...]
    rest: int
    head: int
    tower: int

    @property
    def total(self) -> int:
        return sum(layer.count for layer in self.layers) + self.rest

    @property
    def packed(self) -> int:
        """In matrices that quantization packs."""
        return sum(layer.matrices for layer in self.layers)

    def adapters(self, rank: int, layers: int | None = None) -> int:
        """LoRA's on every linear layer, of a model with fewer layers if given."""
        return rank * sum(layer.adapted for layer in self.layers[:layers])


def sizes(model: str, overrides: Mapping[str, str] | None = None) -> Sizes:
    """Counted by hand from the shape."""
    config = real_config(model, overrides=overrides)
    shape, family = config.get_text_config(), MODELS[model]["family"]
    head = 0 if config.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    tower = _tower(family, shape.hidden_size) if family in IMAGES else 0
    return Sizes(
        layers=tuple(_layer(shape, family, place) for place in range(shape.num_hidden_layers)),
        rest=shape.vocab_size * shape.hidden_size + head + shape.hidden_size + tower,
        head=head,
        tower=tower,
    )


def left_out(model: str) -> int:
    """Parameters of the model card that a language model is without: of hybrid models the layer that predicts a second
    token, with what leads both of its inputs into it, and of Qwen3.5 the image tower."""
    if MODELS[model]["family"] not in HYBRID:
        return 0
    shape = real_config(model).get_text_config()
    hidden = shape.hidden_size
    second = _layer(shape, MODELS[model]["family"], PERIOD - 1).count + 2 * hidden * hidden + 3 * hidden
    if model not in TOWERS:
        return second
    return _qwen_tower(*TOWERS[model], hidden) + second


def _layer(shape: PretrainedConfig, family: str, place: int) -> Layer:
    nets = family in HYBRID and (place + 1) % PERIOD
    mixing, small = _delta_net(shape, family) if nets else (_attention(shape, family), _small(shape, family))
    feeding, experts = _feed_forward(shape, family), _experts(shape, family)
    matrices = sum(rows * columns for rows, columns in [*mixing, *feeding])
    adapted = mixing if family in MIXTURES else [*mixing, *feeding]
    small += _routing(shape, family) + 2 * shape.hidden_size
    return Layer(matrices + experts + small, experts, matrices, sum(rows + columns for rows, columns in adapted))


def _delta_net(shape: PretrainedConfig, family: str) -> tuple[list[tuple[int, int]], int]:
    """((inputs, outputs) of linear layers, other parameters) of what a hybrid model has in place of attention: what
    leads into queries, keys and values, into their gate and into two numbers a head, and out; a convolution, two
    numbers a head and a norm."""
    hidden, heads = shape.hidden_size, shape.linear_num_value_heads
    keys, values = shape.linear_num_key_heads * shape.linear_key_head_dim, heads * shape.linear_value_head_dim
    into = [(hidden, 2 * keys + values), (hidden, values), (hidden, heads), (hidden, heads)]
    if family == "qwen3_next":
        into = [(hidden, 2 * keys + 2 * values), (hidden, 2 * heads)]
    small = (2 * keys + values) * shape.linear_conv_kernel_dim + 2 * heads + shape.linear_value_head_dim
    return [*into, (values, hidden)], small


def _attention(shape: PretrainedConfig, family: str) -> list[tuple[int, int]]:
    """(inputs, outputs) of its linear layers, of which Phi-3's are fused in part."""
    hidden = shape.hidden_size
    queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    asked = 2 * queries if family in HYBRID else queries  # with a gate of what attention gives
    apart = [(hidden, asked), (hidden, keys), (hidden, keys)]
    return [*([(hidden, queries + 2 * keys)] if family == "phi3" else apart), (queries, hidden)]


def _feed_forward(shape: PretrainedConfig, family: str) -> list[tuple[int, int]]:
    """(inputs, outputs) of its linear layers, of which those of Phi-3 and GLM-4 are fused in part. Of mixtures only
    Qwen3-Next has any: an expert for all tokens, and its gate."""
    hidden, features = shape.hidden_size, shape.intermediate_size
    if family == "qwen3_next":
        shared = shape.shared_expert_intermediate_size
        return [*2 * [(hidden, shared)], (shared, hidden), (hidden, 1)]
    if family in MIXTURES:
        return []
    gate = [(hidden, 2 * features)] if family in ("phi3", "glm4") else 2 * [(hidden, features)]
    return [*gate, (features, hidden)]


def _experts(shape: PretrainedConfig, family: str) -> int:
    """Three matrices an expert, in gpt-oss with a bias each."""
    if family in ("qwen3_moe", "qwen3_next"):
        return shape.num_experts * 3 * shape.hidden_size * shape.moe_intermediate_size
    if family != "gpt_oss":
        return 0
    hidden, features = shape.hidden_size, shape.intermediate_size
    return shape.num_local_experts * (3 * hidden * features + 2 * features + hidden)


def _routing(shape: PretrainedConfig, family: str) -> int:
    if family in ("qwen3_moe", "qwen3_next"):
        return shape.num_experts * shape.hidden_size
    return shape.num_local_experts * (shape.hidden_size + 1) if family == "gpt_oss" else 0


def _small(shape: PretrainedConfig, family: str) -> int:
    """Biases and sinks of attention, its own norms, and a layer's beyond two."""
    hidden, size = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * size, shape.num_key_value_heads * size
    count = 2 * hidden if family in ("gemma3", "gemma3_text", "glm4") else 0
    if family in ("qwen3", "qwen3_moe", "qwen3_vl", *HYBRID, "gemma3", "gemma3_text"):
        count += 2 * size  # norms of each head's query and key
    if family == "olmo2":
        count += queries + keys  # norms of all heads' together
    if family in ("qwen2", "qwen2_5_vl", "glm4", "gpt_oss"):
        count += queries + 2 * keys
    if family == "gpt_oss":
        count += hidden + shape.num_attention_heads
    return count


def _tower(family: str, hidden: int) -> int:
    """Parameters of the image tower and of what leads it into a text model."""
    shape = IMAGES[family]
    width, features, patch = (shape[key] for key in ("hidden_size", "intermediate_size", "patch_size"))
    layers = shape.get("num_hidden_layers", shape.get("depth"))
    if family == "gemma3":  # SigLIP
        layer = _with_biases(*4 * [(width, width)], (width, features), (features, width)) + 4 * width
        patches = (shape["image_size"] // patch) ** 2
        embedding = 3 * patch**2 * width + width + patches * width
        return layers * layer + embedding + 2 * width + width * hidden + width
    if family == "mistral3":  # Pixtral, four patches of which are one, and two layers
        layer = 4 * width**2 + 3 * width * features + 2 * width
        merged = width + 4 * width * width + width * hidden + hidden * hidden
        return layers * layer + 3 * patch**2 * width + width + merged
    if family == "qwen2_5_vl":
        gated = _with_biases((width, 3 * width), (width, width), *2 * [(width, features)], (features, width))
        merged = width + _with_biases((4 * width, 4 * width), (4 * width, hidden))
        return layers * (gated + 2 * width) + 3 * 2 * patch**2 * width + merged
    deep = 2 * 4 * width + _with_biases((4 * width, 4 * width), (4 * width, hidden))  # what early layers of text get
    return _qwen_tower(width, features, layers, hidden) + len(shape["deepstack_visual_indexes"]) * deep


def _qwen_tower(width: int, features: int, layers: int, hidden: int) -> int:
    """Of Qwen3-VL, without what its early layers of text get, and of Qwen3.5."""
    linear = [(width, 3 * width), (width, width), (width, features), (features, width)]
    embedding = 3 * 2 * 16**2 * width + width + 48**2 * width
    merger = 2 * width + _with_biases((4 * width, 4 * width), (4 * width, hidden))
    return layers * (_with_biases(*linear) + 4 * width) + embedding + merger


def _with_biases(*linear: tuple[int, int]) -> int:
    return sum(rows * columns + columns for rows, columns in linear)


def unlike_layers(model: str) -> int:
    """How many there are until they repeat."""
    return PERIOD if MODELS[model]["family"] in HYBRID else 1


@cache
def built_sizes(model: str) -> Sizes:
    """Counted in what transformers builds, on `meta`, with as many layers as are unlike."""
    import torch
    from torch import nn

    from swiftlite.models.anatomy import beside_text, dissect
    from swiftlite.models.architecture import auto_class

    unlike = unlike_layers(model)
    shallow = real_config(model, layers=unlike)
    with torch.device("meta"):
        built = auto_class(shallow, classifier=False).from_config(shallow)
    anatomy = dissect(built)

    def linear(module: nn.Module) -> list[nn.Linear]:
        return [m for m in module.modules() if isinstance(m, nn.Linear) and m is not anatomy.head]

    def adapted(module: nn.Module) -> int:
        shared = [part for name, part in module.named_modules() if "shared_expert" in name]
        return sum(m.in_features + m.out_features for m in linear(module) if m not in shared)

    layers = tuple(
        Layer(
            count=_count(layer),
            experts=sum(p.numel() for name, p in layer.named_parameters() if ".experts." in name),
            matrices=sum(m.weight.numel() for m in linear(layer)),
            adapted=adapted(layer),
        )
        for layer in anatomy.layers
    )
    return Sizes(
        layers=real_config(model).get_text_config().num_hidden_layers // unlike * layers,
        rest=_count(built) - _count(anatomy.layers),
        head=0 if anatomy.head.weight is anatomy.embedding.weight else anatomy.head.weight.numel(),
        tower=sum(parameter.numel() for parameter in beside_text(built).values()),
    )


def _count(module) -> int:  # noqa: ANN001
    return sum(p.numel() for p in module.parameters())


def trained_bytes(config: RunConfig) -> tuple[float, float, float]:
    """(weight, gradient, AdamW's moments) of a trained number. Of scales of 8-bit moments nothing is told."""
    size = 2 if config.pure_bf16 else 4
    moments = {"adamw": 8, "adamw_8bit": 2, "paged_adamw": 0}  # of the last the host has them
    return size, 0 if config.optimizer_in_backward else size, moments[config.optimizer]


def frozen_bytes(config: RunConfig) -> float:
    """Of a number that is frozen as it is: beside trained weights as those are."""
    return trained_bytes(config)[0] if config.tuner == "full" else FROZEN_BYTES


def parameters(config: RunConfig) -> tuple[int, int, int]:
    """(frozen as they are, frozen and packed, trained) numbers of a run's model. A reward model has a score head in
    place of the other, trained beside LoRA too; its LoRA is on every linear layer. An image tower stays frozen."""
    found = sizes(config.model, config.config_overrides)
    scores = config.method == "rm"
    total = found.total - found.head * scores
    score = real_config(config.model).get_text_config().hidden_size * scores
    if config.tuner == "full":
        return found.tower, 0, total - found.tower + score
    packed = found.packed if config.quantization == "nf4" else 0
    return total - packed, packed, found.adapters(config.lora_rank) + score


def state_gib(config: RunConfig, layout: Layout) -> float:
    """Weights, gradients and AdamW's moments on one GPU."""
    plain, packed, trained = parameters(config)
    held = plain * frozen_bytes(config) + packed * NF4_BITS / 8 + trained * sum(trained_bytes(config))
    return held / layout.shards / GIB
