"""Data sets of the hub, without a network: a stand-in for the download, and the error where there is none."""

import pyarrow as pa
import pytest

from swiftlite.config.names import dataset_name
from swiftlite.config.resolve import resolve_config
from swiftlite.data.prepare import prepare_data
from swiftlite.data.rows import hub
from swiftlite.data.rows.content import content_hash
from swiftlite.data.rows.readers import read_rows
from swiftlite.data.rows.sources import parse_spec, resolve
from swiftlite.errors import UserError
from swiftlite.models.tokenizer import tokenizer_loader


@pytest.fixture
def downloaded(monkeypatch):
    """Replaces the download; returns what it was asked for."""
    import datasets

    asked = []

    def load(name, subset, split):
        asked.append((name, subset, split))
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "train": None}]
        return datasets.Dataset.from_list([{"messages": messages}, {"messages": messages[::-1]}])

    monkeypatch.setattr(hub, "_load", load)
    return asked


def test_rows_of_a_split(downloaded):
    (file,) = resolve(parse_spec("owner/name:sub@test#1")).files
    rows = list(read_rows(file))
    assert downloaded == [("owner/name", "sub", "test")]
    assert [line for line, _ in rows] == [1, 2]
    assert rows[0][1]["messages"][1] == {"role": "assistant", "content": "Hello"}  # nulls of the schema are gone
    assert file.where(2) == "owner/name:sub@test:2"  # not another subset's
    (file,) = resolve(parse_spec("owner/name")).files
    assert file.where(2) == "owner/name:2"


def test_images_and_sounds_beside_the_text_are_not_decoded(monkeypatch):
    """What is no sound image would end the run, as would a package that is missing."""
    from datasets import Audio, Dataset, DatasetInfo, Features, Image, List, Value

    media = {"bytes": b"no picture", "path": "a"}
    row = {"text": "a", "sound": media, "image": media, "images": [media], "deep": {"list": [{"one": media}]}}
    kinds = {"sound": Audio(), "image": Image(), "images": List(Image()), "deep": {"list": List({"one": Image()})}}
    features = Features({"text": Value("string"), **kinds})
    table = pa.Table.from_pylist([row] * 2, schema=features.arrow_schema)
    monkeypatch.setattr(hub, "_load", lambda *_: Dataset(table, info=DatasetInfo(features=features)))
    assert list(hub.read_hub(parse_spec("owner/name"))) == [(1, row), (2, row)]


def test_a_part_of_a_split_is_the_librarys_to_cut(downloaded):
    spec = parse_spec("owner/name:sub@train[10%:20%]#5*2")
    list(read_rows(resolve(spec).files[0]))
    assert downloaded == [("owner/name", "sub", "train[10%:20%]")] and (spec.count, spec.weight) == (5, 2.0)
    assert dataset_name("owner/name@train[:100]#7") == "owner/name@train[:100]#7"


def test_the_split_is_part_of_the_hash(downloaded):
    def digest(text):
        return content_hash(resolve(parse_spec(text)).files)

    assert digest("owner/name") == digest("owner/name")
    assert digest("owner/name") != digest("owner/name@test")
    assert digest("owner/name")[1] == 2


def test_a_data_set_that_cannot_be_had_is_named():
    with pytest.raises(UserError, match="neither a file here nor a data set") as failure:
        list(read_rows(resolve(parse_spec("nobody/no-such-data")).files[0]))
    assert "nobody/no-such-data" in failure.value.where
    assert "\n" not in failure.value.what


def test_subsets_and_splits_share_no_rows_of_which_some_are_held_out(downloaded, tmp_path, tiny_model):
    def held_out(*dataset):
        given = {"model": str(tiny_model()), "cache_dir": str(tmp_path), "max_length": 64, "on_bad_row": "skip"}
        config = resolve_config("sft", dataset=list(dataset), eval_fraction=0.5, **given)
        return prepare_data(config, tokenizer_loader(config)).audit["eval"]["rows"]["read"]

    assert held_out("owner/name:en", "owner/name:de") == held_out("owner/name", "owner/name@test") == 2
    for again in ("owner/name@train[:50%]", "owner/name#1", "owner/name@test+train"):
        with pytest.raises(UserError, match="two data sets share a file"):
            held_out("owner/name", again)
