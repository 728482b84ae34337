"""Rows of data sets on the Hugging Face hub, through the `datasets` library (imported only when one is named)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swiftlite.data.rows.sources import HUB_SPLIT, DatasetSpec, missing_file
from swiftlite.errors import UserError, first_line
from swiftlite.hub import stay_offline_without_network
from swiftlite.imports import import_package

if TYPE_CHECKING:
    from datasets import Dataset


@functools.lru_cache(maxsize=8)
def _load(name: str, subset: str | None, split: str) -> Dataset:
    import datasets

    return datasets.load_dataset(name, subset, split=split)


def load_hub(spec: DatasetSpec) -> Dataset:
    """The split of a hub data set (by default HUB_SPLIT). Raises UserError where it cannot be had."""
    stay_offline_without_network()
    import_package("datasets", "a data set of the hub")  # its own failure says nothing of the data set
    try:
        return _load(spec.name, spec.subset, spec.split or HUB_SPLIT)
    except Exception as error:  # the library raises a dozen unrelated types for absent, private, offline, bad split
        near = missing_file(spec).fix
        raise UserError(
            f"neither a file here nor a data set that the hub gives: {first_line(error)}",
            where=spec.given,
            fix=f"check the name, the split, the network and `hf auth login`; for a local file: {near}",
        ) from error


def read_hub(spec: DatasetSpec) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, row) of a hub data set. Images, sounds and films stay the bytes that they are stored as:
    nothing is learnt of them, and to decode them takes packages and time."""
    data = load_hub(spec)
    features = data.features
    _leave_encoded(features)
    data.info.features = type(features)(features)
    yield from enumerate(data, start=1)


def _leave_encoded(feature: Any) -> None:
    """feature: of a data set, a mapping of such, or a list with the one of its items."""
    if isinstance(feature, dict | list):
        for part in feature.values() if isinstance(feature, dict) else feature:
            _leave_encoded(part)
    elif hasattr(feature, "feature"):
        _leave_encoded(feature.feature)
    elif hasattr(feature, "decode"):
        feature.decode = False


def fingerprint_and_rows(spec: DatasetSpec) -> tuple[bytes, int]:
    """(a hash that changes with the content, number of rows)."""
    data = load_hub(spec)
    checksums = sorted((data.info.download_checksums or {}).items())
    return repr(
        (spec.name, spec.subset, spec.split, checksums, data.info.version, data.num_rows)
    ).encode(), data.num_rows
