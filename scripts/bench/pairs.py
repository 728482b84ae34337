"""The workload of `scripts/bench_preference.py`: the tiny model and pairs of answers in invented words, from one seed.

Each answer ends in one token that is nowhere else, so that the probe counts answers by one rule for all tools, whether
a tool reads a pair's prompt once or twice.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.workload import END, LEXICON, SHAPE, START, Words, piece_budget, train_tokenizer, write_model

ROWS = 400
PROMPT, ANSWER = (200, 600), (50, 200)  # tokens, evenly spread
MARK = "~"
SETTINGS = {"format": 1, "rows": ROWS, "prompt": PROMPT, "answer": ANSWER, "lexicon": LEXICON, **SHAPE}


class PairWorkload:
    """Where its files lie.

    model: Hugging Face folder; pairs: folder with `train.jsonl` (`prompt`, `chosen`, `rejected`); llamafactory: folder
    with its `dataset_info.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.pairs, self.llamafactory = folder / "model", folder / "pairs", folder / "llamafactory"
        self.rows = self.pairs / "train.jsonl"

    def facts(self) -> dict:
        return json.loads((self.folder / "facts.json").read_text())


def make_pairs(folder: Path, seed: int) -> PairWorkload:
    """The workload of `seed` under `folder`, made now unless it is there and made by these settings."""
    workload = PairWorkload(folder)
    facts, settings = folder / "facts.json", json.loads(json.dumps({**SETTINGS, "seed": seed}))
    if facts.is_file() and json.loads(facts.read_text())["settings"] == settings:
        return workload
    shutil.rmtree(folder, ignore_errors=True)
    for part in (workload.model, workload.pairs, workload.llamafactory):
        part.mkdir(parents=True)
    words = Words(seed)
    tokenizer = train_tokenizer(words)
    write_model(workload.model, tokenizer, seed)
    rows = list(_rows(words, tokenizer, seed))
    _write_rows(workload, rows)
    frame = len(tokenizer.encode(f"{START}user\n{END}\n{START}assistant\n").ids)
    lengths = [frame + row["tokens"] + 2 for row in rows]  # each answer has its end
    described = {
        "what": "pairs, prompt and both answers together", "rows": len(rows), "tokens": sum(lengths),
        "shortest": min(lengths), "median": statistics.median(lengths), "mean": round(statistics.mean(lengths), 1),
        "longest": max(lengths),
    }  # fmt: skip
    mark = tokenizer.token_to_id(MARK)
    facts.write_text(json.dumps({"settings": settings, "described": described, "mark": mark}))
    return workload


def _rows(words: Words, tokenizer, seed: int) -> Iterator[dict]:
    """`question`, `better`, `worse` and how many `tokens` the three have."""
    chance = random.Random(seed + 2)
    text = piece_budget(words, tokenizer)
    for _ in range(ROWS):
        question, asked = text("?", chance.randint(*PROMPT))
        better, first = text(".", chance.randint(*ANSWER) - 1)
        worse, second = text(".", chance.randint(*ANSWER) - 1)
        yield {
            "question": question, "better": better + MARK, "worse": worse + MARK, "tokens": asked + first + second + 2,
        }  # fmt: skip


def _write_rows(workload: PairWorkload, rows: list[dict]) -> None:
    """The same pairs in the form that each tool reads."""

    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    with workload.rows.open("w") as file:
        for row in rows:
            pair = {
                "prompt": [said("user", row["question"])], "chosen": [said("assistant", row["better"])],
                "rejected": [said("assistant", row["worse"])],
            }  # fmt: skip
            file.write(json.dumps(pair) + "\n")
    ranked = [
        {
            "messages": [said("user", row["question"])], "chosen": said("assistant", row["better"]),
            "rejected": said("assistant", row["worse"]),
        }
        for row in rows
    ]  # fmt: skip
    (workload.llamafactory / "pairs.json").write_text(json.dumps(ranked))
    columns = {"messages": "messages", "chosen": "chosen", "rejected": "rejected"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    information = {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": columns}
    (workload.llamafactory / "dataset_info.json").write_text(json.dumps({"bench": {**information, "tags": tags}}))
