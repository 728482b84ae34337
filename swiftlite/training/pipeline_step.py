"""One global step through the stages of a pipeline.

PyTorch's schedules (https://docs.pytorch.org/docs/stable/distributed.pipelining.html) move hidden states forwards and
their gradients backwards. They want all micro-batches of a step in one shape, so each is padded to one number of tokens
by documents of its own that nothing is learnt from. Token ids, borders and labels do not travel: every rank of a
pipeline has the step's micro-batches, and each stage takes them in order, as all schedules run them.

The shapes that stages exchange are told to PyTorch, not inferred from a first micro-batch. Inference would run that
micro-batch twice in each new shape, throw away gradients that FSDP has gathered, and exchange pickled descriptions; and
a new shape in an old schedule would be received into old buffers without an error, so a schedule is built for each.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining

from swiftlite.data.batches import MicroBatch, empty_micro_batch
from swiftlite.errors import SwiftliteError
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.parallel.context import slice_for_context
from swiftlite.parallel.data import reshard
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.pipeline import Pipeline, Routing, Stage
from swiftlite.planning.communication import row_in_pipeline
from swiftlite.training.losses import StepLoss, answer_sums, reported
from swiftlite.training.precision import Precision
from swiftlite.training.step import StepOutcome, seed_dropout, whole_outcome

# On an error, which is told by us, it prints the whole schedule.
logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Work:
    """What the stages go through, in order. around: entered for the forward pass of micro-batch i of a stage;
    objective: in training, the loss of micro-batch i from what the last stage scored of it, a scalar."""

    batches: Sequence[MicroBatch]
    around: Callable[[int, int], AbstractContextManager[None]]
    objective: Callable[[int, tuple[torch.Tensor, ...]], torch.Tensor] | None = None


class StageScorer(TokenScorer):
    """A stage as a schedule sees it: hidden states in, hidden states out; the loss out of the last.

    The first takes nothing, since it makes its hidden states from the micro-batch's tokens. With a mixture model the
    routers' counts travel along, since its loss is not a sum over layers.
    """

    def __init__(self, stage: Stage, hidden_dtype: torch.dtype, *, summed: bool = False) -> None:
        """hidden_dtype: of hidden states between layers, the type of the embedding's output; summed: as in the base."""
        super().__init__(stage.model, stage.base, summed=summed)
        self.stage = stage
        self._dtype = hidden_dtype
        self._routing = Routing(stage.base) if self._routed else None
        self._work: Work | None = None
        self._next = 0

    @property
    def is_routed(self) -> bool:
        """Whether a router loss is part of the loss."""
        return self._routed

    def begin(self, work: Work) -> None:
        """Take on the micro-batches that the following calls are about."""
        self._work, self._next = work, 0

    def border(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Examples of what crosses a border between stages, without memory: of `tokens` tokens."""
        width = self.base.config.get_text_config().hidden_size
        hidden = torch.empty(1, tokens, width, dtype=self._dtype, device="meta", requires_grad=True)
        return (hidden,) if self._routing is None else (hidden, self._routing.start(torch.device("meta")))

    def leaving(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Examples of what a stage makes of `tokens` tokens in training. Schedules of torch 2.11 want the last one's in
        one shape too, which a loss has and log-probabilities of trained tokens have not."""
        if self.stage.is_last:
            return (torch.empty((), device="meta", requires_grad=True),)
        return self.border(tokens)

    def __call__(self, *received: torch.Tensor | None) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """`forward` with the first stage's nothing as one argument: FSDP moves arguments to its GPU, and fails where
        there are none."""
        return super().__call__(*(received or (None,)))

    def forward(self, *received: torch.Tensor | None) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """received: `[1, T, hidden]`, and `[2, experts]` of a mixture model; None on the first stage.

        Returns the same, or from the last stage the loss; outside of training fp32 `[trained tokens]` and the router
        loss of a mixture model.
        """
        index, self._next = self._next, self._next + 1
        batch = self._work.batches[index]
        with self._work.around(self.stage.index, index):
            outputs = self._decode(batch, None if self.stage.is_first else received[0])
            hidden = outputs.last_hidden_state
            routed: tuple[torch.Tensor, ...] = ()
            if self._routing is not None:
                so_far = self._routing.start(hidden.device) if self.stage.is_first else received[1]
                routed = (self._routing.add(so_far, outputs.router_logits, batch),)
            if not self.stage.is_last:
                return tuple(_handed_on(x) for x in (hidden.to(self._dtype), *routed))
            router_loss = tuple(self._routing.loss(counts, batch) for counts in routed)
            scores = (self._score(hidden, batch), *router_loss)
        return scores if self._work.objective is None else self._work.objective(index, scores)

    @property
    def _has_head(self) -> bool:
        return self.stage.is_last

    def _probe_hidden(self, device: torch.device) -> torch.Tensor | None:
        """Hidden states that could have come from the stage before."""
        if self.stage.is_first:
            return None
        width = self.base.config.get_text_config().hidden_size
        return torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0)).to(device, self._dtype)


def _handed_on(x: torch.Tensor) -> torch.Tensor:
    """A tensor as it leaves a stage.

    The next stage sends a gradient in any case, also to a stage that is frozen and has no use for it. Schedules detach
    what they have sent in place, which a view (such as GPT-2's) does not allow.
    """
    if torch.is_grad_enabled() and not x.requires_grad:
        return x.detach().requires_grad_(True)
    return x if x._base is None else x.clone()


class PipelineStep:
    """Runs the micro-batches of a step through the stages: the other `training.step.StepRunner`."""

    def __init__(
        self, pipeline: Pipeline, scorers: Sequence[StageScorer], precision: Precision, mesh: Mesh, seed: int
    ) -> None:
        """scorers: of the stages of `pipeline`, in the same order, divided and filled."""
        self._pipeline, self._scorers, self._precision, self._mesh = pipeline, list(scorers), precision, mesh
        self._seed = seed
        self._shape = (0, 0)
        self._schedule: object | None = None

    def train(
        self, step: int, batches: Sequence[MicroBatch], step_loss: StepLoss, scale: float, count: int, update: int = 0
    ) -> StepOutcome:
        """As `StepRunner.train`; `batches` are whole rows, which are divided over context ranks here.

        Every rank of the pipeline gets the same ones. Reads the device once, at the end.
        """
        layout, plan = self._mesh.layout, self._pipeline.plan
        number = plan.schedule.micro_batches(len(batches), plan.ranks)
        ready = self._in_one_shape(batches, number)
        values, routers = [], []

        def objective(index: int, scores: tuple[torch.Tensor, ...]) -> torch.Tensor:
            batch = ready[index]
            loss, sums = step_loss(scores[0], batch)
            values.append(reported(loss, sums, batch))
            for router_loss in scores[1:]:  # a mean per micro-batch, not per token
                routers.append(router_loss.detach() / count)
                loss = loss + router_loss / count
            return loss * scale

        @contextlib.contextmanager
        def around(stage: int, index: int) -> Iterator[None]:
            place = (index * layout.data_ranks + self._mesh.data_rank) * plan.stages + stage
            seed_dropout(self._seed, step, update, place)
            with self._precision.compute(self._mesh.device):
                yield

        self._run(Work(ready, around, objective))
        self._pipeline.sum_tied_gradients()
        lengths = sum(batch.input_ids.shape[1] for batch in ready)
        return self._outcome(values[: len(batches)], routers, len(batches), lengths, step_loss)

    def _run(self, work: Work) -> None:
        number = len(work.batches)
        schedule = self._schedule_for(number, work.batches[0].input_ids.shape[1])
        for scorer in self._scorers:
            scorer.begin(work)
        try:
            # Only the number of targets matters: the last stage has made its loss.
            schedule.step(target=torch.empty(number), return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, SwiftliteError):  # PyTorch wraps what a stage raises
                raise error.__cause__ from None
            raise

    def _schedule_for(self, number: int, tokens: int):  # noqa: ANN202 - PyTorch's base class is private
        if self._shape == (number, tokens):
            return self._schedule
        plan, device = self._pipeline.plan, self._mesh.device
        stages = [
            pipelining.PipelineStage(
                scorer,
                scorer.stage.index,
                plan.stages,
                device,
                input_args=() if scorer.stage.is_first else scorer.border(tokens),
                output_args=scorer.leaving(tokens),
                group=self._pipeline.group,
            )
            for scorer in self._scorers
        ]
        engine = getattr(pipelining, plan.schedule.engine)
        single = issubclass(engine, pipelining.schedules.PipelineScheduleSingle)
        self._schedule = engine(
            stages[0] if single else stages,
            n_microbatches=number,
            loss_fn=lambda loss, _target: loss,
            scale_grads=False,
        )
        self._shape = number, tokens
        return self._schedule

    def _in_one_shape(self, batches: Sequence[MicroBatch], number: int) -> list[MicroBatch]:
        """`number` micro-batches of equally many tokens, on the device; those that were missing are all padding."""
        tokens = row_in_pipeline(max(batch.input_ids.shape[1] for batch in batches))
        longest = max(batch.max_document for batch in batches)
        full = [*batches, *[empty_micro_batch()] * (number - len(batches))]
        return [self._place(batch.padded_to(tokens, longest)) for batch in full]

    def _place(self, batch: MicroBatch) -> MicroBatch:
        """On the device, and this context rank's part of it."""
        if (group := self._mesh.group("cp")) is not None:
            rows, slice_tokens = batch.tokens, -(-batch.input_ids.shape[1] // self._mesh.layout.cp)
            batch = slice_for_context(batch, group, slice_tokens=slice_tokens)
            batch = replace(batch, context=replace(batch.context, tokens=rows))  # padding is no part of the row
        return batch.to(self._mesh.device)

    def _outcome(
        self,
        values: list[torch.Tensor],
        routers: list[torch.Tensor],
        count: int,
        padded_tokens: int,
        step_loss: StepLoss,
    ) -> StepOutcome:
        """Of what the last stage knows, on all ranks. values: `[1 + names]` of each of `count` micro-batches;
        padded_tokens: of this pipeline."""
        table = torch.zeros(count + 1, 1 + len(step_loss.names), device=self._mesh.device)
        if values:
            table[:count] = torch.stack(values)
            table[count, 0] = torch.stack(routers).sum() if routers else 0.0
        self._mesh.sum_over(table, "pp")
        router = table[count, 0] if self._scorers[0].is_routed else None
        return whole_outcome(table[:count], router, padded_tokens, step_loss, self._mesh)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], step_loss: StepLoss) -> tuple[float, dict[str, float]]:
        """As `StepRunner.evaluate`."""
        total = torch.zeros(1 + len(step_loss.names), device=self._mesh.device)
        for batch, logprobs in self._logprobs([self._place(batch) for batch in batches]):
            if logprobs is not None:
                total += reported(*step_loss(logprobs, batch), batch)
        loss, *sums = self._mesh.sum_over_data(self._mesh.sum_over(total, "pp")).tolist()
        return loss, dict(zip(step_loss.names, sums, strict=True))

    @torch.no_grad()
    def score(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """As `StepRunner.score`; every stage learns of it."""
        found = []
        for batch, logprobs in self._logprobs([self._place(batch) for batch in batches]):
            none = torch.zeros(len(batch.completions), dtype=torch.float64, device=self._mesh.device)
            found.append(none if logprobs is None else answer_sums(logprobs, batch))
        sizes = [len(sums) for sums in found]
        return list(self._mesh.sum_over(torch.cat(found), "pp").split(sizes)) if found else []

    @torch.no_grad()
    def told(self, batches: Sequence[MicroBatch], count: int | None = None) -> list[torch.Tensor]:
        """As `StepRunner.told`; every stage learns of it. Rows are as long as in training, where slices of them are
        the same."""
        found = []
        for batch, told in self._logprobs(self._in_one_shape(batches, len(batches))):
            shape = (len(batch.learnt),) if count is None else (2, len(batch.learnt), count)
            found.append(torch.zeros(shape, device=self._mesh.device) if told is None else told)
        places = 0 if count is None else 1  # the dimension of the tokens
        sizes = [part.shape[places] for part in found]
        return list(self._mesh.sum_over(torch.cat(found, dim=places), "pp").split(sizes, dim=places))

    def _logprobs(self, ready: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor | None]]:
        """Each micro-batch with its log-probabilities on the last stage, None on the others. ready: as `_place` makes
        them.

        Forward passes through the stages in order, the same under every schedule.
        """
        work = Work(ready, lambda *_: self._precision.compute(self._mesh.device))
        for scorer in self._scorers:
            scorer.begin(work)
        sending: list[dist.Work] = []
        for batch in ready:
            values: tuple[torch.Tensor, ...] = ()
            logprobs = None
            for scorer in self._scorers:
                values = scorer(*self._receive(scorer, values, batch))
                if scorer.stage.is_last:
                    logprobs = values[0]
                else:
                    sending = self._send(scorer, values, sending)
            yield batch, logprobs
        for handle in sending:
            handle.wait()
        for scorer in self._scorers:
            reshard(scorer)

    def _receive(
        self, scorer: StageScorer, before: tuple[torch.Tensor, ...], batch: MicroBatch
    ) -> tuple[torch.Tensor, ...]:
        """What enters a stage. before: the output of the stage that this rank ran last."""
        if scorer.stage.is_first:
            return ()
        peer = self._rank_of(scorer.stage.index - 1)
        if peer == dist.get_rank():
            return before
        shapes = scorer.border(batch.input_ids.shape[1])
        received = tuple(torch.empty_like(shape, device=self._mesh.device) for shape in shapes)
        for values in received:
            dist.recv(values, peer, group=self._pipeline.group)
        return received

    def _send(self, scorer: StageScorer, values: tuple[torch.Tensor, ...], sending: list[dist.Work]) -> list[dist.Work]:
        peer = self._rank_of(scorer.stage.index + 1)
        if peer == dist.get_rank():
            return sending
        for handle in sending:
            handle.wait()
        return [dist.isend(value.contiguous(), peer, group=self._pipeline.group) for value in values]

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self._pipeline.group, self._pipeline.plan.rank_of(stage))
