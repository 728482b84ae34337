"""`--placeholders`: words in double braces in the rows, such as {{name}}, and the texts that are written for them.

Published rows that teach a model who it is have them: ms-swift's in large letters, LLaMA-Factory's in small ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PUBLISHED = re.compile(r"\{\{\s*(name|author)\s*\}\}", re.IGNORECASE)


def holds_published(text: str) -> bool:
    """Whether a text that is to be learnt holds a placeholder of such rows."""
    return "{{" in text and PUBLISHED.search(text) is not None


class Placeholders:
    """What is written for {{KEY}}, in any case and with blanks inside the braces or none."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = list(texts.values())
        keys = "|".join(f"({re.escape(key)})" for key in texts)  # a group each: letters have more cases than two
        self._pattern = re.compile(rf"\{{\{{\s*(?:{keys})\s*\}}\}}", re.IGNORECASE)

    def fill(self, value: Any) -> Any:
        """A row, or any part of one, with its texts filled in. What a key of the row is called stays."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._texts[found.lastindex - 1], value) if "{{" in value else value
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        return {key: self.fill(item) for key, item in value.items()} if isinstance(value, dict) else value
