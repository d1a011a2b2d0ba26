"""Verification of draft trees brings the tokens of plain decoding: the tests of tests/engine with runners on CUDA."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Answer
from tests.engine.test_sameness import make_requests
from tests.engine.test_speculation import (  # noqa: F401  (collected here, with the fixture below)
    Drafted,
    test_drafts_of_every_shape_change_nothing,
    test_in_small_chunks,
    test_the_cache_that_drafts_leave_behind_is_that_of_the_tokens,
    test_under_preemption,
)
from tests.gpu.conftest import Load


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_moe", "wide"])
def drafted(request: pytest.FixtureRequest, load: Load) -> Iterator[Drafted]:
    harness = load(request.param)
    requests = make_requests(harness, 12, 24, 200)
    alone: dict[tuple[str, int], Answer] = {}
    for one in requests:
        alone |= harness.run(harness.engine(prefix_caching=False), [one])
    yield Drafted(harness, requests, alone)
    harness.forget()
