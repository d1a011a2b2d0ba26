"""One cluster and one ordinary server for all tests here."""

import logging
from collections.abc import Iterator

import pytest

from tests.ray.cluster import Cluster, cluster
from tests.served.conftest import Server

for library in ("httpx", "httpx2"):
    logging.getLogger(library).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def ray() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def one() -> Iterator[Server]:
    """A single server that several replicas are compared with."""
    server = Server("--threads", "1")
    yield server
    server.terminate()
