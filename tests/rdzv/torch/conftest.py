"""Fixtures for the tests of the adapters to PyTorch: a server, and a run for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import store.sync


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with store.sync.serve() as server:
        yield server.url


_numbers = itertools.count()


@pytest.fixture
def run_id() -> str:
    return f"job-{next(_numbers)}"
