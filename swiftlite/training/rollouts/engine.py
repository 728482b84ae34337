"""Answers by vLLM servers beside a run, which take its weights over before they answer.

Weights go through files in a folder that servers see as well: of an adapter the adapter, of a model all of it. A server
says how likely it found each token, which its own kernels and types make another number than the model's: by both the
loss knows what a token has to count (`swiftlite.objectives.policy`).

Sources: https://docs.vllm.ai/en/latest/serving/openai_compatible_server/ for requests, .../features/lora/ for adapters
at runtime; whole weights by `reload_weights` through `/collective_rpc`, which the development mode has.
"""

from __future__ import annotations

import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swiftlite.config.methods import SAMPLING, answers
from swiftlite.config.names import ADAPTER_CONFIG
from swiftlite.config.rollouts import address
from swiftlite.errors import RunError, SwiftliteError, UserError, first_line
from swiftlite.models.load import read_settings
from swiftlite.seeds import key_digest
from swiftlite.serving.engines import VLLM_RANKS, highest_rank, vllm_rank
from swiftlite.training.rollouts.generator import Generation, Request

if TYPE_CHECKING:
    import requests

    from swiftlite.config.schema import RunConfig

T = TypeVar("T")

MODELS, COMPLETE = "/v1/models", "/v1/completions"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RELOAD, FORGET = "/collective_rpc", "/reset_prefix_cache"
API_KEY = "VLLM_API_KEY"
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 3300.0  # of two attempts, sooner than other processes give this one up
AGAIN, BUSY = 5, (500, 502, 503, 504)  # how often a request is sent again, and after which answers
NO_KEY = (401, 403)
BETWEEN_SECONDS = 1.0  # two attempts to let it forget
LONGEST_ERROR = 300
SEEN = "let it see the folder of the weights under the same name (--engine-folder)"
MOST_AT_ONCE = 256  # requests of a process; a server has a queue of its own
ALIKE = 1e-4  # log-probabilities that are one


class Server:
    """One of them. Raises RunError where it does not do what it is asked for."""

    def __init__(self, url: str) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry

        self.url = address(url)
        again = Retry(
            AGAIN,
            read=min(1, AGAIN),
            backoff_factor=1.0,
            status_forcelist=BUSY,
            allowed_methods=None,
            raise_on_status=False,
        )
        self._session, self._once = requests.Session(), requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=MOST_AT_ONCE, max_retries=again))
        if key := os.environ.get(API_KEY):  # of a server that asks for it, which goes by the same name
            for session in (self._session, self._once):
                session.headers["Authorization"] = f"Bearer {key}"
        self._model = ""

    def model(self) -> tuple[str, int | None]:
        """(the name of the model that it serves, adapters aside, how many tokens it reads where it says that). Raises
        UserError where nobody answers."""
        try:
            response = self._once.get(self.url + MODELS, timeout=CONNECT_SECONDS)
            if response.status_code in NO_KEY:
                raise UserError("the engine asks for a key, or for another one", fix=f"give it in {API_KEY}")
            response.raise_for_status()
            if response.history:  # what is posted there would arrive as a question for a page
                raise UserError("the engine has moved", fix=f"write {address(response.url.removesuffix(MODELS))}")
            card = next(card for card in response.json()["data"] if card.get("parent") is None)
            longest = card.get("max_model_len")
            return card["id"], None if longest is None else int(longest)
        except UserError:
            raise
        except Exception as error:  # whatever answers there, it is no engine
            raise UserError(f"no engine answers there: {first_line(error)}", where=self.url) from error

    def has(self, path: str) -> bool:
        """Whether it knows a request, of which an empty one is no valid one."""
        return self._once.post(self.url + path, json={}, timeout=CONNECT_SECONDS).status_code != 404

    def take(self, folder: Path, *, adapter: bool) -> None:
        """Answer by the weights in a folder from now on."""
        if adapter:
            self.post(LOAD_ADAPTER, {"lora_name": folder.name, "lora_path": str(folder)}, fix=SEEN)
            before, self._model = self._model, folder.name
            if before:
                self.post(UNLOAD_ADAPTER, {"lora_name": before}, also=(404,))  # one that was started anew lacks it
            return
        self.post(RELOAD, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, fix=SEEN)
        self._forget()

    def _forget(self) -> None:
        """Drop the keys and values that other weights have made of prompts, which a request in progress holds."""
        for _ in range(1 + AGAIN):
            if b"false" not in self.post(FORGET, {}).content:
                return
            time.sleep(BETWEEN_SECONDS)
        raise RunError(
            "the engine keeps keys and values that former weights have made: it answers somebody else meanwhile",
            where=self.url + FORGET,
            fix="let nobody else ask it during the run, and go on with --resume auto",
        )

    def post(
        self, path: str, body: dict[str, Any], *, fix: str = "look at what it says itself", also: Sequence[int] = ()
    ) -> requests.Response:
        """Its answer to a request, which is sent again where the server is busy or cannot be reached; but for adapters,
        of which it would say that it has them already. also: what it may answer beside that all is well."""
        from requests import RequestException

        session = self._once if path in (LOAD_ADAPTER, UNLOAD_ADAPTER) else self._session
        try:
            response = session.post(self.url + path, json=body, timeout=(CONNECT_SECONDS, ANSWER_SECONDS))
            if response.ok or response.status_code in also:
                return response
            problem = f"{response.status_code} {response.text[:LONGEST_ERROR]}"
        except RequestException as error:
            problem = first_line(error)
        raise RunError(
            f"the engine does not do what it is asked for: {problem}",
            where=self.url + path,
            fix=f"{fix}; when it answers again, go on with --resume auto",
        )


class Engine:
    """The servers of `--engine-url`, between which prompts are shared out."""

    def __init__(self, config: RunConfig, stops: Sequence[int], rank: int) -> None:
        """stops: ids that end an answer; rank: of this process, by which it begins with another server."""
        self._servers = [Server(url) for url in config.engine_url]
        self._bases = [server.model()[0] for server in self._servers]
        self._adapter, self._rank = "", rank
        self._request = {
            "stop_token_ids": list(stops),
            "ignore_eos": True,  # it would end answers by those of its own files
            "logprobs": 0,
            "return_token_ids": True,
            "top_p": 1.0,  # and so on: else they are those of the model's generation_config.json
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def take(self, folder: Path, *, adapter: bool) -> None:
        """Let all servers answer by the weights in a folder; one process asks them."""
        _each([partial(server.take, folder, adapter=adapter) for server in self._servers])

    def named(self, adapter: str) -> None:
        """Every process says which adapter, if there is one, it asks for."""
        self._adapter = adapter

    def generate(self, requests: Sequence[Request], temperature: float) -> Iterator[Generation]:
        """Of each, in order. Those in a row that differ by the last part of their keys are one request."""
        groups = _by_prompt(requests)
        numbers = [(self._rank + place) % len(self._servers) for place in range(len(groups))]
        parts = [
            partial(self._answers, number, group, temperature) for number, group in zip(numbers, groups, strict=True)
        ]
        for of_group in _each(parts):
            yield from of_group

    def _answers(self, number: int, group: list[Request], temperature: float) -> list[Generation]:
        server, first = self._servers[number], group[0]
        body = self._request | {
            "model": self._adapter or self._bases[number],
            "prompt": first.ids,
            "n": len(group),
            "max_tokens": first.most,
            "temperature": temperature,
            "seed": int.from_bytes(key_digest("answers", *first.key[:-1], size=7), "little"),
        }
        response = server.post(COMPLETE, body)
        try:
            choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
            found = [Generation(list(one["token_ids"]), list(one["logprobs"]["token_logprobs"])) for one in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                "the engine does not tell the tokens of its answers",
                where=server.url + COMPLETE,
                fix="use vLLM 0.11 or newer",
            ) from error
        self._check(found, group, server.url + COMPLETE)
        return found

    def _check(self, found: list[Generation], requests: list[Request], where: str) -> None:
        """Raises RunError where answers are not what was asked for."""
        count, longest, stops = len(requests), requests[0].most, self._request["stop_token_ids"]
        numbers = [number for one in found for number in one.logprobs]
        short = [len(one.ids) for one in found if len(one.ids) < longest and (not one.ids or one.ids[-1] not in stops)]
        if len(found) != count:
            why, fix = f"gives {len(found)} answers where {count} were asked for", "look at what it says itself"
        elif any(len(one.ids) != len(one.logprobs) for one in found) or not all(map(_is_number, numbers)):
            why, fix = "does not tell how likely it found each token", "look at what it says itself"
        elif short:
            why = f"ends an answer after {short[0]} tokens, though it is not at its end and may have {longest}"
            fix = "let it know no limit of its own (--generation-config, --override-generation-config)"
        else:
            return
        raise RunError(f"the engine {why}", where=where, fix=f"{fix}, and go on with --resume auto")


def _by_prompt(requests: Sequence[Request]) -> list[list[Request]]:
    """What one request asks for: answers to one prompt. Where a data set has a prompt twice, each begins anew: greedy
    answers are given one at a time."""
    groups: list[list[Request]] = []
    for one in requests:
        before = groups[-1][-1].key if groups else ()
        if before[:-1] != one.key[:-1] or before[-1] >= one.key[-1]:
            groups.append([])
        groups[-1].append(one)
    return groups


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def in_background(work: Callable[[], T]) -> Future[T]:
    """What it will give. A process may end meanwhile, which it does not with threads of an executor."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asks for the result
            found.set_exception(error)

    threading.Thread(target=run, name="engine", daemon=True).start()
    return found


def _each(work: Sequence[Callable[[], T]]) -> list[T]:
    """What each gives, done side by side."""
    room = threading.Semaphore(MOST_AT_ONCE)

    def in_room(one: Callable[[], T]) -> T:
        with room:
            return one()

    return [found.result() for found in [in_background(partial(in_room, one)) for one in work]]


def check_engines(config: RunConfig) -> None:
    """Before the model loads. Raises UserError where a server does not serve what the run needs of it."""
    urls = config.engine_url if answers(config) else ()
    if urls and config.tuner == "lora" and _rank(config) > VLLM_RANKS[-1]:
        raise UserError(
            f"vLLM takes no adapter of a rank above {VLLM_RANKS[-1]}",
            where=f"--engine-url {urls[0]}",
            fix="lower --lora-rank, leave --engine-url out, so that the model answers itself, or use --tuner full",
        )
    for url in urls:
        where, fix = f"--engine-url {url}", f"start it by `{start_words(config)}`"
        try:
            why = _misfit(config, Server(url))
        except SwiftliteError as error:
            own = error.fix if isinstance(error, UserError) else None
            raise UserError(error.what, where=where, fix=own or fix) from error
        except Exception as error:  # whatever answers there, it is no engine
            raise UserError(f"no engine answers there: {first_line(error)}", where=where, fix=fix) from error
        if why:
            raise UserError(f"the engine {why}", where=where, fix=fix)


def _misfit(config: RunConfig, server: Server) -> str:
    """What a server lacks that the run needs of it; empty where it fits."""
    name, longest = server.model()
    if longest is not None and longest < config.max_length:
        return f"reads {longest:,} tokens, fewer than --max-length {config.max_length}"
    if not server.has(LOAD_ADAPTER if config.tuner == "lora" else RELOAD):
        return f"takes no {'adapters' if config.tuner == 'lora' else 'weights'} while it runs"
    if config.method in SAMPLING and config.temperature != 1 and not _scales_logprobs(server, name):
        return f"tells probabilities as they are without --temperature {config.temperature:g}"
    return ""


def _rank(config: RunConfig) -> int:
    """Of the adapter that is trained."""
    if config.adapter is None:
        return config.lora_rank
    folder = Path(config.adapter).expanduser()
    return highest_rank(read_settings(folder / ADAPTER_CONFIG), folder)


def _scales_logprobs(server: Server, name: str) -> bool:
    """Whether it tells probabilities of the distribution that it draws from: those of the likeliest token differ. name:
    of its model."""
    body = {
        "model": name,
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "logprobs": 1,
        "top_k": -1,
        "top_p": 1.0,
    }
    found = [server.post(COMPLETE, body | {"temperature": heat}).json() for heat in (1.0, 0.25)]
    one, other = (max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()) for answer in found)
    return abs(one - other) > ALIKE


def start_words(config: RunConfig) -> str:
    """The command line of a server that fits."""
    words = ["vllm", "serve", config.model, "--max-model-len", str(config.max_length)]
    if config.method in SAMPLING and config.temperature != 1:
        words += ["--logprobs-mode", "processed_logprobs"]
    if config.tuner != "lora":
        return "VLLM_SERVER_DEV_MODE=1 " + shlex.join(words)
    words += ["--enable-lora", "--max-lora-rank", str(vllm_rank(_rank(config)))]
    return "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 " + shlex.join(words)
