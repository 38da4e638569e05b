"""A fixture for the tests that run on both kinds of store."""

from collections.abc import Iterator

import pytest

import store.sync
from tests.support.etcd import serve_etcd


@pytest.fixture(scope="module", params=["embedded", "etcd"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with store.sync.serve() if request.param == "embedded" else serve_etcd() as served:
        yield served.url
