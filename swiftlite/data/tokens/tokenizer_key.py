"""What identifies the tokenizer and its chat template without loading them, so that a cached data set needs neither."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig

# Everything that transformers may read when it builds a tokenizer, but for code. config.json names the class where
# nothing else does.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "config.json",
)  # fmt: skip
TEMPLATES, CODE = "additional_chat_templates/*.jinja", "*.py"


def tokenizer_key(config: RunConfig, load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> str:
    """A hash that changes with anything that could change tokens.

    Of a local folder the files are hashed; a tokenizer of the hub is loaded, since only then are its files known.
    The date counts only where a template asks for it, so that other data sets do not age overnight.
    """
    folder = Path(config.tokenizer or config.model).expanduser()
    parts = _parts_of_folder(folder, config) if folder.is_dir() else _loaded_parts(load_tokenizer())
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        parts["--chat-template"] = path.read_bytes() if path.is_file() else config.chat_template.encode()
    if any(b"strftime_now" in part for part in parts.values()):
        parts["--template-date"] = config.template_date.encode()
    parts |= {f"--new-tokens {place}": token.encode() for place, token in enumerate(config.new_tokens)}
    digest = hashlib.sha256()
    for part in (part for name, content in parts.items() for part in (name.encode(), content)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts_of_folder(folder: Path, config: RunConfig) -> dict[str, bytes]:
    """By the names of the files. Code is read where it is trusted, and makes another tokenizer of the same files."""
    patterns = (TEMPLATES, CODE) if config.trust_remote_code else (TEMPLATES,)
    paths = [folder / name for name in FILES] + [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    parts = {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}
    return parts | ({"--trust-remote-code": b""} if config.trust_remote_code else {})


def _loaded_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    described = repr((tokenizer.chat_template, tokenizer.special_tokens_map))
    return {"state": state.encode(), "described": described.encode()}
