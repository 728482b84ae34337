"""A server that speaks as much of vLLM as a run asks of it, and answers by transformers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from swiftlite.models.sampling import answering, sample
from swiftlite.seeds import key_digest

ALONE = threading.Lock()  # of all of them: transformers sets switches of the whole process while it loads a model


def seed_of(key):
    """That a run sends for the answers to a prompt."""
    return int.from_bytes(key_digest("answers", *key, size=7), "little")


def numbers(seed, index, count):
    """Between 0 and 1, one for each token of an answer."""
    return np.random.Generator(np.random.Philox(key=[seed, index])).random(count)


class StandIn:
    """adapters, reloads: what it takes while it runs; longest: tokens that it reads; scaled: whether it tells
    probabilities at the temperature; shift: added to each log-probability that it tells; fails_after: answers, behind
    which it fails. asked: paths and bodies of all requests; known: its adapters."""

    def __init__(self, base, *, adapters=True, reloads=True, longest=4096, scaled=True):
        self.base, self.adapters, self.reloads, self.longest, self.scaled = base, adapters, reloads, longest, scaled
        self.shift, self.fails_after, self.asked, self.known = 0.0, None, [], set()
        self._model = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @property
    def taken(self):
        """Names of the folders whose weights it took over, in order."""
        paths = [body.get("lora_path") or body["kwargs"]["weights_path"] for path, body in self.asked if body and
                 path in ("/v1/load_lora_adapter", "/collective_rpc")]  # fmt: skip
        return [path.rpartition("/")[2] for path in paths]

    @property
    def answered(self):
        """Bodies of the requests for answers."""
        return [body for path, body in self.asked if path == "/v1/completions" and body["max_tokens"] > 1]

    def _handler(self):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.say(*stand_in.does(self.path, {}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with ALONE:
                    stand_in.asked.append((self.path, body))
                    self.say(*stand_in.does(self.path, body))

            def say(self, status, body):
                text = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        return Handler

    def does(self, path, body):
        """(status, answer)."""
        if path == "/v1/models":
            cards = [{"id": "base", "parent": None, "max_model_len": self.longest}]
            return 200, {"data": [*({"id": name, "parent": "base"} for name in sorted(self.known)), *cards]}
        if path == "/v1/load_lora_adapter" and self.adapters:
            if "lora_name" not in body or body["lora_name"] in self.known:
                return 400, {"error": "no such adapter, or known already"}
            self._take(body["lora_path"], adapter=True)
            self.known.add(body["lora_name"])
        elif path == "/v1/unload_lora_adapter" and self.adapters:
            if body["lora_name"] not in self.known:
                return 404, {"error": "no such adapter"}
            self.known.remove(body["lora_name"])
        elif path == "/collective_rpc" and self.reloads:
            if body.get("method") != "reload_weights":
                return 400, {"error": "no method"}
            self._take(body["kwargs"]["weights_path"], adapter=False)
        elif path == "/v1/completions":
            if body["max_tokens"] > 1 and self.fails_after is not None and len(self.answered) > self.fails_after:
                return 500, {"error": "out of order"}
            if body["model"] not in {"base", *self.known}:
                return 404, {"error": "no such model"}
            if body.get("n", 1) > 1 and not body["temperature"]:
                return 400, {"error": "n must be 1 when using greedy sampling"}
            return 200, {"choices": [*self._answers(body)][::-1]}
        elif path != "/reset_prefix_cache":
            return 404, {"error": "no such path"}
        return 200, {}

    def _take(self, folder, *, adapter):
        plain = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(self.base if adapter else folder, **plain)
        self._model = PeftModel.from_pretrained(model, folder) if adapter else model

    def _answers(self, body):
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        prompt, count, heat = body["prompt"], body.get("n", 1), body["temperature"]
        drawn = np.stack([numbers(body.get("seed", 0), index, body["max_tokens"]) for index in range(count)])
        with answering(self._model, switch=False):
            answers = sample(
                self._model, [prompt] * count, torch.from_numpy(drawn), body.get("stop_token_ids", []), heat
            )
            for index, ids in enumerate(answers):
                logits = self._model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
                told = (logits.double() / (heat if self.scaled and heat else 1.0)).log_softmax(-1)
                own = told.gather(-1, torch.tensor(ids)[:, None])[:, 0] + self.shift
                logprobs = {
                    "token_logprobs": own.tolist(),
                    "top_logprobs": [{"?": best} for best in told.amax(-1).tolist()],
                }
                yield {"index": index, "logprobs": logprobs} | (
                    {"token_ids": ids} if "return_token_ids" in body else {}
                )
