"""What identifies the tokenizer and its chat template without loading them, so that a cached data set needs neither."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig

# Everything that transformers may read when it builds a tokenizer. config.json names the class where nothing else does.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "config.json",
)  # fmt: skip


def tokenizer_key(config: RunConfig, load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> str:
    """A hash that changes with anything that could change tokens.

    Of a local folder the files are hashed; a tokenizer of the hub is loaded, since only then are its files known.
    The date counts only where a template asks for it, so that other data sets do not age overnight.
    """
    folder = Path(config.tokenizer or config.model).expanduser()
    parts = _folder_parts(folder) if folder.is_dir() else _loaded_parts(load_tokenizer())
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        parts.append(path.read_bytes() if path.is_file() else config.chat_template.encode())
    if any(b"strftime_now" in part for part in parts):
        parts.append(config.template_date.encode())
    parts += [token.encode() for token in config.new_tokens]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _folder_parts(folder: Path) -> list[bytes]:
    paths = [folder / name for name in FILES] + sorted(folder.glob("additional_chat_templates/*.jinja"))
    return [part for path in paths if path.is_file() for part in (path.name.encode(), path.read_bytes())]


def _loaded_parts(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    described = repr((tokenizer.chat_template, tokenizer.special_tokens_map))
    return [state.encode(), described.encode()]
