"""Answers of a loaded model: prompt -> tokens -> answer, one at a time as a stream, or many in batches."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.config.names import most_positions
from swiftlite.data.tokens.chat_template import written
from swiftlite.data.tokens.questions import opened, plain_ids
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.errors import UserError
from swiftlite.models.sampling import padded, without_router_loss
from swiftlite.serving.prompts import check_utf8

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swiftlite.data.tokens.questions import Message

SHORTER = "shorten it, or end the conversation and start a new one"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 always takes the likeliest; top_p and top_k narrow the choice."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Answer:
    """text: without special tokens, but with blanks at both ends; ids: with the token that ended it; complete: it ended
    by itself."""

    text: str
    ids: list[int]
    complete: bool


class Answerer:
    """A model and its tokenizer, ready to answer conversations."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._stops = stop_tokens(model.generation_config, tokenizer)
        model.generation_config = type(model.generation_config)()  # what is not set for a call would come from there
        self._positions = most_positions(model.config.get_text_config().to_dict())

    @property
    def has_template(self) -> bool:
        """Without a chat template a prompt is plain text that the model goes on with."""
        return self._tokenizer.chat_template is not None

    def encode(
        self,
        messages: Sequence[Message],
        where: str,
        tools: list[dict[str, Any]] | None = None,
        *,
        plain: bool = False,
    ) -> list[int]:
        """Token ids of the conversation with the opening of an answer, or of one message as plain text that the model
        goes on with. Raises UserError."""
        if self.has_template and not plain:
            render = partial(written, self._tokenizer, tools=tools)
            try:
                text = opened(messages, render)
            except Exception as error:  # a template is foreign code and may raise anything
                raise UserError(
                    f"the chat template refuses the conversation: {error}",
                    where=where,
                    fix="change the roles or their order, or give another --chat-template",
                ) from error
            check_utf8(text, where)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them all
        elif len(messages) > 1:
            raise UserError(
                "the model has no chat template, so it cannot take several messages",
                where=where,
                fix="give --chat-template chatml or a .jinja file, or ask with one message and no --system",
            )
        else:
            ids = plain_ids(messages[0]["content"], self._tokenizer)
        if not ids:
            raise UserError("the prompt is empty", where=where, fix="give at least one word")
        if self._positions and len(ids) >= self._positions:
            raise UserError(
                f"the conversation has {len(ids)} tokens, the model takes {self._positions}", where=where, fix=SHORTER
            )
        return ids

    def limit(self, prompt: list[int]) -> str:
        """In words, what ends an answer that does not end by itself."""
        if self._room(prompt) == self._sampling.max_new_tokens:
            return "--max-new-tokens"
        return f"the {self._positions} tokens that the model takes"

    def stream(self, prompt: list[int]) -> Generator[str, None, Answer]:
        """The answer piece by piece; returns the whole. Closing the iterator stops the model at its next token.

        The model works in a thread; what it raises is raised here.
        """
        from transformers import StoppingCriteria, TextIteratorStreamer

        stop, failure, made = threading.Event(), [], []

        class Stopped(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
                return torch.full((input_ids.shape[0],), stop.is_set(), dtype=torch.bool, device=input_ids.device)

        stops = self._stops

        class Pieces(TextIteratorStreamer):
            def put(self, value: torch.Tensor) -> None:
                """Not what ends the answer, which need not be a special token."""
                if self.next_tokens_are_prompt or value.item() not in stops:
                    super().put(value)

        pieces = Pieces(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

        def work() -> None:
            try:
                made.append(self._generate([prompt], streamer=pieces, stopping_criteria=[Stopped()]))
            except BaseException as error:  # noqa: BLE001 - carried over to the reading thread
                failure.append(error)
                pieces.end()

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            yield from (piece for piece in pieces if piece)
        finally:
            stop.set()
            worker.join()
        if failure:
            raise failure[0]
        return self._read(made[0][0].tolist())

    def answer(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """The answers to a batch, padded on the left and masked by length (pad may be an end token)."""
        generated = self._generate(prompts)
        return [self._read(row) for row in generated.tolist()]

    def batches(self, prompts: Sequence[list[int]], size: int) -> Iterator[list[int]]:
        """Indices of prompts that go together: of like length, with the same room for an answer."""
        order = sorted(range(len(prompts)), key=lambda i: (self._room(prompts[i]), -len(prompts[i])))
        batch: list[int] = []
        for index in order:
            if batch and (len(batch) == size or self._room(prompts[index]) != self._room(prompts[batch[0]])):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def has_room(self, prompt: list[int]) -> bool:
        """Whether the model has a position left behind it."""
        return self._room(prompt) > 0

    def _room(self, prompt: list[int]) -> int:
        """Tokens that an answer may have: the model's last position is never passed."""
        limit = self._sampling.max_new_tokens
        return min(limit, self._positions - len(prompt)) if self._positions else limit

    def _generate(self, prompts: Sequence[list[int]], **extra: object) -> torch.Tensor:
        """New tokens [batch, new]; a row that ended early is filled up behind its end token."""
        pad = self._stops[0] if self._stops else 0
        ids, mask = padded(prompts, pad, self._model.device)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sampling settings in the model's generation_config that are not used
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=self._settings(pad, min(self._room(prompt) for prompt in prompts)),
                **without_router_loss(self._model),
                **extra,
            )
        return out[:, ids.shape[1] :]

    def _settings(self, pad: int, new_tokens: int) -> GenerationConfig:
        from transformers import GenerationConfig

        sampling = self._sampling
        chosen = {"do_sample": False}
        if sampling.temperature > 0:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        return GenerationConfig(max_new_tokens=new_tokens, eos_token_id=self._stops or None, pad_token_id=pad, **chosen)

    def _read(self, tokens: list[int]) -> Answer:
        end = next((i for i, token in enumerate(tokens) if token in self._stops), None)
        text = self._tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return Answer(text, tokens if end is None else tokens[: end + 1], end is not None)
