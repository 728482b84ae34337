"""The engines of `swiftlite serve`: how each spells what is asked for, and what of an adapter it cannot do.

By the source of vLLM 0.32, SGLang 0.5.23, LMDeploy 0.18 and transformers 5.17 and 5.24; docs/reliability.md says which
of them have been run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swiftlite.config.names import ADAPTER_CONFIG, GENERATION_CONFIG
from swiftlite.errors import UserError
from swiftlite.models.load import read_settings
from swiftlite.serving.source import MODEL_CONFIG, ModelSource

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank

# Settings of an adapter that make it more than products of two small matrices beside a layer.
MORE_THAN_LORA = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "rows of the embedding",
    "target_parameters": "layers of experts",
    "bias": "biases",
    "lora_bias": "biases",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "invocation tokens",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QALoRA",
}
NOTHING = (None, False, "none", [], {})
ONE_SCALE = {  # of engines that scale each product by lora_alpha / r
    "use_rslora": "rsLoRA",
    "rank_pattern": "ranks of single layers",
    "alpha_pattern": "scales of single layers",
}


@dataclass(frozen=True)
class Engine:
    """name: of package and program; title: as its makers write it; start: words before the model; flags: its own for
    ours, `@` where the model's name takes the value; install: what to do where it is missing; needs: packages that its
    server needs and its package does not bring; takes_adapters: whether it can serve any; cannot: settings of adapters
    that it does not read, in words; no_lora: model types it takes no adapter on; base_name: of the base beside an
    adapter, where clients ask for `BASE:ADAPTER`.
    """

    name: str
    title: str
    start: tuple[str, ...]
    flags: Mapping[str, str]
    install: str
    needs: tuple[str, ...] = ()
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    takes_adapters: bool = True
    cannot: Mapping[str, str] = field(default_factory=dict)
    no_lora: tuple[str, ...] = ()
    base_name: str | None = None


OF_ITS_OWN = "pip install {}, best in an environment of its own whose bin folder is on PATH: it wants its own PyTorch"

ENGINES = (
    Engine(
        name="vllm",
        title="vLLM",
        start=("serve",),
        flags={
            "--host": "--host",
            "--port": "--port",
            "--served-name": "--served-model-name",
            "--tensor-parallel-size": "--tensor-parallel-size",
            "--max-length": "--max-model-len",
            "--precision": "--dtype",
            "--revision": "--revision",
            "tokenizer": "--tokenizer",
            "generation": "--generation-config",
        },
        install=OF_ITS_OWN.format("vllm"),
        no_lora=("gpt2",),
    ),
    Engine(
        name="sglang",
        title="SGLang",
        start=("serve", "--model-path"),
        flags={
            "--host": "--host",
            "--port": "--port",
            "--served-name": "--served-model-name",
            "--tensor-parallel-size": "--tp-size",
            "--max-length": "--context-length",
            "--precision": "--dtype",
            "--revision": "--revision",
            "tokenizer": "--tokenizer-path",
        },
        install=OF_ITS_OWN.format("sglang"),
        cannot=ONE_SCALE,
        base_name="base",  # a request for the adapter's name alone is answered by the base
    ),
    Engine(
        name="lmdeploy",
        title="LMDeploy",
        start=("serve", "api_server"),
        flags={
            "--host": "--server-name",
            "--port": "--server-port",
            "--served-name": "--model-name",
            "--tensor-parallel-size": "--tp",
            "--max-length": "--session-len",
            "--precision": "--dtype",
            "--revision": "--revision",
        },
        install=OF_ITS_OWN.format("lmdeploy"),
        precisions=("bf16", "fp16"),
        cannot={**ONE_SCALE, "layers_to_transform": "some layers only"},
    ),
    Engine(
        name="transformers",
        title="transformers' own server",
        start=("serve",),
        flags={"--host": "--host", "--port": "--port", "--precision": "--dtype", "--revision": "@"},
        install="pip install 'swiftlite[serve]'",
        needs=("fastapi", "uvicorn", "openai", "accelerate", "requests"),
        takes_adapters=False,  # it looks for the model's config in the adapter's folder
    ),
)


def check_adapter(engine: Engine, source: ModelSource, *, revision: str | None, trust_remote_code: bool) -> None:
    """Raises UserError where the engine would not start with the adapter, or would answer otherwise than it does."""
    settings = read_settings(source.adapter / ADAPTER_CONFIG)
    if isinstance(settings.get("init_lora_weights"), str):
        from swiftlite.models.adapters import check_start

        check_start(SimpleNamespace(**settings), source.adapter)
    if why := _refused(engine, source, settings):
        raise _merge_first(engine, source, why)
    if "generation" not in engine.flags and ends_otherwise(source):
        raise _merge_first(engine, source, "ends answers as the base model does, and the adapter was trained otherwise")
    if "tokenizer" not in engine.flags and source.tokenizer != source.base:
        _check_same_tokenizer(engine, source, revision, trust_remote_code)


def ends_otherwise(source: ModelSource) -> bool:
    """Whether an adapter ends answers with tokens that its base does not end them with: it has a file for them then.
    The base may have been given the same ends since."""
    if source.adapter is None or not (source.adapter / GENERATION_CONFIG).is_file():
        return False
    ends = _ends(source.adapter / GENERATION_CONFIG)
    return not ends or not ends <= _ends(Path(source.base) / GENERATION_CONFIG)


def _ends(file: Path) -> set[Any]:
    found = read_settings(file).get("eos_token_id") if file.is_file() else None
    return {id_ for id_ in (found if isinstance(found, list) else [found]) if isinstance(id_, int)}


def _refused(engine: Engine, source: ModelSource, settings: dict[str, Any]) -> str:
    """Why the engine cannot take the adapter; empty where it can."""
    if not engine.takes_adapters:
        return "takes no adapters"
    if settings.get("peft_type") != "LORA":
        return f"takes LoRA adapters alone, and this one is of the kind {settings.get('peft_type')}"
    for key, words in asks_more(settings, {**MORE_THAN_LORA, **engine.cannot}):
        return f"takes no adapter with {words} ({key})"
    if engine.name == "lmdeploy" and any("." in name for name in _targets(settings)):
        return "takes no adapter whose target_modules are paths: it would put it on all layers of the last name"
    config = Path(source.base) / MODEL_CONFIG
    if engine.no_lora and config.is_file() and read_settings(config).get("model_type") in engine.no_lora:
        return f"takes no adapter on models of the type {read_settings(config)['model_type']}"
    if engine.name == "vllm" and highest_rank(settings, source.adapter) > VLLM_RANKS[-1]:
        return f"takes no adapter of a rank above {VLLM_RANKS[-1]}"
    return ""


def asks_more(settings: Mapping[str, Any], than: Mapping[str, str] = MORE_THAN_LORA) -> list[tuple[str, str]]:
    """The settings of an adapter that an engine does not read, with what they are in words. than: all of them."""
    return [(key, words) for key, words in than.items() if settings.get(key) not in NOTHING]


def vllm_rank(rank: int) -> int:
    """What vLLM is told that adapters have at most, of one that it takes."""
    return next(size for size in VLLM_RANKS if size >= rank)


def _targets(settings: dict[str, Any]) -> list[str]:
    targets = settings.get("target_modules") or []
    return [targets] if isinstance(targets, str) else list(map(str, targets))


def highest_rank(settings: dict[str, Any], adapter: Path) -> int:
    """Of an adapter's layers. settings: those in its folder. Raises UserError where they do not say it."""
    pattern = settings.get("rank_pattern") or {}
    ranks = [settings.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise UserError(
            "the adapter's rank is no number", where=str(adapter / ADAPTER_CONFIG), fix="copy the file again"
        )
    return max(ranks)


def _merge_first(engine: Engine, source: ModelSource, why: str) -> UserError:
    merge = shlex.join(["swiftlite", "export", "--model", source.base, "--adapter", str(source.adapter)])
    return UserError(
        f"{engine.title} {why}",
        where=str(source.adapter),
        fix=f"merge it: {merge} --output-dir FOLDER, then swiftlite serve --model FOLDER",
    )


def _check_same_tokenizer(engine: Engine, source: ModelSource, revision: str | None, trust_remote_code: bool) -> None:
    """Raises UserError where the adapter was trained with other tokens or another template than its base has."""
    from swiftlite.models.tokenizer import load_tokenizer

    base, own = (
        load_tokenizer(source.base, tokenizer=each, revision=revision, trust_remote_code=trust_remote_code)
        for each in (source.base, source.tokenizer)
    )
    for words, differs in (
        ("another vocabulary", base.get_vocab() != own.get_vocab()),
        ("another chat template", base.chat_template != own.chat_template),
        ("another end of text", base.eos_token != own.eos_token),
    ):
        if differs:
            why = f"takes the base model's tokenizer alone, and the adapter was trained with {words}"
            raise _merge_first(engine, source, why)


def named_adapter(engine: Engine, name: str, adapter: Path) -> list[str]:
    """The words that put the adapter beside the base under a name."""
    pair = f"{name}={adapter}"
    if engine.name == "sglang":
        return ["--lora-paths", pair]
    if engine.name == "lmdeploy":  # whose other backend, the usual one, passes adapters over in silence
        return ["--backend", "pytorch", "--adapters", pair]
    rank = highest_rank(read_settings(adapter / ADAPTER_CONFIG), adapter)
    if "," in pair:  # vLLM takes it for JSON
        pair = json.dumps({"name": name, "path": str(adapter)}, ensure_ascii=False)
    return ["--enable-lora", "--lora-modules", pair, "--max-lora-rank", str(vllm_rank(rank))]
