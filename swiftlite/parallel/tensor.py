"""Tensor parallelism of an unmodified Hugging Face model, put on from outside.

Every parameter becomes a DTensor on the `tp` mesh, whole (`Replicate`) or cut along one dimension (`Shard`), so its
placement always says which box of the whole tensor a rank holds: output features of column layers, input features of
row layers, rows of the vocabulary, experts of a mixture. Computation is local: while a module runs it sees this rank's
part of its weights as plain tensors, and activations change form only at the borders of `tensor_borders`.

The rule behind every gradient: a whole activation has a whole, equal gradient on each rank. Where it enters divided
computation each rank finds a part of its gradient, and the parts are summed at that border, once a block. Whole weights
inside divided computation (norms of queries and keys, one half of a LoRA adapter) are summed in the same way.

Sources: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198),
https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.parallel.tensor_borders import Borders, View, change_input, change_output, run_on_tokens, see_locally
from swiftlite.parallel.tensor_plan import KEY_VALUE, Part, TensorPlan, check_tensor_parallel, kv_heads_fit, tensor_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COLUMNS, ROWS = (Part.COLUMN, Part.COLUMN_GATHERED), (Part.ROW, Part.ROW_SPLIT)


def apply_tensor_parallel(
    model: nn.Module, base: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool = True
) -> None:
    """Divide a model over the ranks of a 1-D mesh, in place; best on `meta`, before `fully_shard` and loading.

    model: what is trained, `base` itself or a PeftModel around it; base: the causal language model.
    sequence_parallel: also divide the tokens of what lies between the blocks of a layer (norms, residuals): the same
    traffic, less memory. A micro-batch may have any number of tokens.

    Afterwards every parameter is a DTensor on `mesh`, and so is its gradient, with the same placement; parameters that
    were one still are; hidden states enter and leave the decoder layers as whole plain tensors, and `base` still
    returns whole logits. Raises UserError for an architecture, a size or an adapter that cannot be divided.
    """
    check_tensor_parallel(base.config, mesh.size())
    _Division(model, base, mesh, sequence_parallel).apply()


class _Division:
    """Finds a placement and a local view for every parameter, and puts the borders around the modules."""

    def __init__(self, model: nn.Module, base: PreTrainedModel, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.model, self.base, self.mesh = model, base, mesh
        self.decoder = dissect(base).decoder  # also finds what becomes of logits, while the head is whole
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.plan: TensorPlan = tensor_plan(base.config)
        self.borders = Borders(mesh)
        self.adapted = model is not base
        self.sequence_parallel = sequence_parallel
        self.placements: dict[int, Replicate | Shard] = {}  # by id of the parameter: tied modules share an entry
        self.views: dict[nn.Module, dict[str, View]] = {}  # other than a plain `local_weight`

    def apply(self) -> None:
        if self.adapted:
            _refuse_adapters(self.model)
        decoder = self.decoder
        parts = {name: part for name, _ in decoder.named_modules() if (part := self.plan.part(name)) is not None}
        for name, _ in decoder.named_parameters():
            if self.plan.part(name) is not None:  # such as attention sinks, one entry a head
                owner, _, parameter = name.rpartition(".")
                self._cut(decoder.get_submodule(owner), parameter, 0, name)
        blocks: dict[str, dict[str, Part]] = {}
        for name, part in parts.items():
            owner, _, child = name.rpartition(".")
            blocks.setdefault(owner, {})[child] = part
        for name, children in blocks.items():
            children |= self._unplanned(name, decoder.get_submodule(name), children)
        by_tokens = self._divide_layers(decoder, blocks) if self.sequence_parallel else set()
        for name, children in blocks.items():
            self._divide_block(name, decoder.get_submodule(name), children, name in by_tokens)
        self._divide_vocabulary()
        self._distribute()

    # --- layers: what lies between blocks -----------------------------------------------------------------------------

    def _divide_layers(self, decoder: nn.Module, blocks: dict[str, dict[str, Part]]) -> set[str]:
        """Divide hidden states between the layers' blocks by tokens. Returns the names of blocks that take them so."""
        layers = {name: module for name, module in decoder.named_modules() if re.fullmatch(r"layers\.[^.]+", name)}
        if not layers or any(layer._parameters for layer in layers.values()):  # would meet a DTensor as plain tensors
            return set()
        embeds = self.base.config.get_text_config().to_dict().get("hidden_size_per_layer_input")
        if embeds or layers.keys() & blocks.keys():  # so would layers' embeddings, and tokens laid flat for experts
            return set()
        taking: set[str] = set()
        ordered = list(layers.values())
        change_input(ordered[0], self.borders.split_tokens)
        for name, layer in layers.items():
            for child_name, child in layer.named_children():
                full = f"{name}.{child_name}"
                if full in blocks and self._is_open(child, blocks[full]):
                    taking.add(full)
                elif "Norm" in type(child).__name__ or not list(child.parameters()):
                    run_on_tokens(child, self.borders)
                    self.views[child] = {parameter: self.borders.summed_weight for parameter in child._parameters}
                else:
                    change_input(child, self.borders.gather)
                    change_output(child, self.borders.split_tokens)
        change_output(ordered[-1], lambda x: self.borders.gather(x).clone())  # FSDP's hooks do not survive on a view
        return taking

    def _is_open(self, block: nn.Module, children: dict[str, Part]) -> bool:
        """Whether all that a block does with its input is divided, so that the border can stand around the block."""
        inside = {*COLUMNS, *ROWS, Part.SUMMED, Part.HEAD_NORM}
        holding = [name for name, child in block.named_children() if any(True for _ in child.parameters())]
        return any(part in COLUMNS for part in children.values()) and all(
            children.get(name) in inside for name in holding
        )

    # --- blocks: attention, feed-forward, mixtures --------------------------------------------------------------------

    def _divide_block(self, name: str, block: nn.Module, children: dict[str, Part], by_tokens: bool) -> None:
        is_open = self._is_open(block, children)
        if is_open:
            change_input(block, self.borders.enter)
        for child_name, part in children.items():
            full, child = f"{name}.{child_name}", block.get_submodule(child_name)
            for module in self._copies(child):
                if part is Part.EXPERTS:
                    self._divide_experts(module, full)
                elif part is Part.LATENT:
                    self._divide_latent(module)
                elif part is Part.SUMMED:
                    self.views[module] = {parameter: self.borders.summed_weight for parameter in module._parameters}
                elif part is Part.HEAD_NORM:
                    self._cut(module, "weight", 0, full)
                elif part in COLUMNS:
                    self._divide_column(module, full, part, block)
                    if not is_open:
                        change_input(module, self.borders.enter)
                else:
                    self._divide_row(module, full, part, by_tokens)

    def _unplanned(self, name: str, block: nn.Module, children: dict[str, Part]) -> dict[str, Part]:
        """The parts of what lies between columns and rows and the architecture's plan leaves out: norms of queries and
        keys, and activations with weights of their own (xIELU)."""
        attends = children.get("k_proj") is Part.COLUMN
        if not attends and ("attn" in name or not {Part.COLUMN, Part.ROW} <= set(children.values())):
            return {}
        found = {}
        for child_name, child in block.named_children():
            if child_name in children or not any(True for _ in child.parameters()):
                continue
            if not re.fullmatch(r"(q|k|query|key)_(layer)?norm" if attends else r"act(ivation)?(_fn)?", child_name):
                raise UserError(
                    f"the tensor-parallel plan of {self.base.config.model_type} does not say what to do with "
                    f"{name}.{child_name}",
                    where="--tensor-parallel-size",
                    fix="use --tensor-parallel-size 1",
                )
            found[child_name] = Part.HEAD_NORM if attends and child.weight.ndim == 2 else Part.SUMMED
        return found

    def _divide_column(self, module: nn.Module, name: str, part: Part, block: nn.Module) -> None:
        linear, downs, ups = self._linear(module, name)
        rows = self._shared_rows(linear, name, block) if part is Part.COLUMN else None
        for down in downs:
            self.views[down] = {"weight": self.borders.summed_weight}
        for owner in (linear, *ups):
            for parameter in owner._parameters:
                if rows is None:
                    self._cut(owner, parameter, 0, name)
                else:
                    self._view(owner, parameter, lambda weight, rows=rows: self.borders.summed_weight(weight)[rows])
        if part is Part.COLUMN_GATHERED:
            features = linear.weight.shape[0]
            change_output(module, lambda x: self.borders.gather_features(x, features))

    def _shared_rows(self, linear: nn.Linear, name: str, block: nn.Module) -> slice | None:
        """The output features of the one key/value head this rank uses, where there are fewer of them than ranks."""
        if name.rpartition(".")[2] not in KEY_VALUE or "head_dim" not in vars(block):
            return None
        width = block.head_dim
        heads = linear.weight.shape[0] // width
        if heads % self.size == 0:
            return None
        if not kv_heads_fit(heads, self.size):
            raise _indivisible(name, f"{heads} heads", self.size)
        first = self.rank * heads // self.size * width
        return slice(first, first + width)

    def _divide_row(self, module: nn.Module, name: str, part: Part, by_tokens: bool) -> None:
        linear, downs, ups = self._linear(module, name)
        if any(up._parameters.get("bias") is not None for up in ups):  # each rank would add it to its part of the sum
            raise UserError(
                f"the adapter of {name} has a bias, which tensor parallelism cannot divide",
                where="--tensor-parallel-size",
                fix="use --tensor-parallel-size 1",
            )
        for owner in (linear, *downs):
            self._cut(owner, "weight", 1, name)
        for up in ups:
            self.views[up] = {"weight": self.borders.summed_weight}
        if part is Part.ROW_SPLIT:
            change_input(module, self.borders.split_features)
        has_bias = linear._parameters["bias"] is not None
        if has_bias:  # added once, to the sum
            self._view(linear, "bias", lambda _: None)

        def finish_by_tokens(x: torch.Tensor) -> DTensor:
            x = self.borders.sum_by_tokens(x)
            if not has_bias:
                return x
            return self.borders.on_tokens(x, lambda y: y + self.borders.summed_weight(linear._parameters["bias"]))

        def finish(x: torch.Tensor) -> torch.Tensor:
            x = self.borders.sum(x)
            return x + self.borders.local_weight(linear._parameters["bias"]) if has_bias else x

        change_output(module, finish_by_tokens if by_tokens else finish)

    def _divide_latent(self, module: nn.Module) -> None:
        """The compressed keys and values stay whole, the rotary part next to them goes straight to divided heads."""
        rotary = self.base.config.get_text_config().qk_rope_head_dim

        def mark(x: torch.Tensor) -> torch.Tensor:
            latent, keys = x.split([x.shape[-1] - rotary, rotary], dim=-1)
            return torch.cat([latent, self.borders.enter(keys)], dim=-1)

        change_output(module, mark)

    def _divide_experts(self, module: nn.Module, name: str) -> None:
        """Deal out whole experts: each rank runs its own on all tokens, and the results are summed.

        Choices of other ranks' experts get the index past the last, which transformers' experts skip.
        """
        for parameter in module._parameters:
            self._cut(module, parameter, 0, name)
        count = next(iter(module._parameters.values())).shape[0] // self.size
        first = self.rank * count
        module.num_experts, module._is_expert_parallel = count, True

        def deal(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, chosen, weights = args
            own = (chosen >= first) & (chosen < first + count)
            weights = torch.where(own, self.borders.enter(weights), 0)
            return self.borders.enter(hidden), torch.where(own, chosen - first, count), weights

        def collect(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            """A rank that no token chose takes part in the sums of the backward pass like the others."""
            hidden, _, weights = args
            here = [hidden, weights, *(getattr(module, name) for name in module._parameters)]
            return self.borders.sum(output + sum(x[:0].sum() for x in here))

        module.register_forward_pre_hook(deal)
        module.register_forward_hook(collect)

    # --- vocabulary ---------------------------------------------------------------------------------------------------

    def _divide_vocabulary(self) -> None:
        """Cut embedding and head by tokens of the vocabulary."""
        for module in self._copies(self.base.get_input_embeddings()):
            if isinstance(module, nn.Embedding):
                self._cut(module, "weight", 0, "the embedding", even=False)
                _Lookup(module, self.borders, self.rank, self.size).attach()
        for module in self._copies(self.base.get_output_embeddings()):
            if isinstance(module, nn.Linear):
                for parameter in module._parameters:
                    self._cut(module, parameter, 0, "the head", even=False)
                rows = module.weight.shape[0]  # not out_features: a copy that peft ties to the embedding has another
                change_input(module, self.borders.enter)
                change_output(module, lambda x, rows=rows: self.borders.gather_features(x, rows))

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _cut(self, owner: nn.Module, name: str, dimension: int, where: str, *, even: bool = True) -> None:
        parameter = owner._parameters[name]
        if parameter is None:
            return
        if even and parameter.shape[dimension] % self.size:
            raise _indivisible(where, f"{parameter.shape[dimension]} features", self.size)
        self.placements[id(parameter)] = Shard(dimension)

    def _view(self, owner: nn.Module, name: str, view: View) -> None:
        if owner._parameters[name] is not None:
            self.views.setdefault(owner, {})[name] = view

    def _distribute(self) -> None:
        """Make every parameter a DTensor, one that several modules share only once."""
        made: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            views = {}
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    placement = self.placements.get(id(parameter), Replicate())
                    divided = distribute_tensor(parameter.detach(), self.mesh, (placement,), src_data_rank=None)
                    made[id(parameter)] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
                views[name] = self.views.get(module, {}).get(name, self.borders.local_weight)
            if views:
                see_locally(module, views)

    # --- adapters -----------------------------------------------------------------------------------------------------

    def _linear(self, module: nn.Module, name: str) -> tuple[nn.Linear, list[nn.Module], list[nn.Module]]:
        """(the linear layer, LoRA's A, LoRA's B) of a module that may carry adapters."""
        linear, downs, ups = module, [], []
        if self.adapted:
            from peft.tuners.lora import LoraLayer

            if isinstance(module, LoraLayer):
                linear, downs, ups = module.get_base_layer(), [*module.lora_A.values()], [*module.lora_B.values()]
        if not isinstance(linear, nn.Linear):
            raise UserError(
                f"{name} is a {type(linear).__name__}, which tensor parallelism cannot cut",
                where="--tensor-parallel-size",
                fix="use --tensor-parallel-size 1",
            )
        return linear, downs, ups

    def _copies(self, module: nn.Module | None) -> list[nn.Module]:
        """The module, or the frozen and the trained copy of it that `modules_to_save` keeps."""
        if self.adapted:
            from peft.utils import ModulesToSaveWrapper

            if isinstance(module, ModulesToSaveWrapper):
                return [module.original_module, *module.modules_to_save.values()]
        return [] if module is None else [module]


class _Lookup:
    """Finds the embeddings of this rank's tokens; the others' are zero, and the sum over the ranks is the lookup."""

    def __init__(self, embedding: nn.Embedding, borders: Borders, rank: int, size: int) -> None:
        self.embedding, self.borders = embedding, borders
        rows = -(-embedding.weight.shape[0] // size)  # by the rule of torch.chunk, as Shard divides
        self.first, self.end = rank * rows, min((rank + 1) * rows, embedding.weight.shape[0])
        self.foreign: torch.Tensor | None = None

    def attach(self) -> None:
        padding = self.embedding.padding_idx  # its row gets no gradient
        if padding is not None:
            self.embedding.padding_idx = padding - self.first if self.first <= padding < self.end else None
        change_input(self.embedding, self._own_rows)
        change_output(self.embedding, self._sum)

    def _own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        self.foreign = (ids < self.first) | (ids >= self.end)
        return torch.where(self.foreign, 0, ids - self.first)

    def _sum(self, vectors: torch.Tensor) -> torch.Tensor:
        vectors = vectors.masked_fill(self.foreign[..., None], 0)
        self.foreign = None
        return self.borders.sum(vectors)


def _indivisible(name: str, what: str, size: int) -> UserError:
    return UserError(
        f"{name} has {what}, which cannot be divided among {size} tensor-parallel ranks",
        where=f"--tensor-parallel-size {size}",
        fix="choose a divisor of it",
    )


def _refuse_adapters(model: nn.Module) -> None:
    """Adapters whose weights are no pair of linear layers cannot be cut. Raises UserError."""
    kinds = {"lora_magnitude_vector": "DoRA", "lora_embedding_A": "LoRA on the embedding"}
    for name, module in model.named_modules():
        kind = next(
            (kind for mark, kind in kinds.items() if name.endswith(mark) and len(list(module.parameters()))), None
        )
        if type(module).__name__ == "ParamWrapper":
            kind = "LoRA on fused experts"
        if kind is not None:
            raise UserError(
                f"{kind} does not work with tensor parallelism",
                where="--tensor-parallel-size",
                fix="use --tensor-parallel-size 1, or plain LoRA on linear layers named by --target-modules",
            )
