"""`swiftlite serve`: finds model and engine, writes the engine's command line, and becomes it.

An engine is a program beside this Python or on PATH; it is never imported, so it may live in an environment of its own.
What it would do wrongly with an adapter, or leave out in silence, is refused before it starts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from swiftlite.config.names import COMPRESSED_PACKAGE, COMPRESSED_TENSORS, codes_section
from swiftlite.config.types import DTYPE, plain_word
from swiftlite.errors import UserError
from swiftlite.imports import is_installed
from swiftlite.models.load import read_settings
from swiftlite.models.tokenizer import check_tokenizer_folder
from swiftlite.serving.engines import ENGINES, PRECISIONS, Engine, check_adapter, ends_otherwise, named_adapter
from swiftlite.serving.origin import system_of_training
from swiftlite.serving.source import MODEL_CONFIG, ModelSource, check_base_folder, find_source, refuse_reward_model

NAME = re.compile(r"\w[\w.@/:+-]*")  # what stands before `=` and in a request


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `swiftlite serve`, see its --help. words: for the engine, as they are."""

    model: str | None = None
    adapter: str | None = None
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    tensor_parallel_size: int = 1
    max_length: int | None = None
    precision: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    dry_run: bool = False
    words: list[str] = field(default_factory=list)


def run_serve(options: ServeOptions) -> None:
    """Does not return: the engine's signals and exit code are this process's. With dry_run the line is printed instead.

    Raises UserError for whatever can be known before the engine starts.
    """
    source = find_source(options.model, options.adapter)
    refuse_reward_model(source)
    check_base_folder(source, options.revision)
    check_tokenizer_folder(Path(source.tokenizer))
    engine, program = find_engine(options.engine)
    _check_codes(engine, source)
    if source.adapter is not None:
        check_adapter(engine, source, revision=options.revision, trust_remote_code=options.trust_remote_code)
    command = command_line(engine, program, source, options)
    if options.dry_run:
        print(shlex.join(command))
        return
    check_address(options.host, options.port)
    print(_told(engine, source, options), flush=True)
    try:
        os.execv(program, command)
    except OSError as error:  # a script whose Python is gone, say
        what = f"{engine.title} cannot be started: {error.strerror}"
        raise UserError(what, where=program, fix=f"install {engine.name} again") from error


def _check_codes(engine: Engine, source: ModelSource) -> None:
    """Raises UserError where weights are codes that the engine reads by a package that is not there."""
    if engine.name != "transformers" or source.base_folder is None or is_installed(COMPRESSED_PACKAGE):
        return
    section = codes_section(read_settings(source.base_folder / MODEL_CONFIG))
    if section.get("quant_method") == COMPRESSED_TENSORS:
        what = f"{engine.title} reads these weights by the package {COMPRESSED_PACKAGE}, which is not installed"
        raise UserError(what, where=source.base, fix=f"pip install 'swiftlite[{COMPRESSED_TENSORS}]', or take vLLM")


def find_engine(name: str) -> tuple[Engine, str]:
    """The engine of this name, or the first that is installed (`auto`), and its program. Raises UserError."""
    known = {engine.name: engine for engine in ENGINES}
    word = plain_word(name)
    if word != "auto" and word not in known:
        raise UserError(f"unknown engine {name!r}", where="--engine", fix=f"give auto, {', '.join(known)}")
    problems = []
    for engine in ENGINES if word == "auto" else [known[word]]:
        program = _program(engine.name)
        missing = [package for package in engine.needs if not is_installed(package)]
        if program and not missing:
            return engine, program
        problems.append(f"{engine.title} needs {', '.join(missing)}" if program else f"{engine.title} is not installed")
    if word != "auto":
        raise UserError(f"the engine is missing: {problems[0]}", where=f"--engine {word}", fix=known[word].install)
    raise UserError(
        "no engine is installed that can serve: " + "; ".join(problems),
        where="--engine auto",
        fix="pip install vllm on a machine with a GPU, here or in another environment whose bin folder is on PATH; "
        "for trying out, pip install 'swiftlite[serve]' makes transformers' own server work",
    )


def _program(name: str) -> str | None:
    """Beside this Python, also where its environment is not activated, else on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def command_line(engine: Engine, program: str, source: ModelSource, options: ServeOptions) -> list[str]:
    """What is run, word by word. Raises UserError for what the engine has no flag for."""
    model, revision, name = source.base, options.revision, served_name(source, options)
    if engine.flags.get("--revision") == "@":
        if "@" in model:  # transformers 5.17 would load the folder of the name before it
            what = f"{engine.title} may take what stands behind @ for a revision"
            raise UserError(what, where=f"--model {model}", fix="rename the folder, or take another engine")
        model, revision = (f"{model}@{revision}" if revision else model), None
    own_tokenizer = source.tokenizer if source.tokenizer != source.base else None
    base_name = name if source.adapter is None else engine.base_name
    values = {
        "--host": options.host,
        "--port": str(options.port),
        "--served-name": base_name if "--served-name" in engine.flags else options.served_name,
        "--tensor-parallel-size": str(options.tensor_parallel_size) if options.tensor_parallel_size != 1 else None,
        "--max-length": str(options.max_length) if options.max_length is not None else None,
        "--precision": _dtype(engine, options.precision),
        "--revision": revision,
        "tokenizer": own_tokenizer if "tokenizer" in engine.flags else None,
        "generation": str(source.adapter) if ends_otherwise(source) else None,
    }
    words = [*engine.start, model]
    for setting, value in values.items():
        if value is None:
            continue
        if setting not in engine.flags:
            raise UserError(
                f"{engine.title} has no flag for it",
                where=f"{setting} {value}",
                fix=f"leave {setting} out, or take another engine",
            )
        words += [engine.flags[setting], value]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    if source.adapter is not None:
        words += named_adapter(engine, name, source.adapter)
    return [program, *words, *options.words]


def _dtype(engine: Engine, precision: str) -> str | None:
    """torch's name of the number type, which all engines use; None leaves it to the engine."""
    word = plain_word(precision)
    word = DTYPE.get(word, word)
    if word == "auto":
        return None
    if word not in PRECISIONS:
        raise UserError(
            f"unknown precision {precision!r}", where="--precision", fix=f"give auto, {', '.join(PRECISIONS)}"
        )
    if word not in engine.precisions:
        raise UserError(
            f"{engine.title} does not compute in {word}",
            where=f"--precision {precision}",
            fix=f"give auto, {', '.join(engine.precisions)}",
        )
    return PRECISIONS[word]


def served_name(source: ModelSource, options: ServeOptions) -> str:
    """What `--served-name` says, else the hub id, else the name of the run or folder. Raises UserError."""
    if options.served_name is not None:
        if not NAME.fullmatch(options.served_name):
            where, fix = f"--served-name {options.served_name}", "use letters, digits and . _ - / :"
            raise UserError("a served model cannot have this name", where=where, fix=fix)
        return options.served_name
    folder = source.adapter or source.base_folder
    if folder is None:
        return source.base
    folder = folder.resolve()
    name = folder.parent.name if folder.name == "model" else folder.name
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def check_address(host: str, port: int) -> None:
    """Raises UserError where the engine could not listen there, which it would say only after it has loaded."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
            asked.bind(address)
    except (OSError, UnicodeError) as error:
        what, fix = {
            errno.EADDRINUSE: ("the port is taken", f"give another one: --port {port % 65535 + 1}"),
            errno.EACCES: ("the port is reserved for root", "give one above 1023"),
        }.get(
            getattr(error, "errno", None),
            ("the host is no address of this machine", "127.0.0.1 is for this machine alone, 0.0.0.0 for all"),
        )
        raise UserError(what, where=where, fix=fix) from error


def _told(engine: Engine, source: ModelSource, options: ServeOptions) -> str:
    """What is started, where, and a line to try it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{options.port}/v1"
    if "--served-name" not in engine.flags:
        model = source.base + (f"@{options.revision}" if options.revision else "")
    else:
        name = served_name(source, options)
        model = f"{engine.base_name}:{name}" if source.adapter is not None and engine.base_name else name
    system = system_of_training(source)  # clients send it, the engine does not
    opening = [] if system is None else [{"role": "system", "content": system}]
    path, request = "chat/completions", {"messages": [*opening, {"role": "user", "content": "Who are you?"}]}
    if not _may_chat(source):
        path, request = "completions", {"prompt": "Once upon a time"}
    body = json.dumps({"model": model, **request, "max_tokens": 64}, ensure_ascii=False)
    return (
        f"{engine.title} serves {source.adapter or source.base} as {model} at {address}, as soon as it has loaded it. "
        f"Try it:\n  curl {address}/{path} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def _may_chat(source: ModelSource) -> bool:
    """False for a folder whose tokenizer has no chat template; a hub id is not looked into."""
    folder = Path(source.tokenizer)
    settings = folder / "tokenizer_config.json"
    if not folder.is_dir() or any(folder.glob("chat_template.*")):
        return True
    return settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")
