"""A short soak; `python -m bench.soak` is the long one."""

import pytest

from bench.soak import SoakPlan, soak
from tests.served.conftest import Server

pytestmark = pytest.mark.embedded


async def test_a_mixed_crowd_of_which_some_leave(server: Server) -> None:
    report = await soak(SoakPlan(server.address, requests=60, clients=16, checked=6))
    assert report.problems == []
    assert report.completed + report.left == 60
    assert report.left > 0
    assert report.checked == 6
