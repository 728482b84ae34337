"""Which chat templates write calls of tools that `--tools` can read.

python scripts/check_call_forms.py FILE.jinja ... [--verbose]

Published templates come with TRL (`trl/chat_templates/` in its wheel; those that end in `_training` are its own) and
with llama.cpp (`vendor/llama.cpp/models/templates/` in the source of llama-cpp-python).
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from swiftlite.data.calls.reader import CallReader
from swiftlite.errors import UserError
from swiftlite.models.toys import toy_tokenizer

DATE = "2025-01-01"
NO_FORM = "in no form"
# Tokens of published tokenizers are not at hand: they are what templates write in such signs.
SPECIAL = re.compile(
    r"<\|[^|<>\n{]+\|>|<｜[^｜<>\n{]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|</?s>|<sep>|<SPECIAL_\d+>|<turn\|>"
    r"|<\|tool_response>|<seed:eos>|\[e~\[|<end_of_sentence>"
)
ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>", "<|end|>", "<|eot|>", "</s>", "[e~[",
    "<|tool_response>", "<turn|>", "<|observation|>", "<|user|>", "<seed:eos>", "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|message_sep|>", "<|calls|>", "<|end_of_msg|>", "<end_of_sentence>",
    "<sep>",
}  # fmt: skip


def tool(name: str, **types: str) -> dict:
    parameters = {key: {"type": kind, "description": "x"} for key, kind in types.items()}
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}


TOOLS = [
    tool("weather", city="string", days="integer"),
    tool("add", a="number", b="integer", exact="boolean"),
    tool("now"),
]


def check(path: Path) -> str:
    """`read`, or why it is not."""
    tokenizer = toy_tokenizer()
    template = path.read_text(encoding="utf-8")
    special = sorted({*SPECIAL.findall(template)})
    tokenizer.add_special_tokens({"additional_special_tokens": special, "bos_token": "<s>"})
    tokenizer.chat_template = template
    stops = [id_ for id_, token in tokenizer.added_tokens_decoder.items() if str(token) in ENDS]
    try:
        CallReader(tokenizer, DATE, TOOLS, stops)
    except UserError as error:
        return error.what
    return "read"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", nargs="+", type=Path)
    parser.add_argument("--verbose", action="store_true", help="tell of each")
    options = parser.parse_args()
    found = {path: check(path) for path in options.templates}
    for path, what in found.items():
        if options.verbose or (what != "read" and NO_FORM not in what):
            print(f"{path.name}: {what[:200]}")
    counts = Counter("read" if what == "read" else NO_FORM if NO_FORM in what else "refused" for what in found.values())
    print(f"{counts['read']} read, {counts['refused']} refused, {counts[NO_FORM]} without calls or of no known form")


if __name__ == "__main__":
    main()
