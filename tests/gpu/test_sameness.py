"""Speed never changes the answer on a GPU either: the tests of tests/engine, whose cases here are runners on CUDA."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Harness
from tests.engine.test_sameness import (  # noqa: F401  (collected here, with the fixture below)
    Case,
    make_requests,
    test_among_31_others,
    test_choices_share_the_prompt_and_equal_each_alone,
    test_each_choice_has_a_state_of_the_sampler,
    test_in_a_crowd_in_small_chunks_and_whole,
    test_resumed_after_a_restart,
    test_the_comparison_can_fail,
    test_the_state_of_the_sampler_matters_and_must_be_given,
    test_under_forced_preemption,
    test_with_a_warm_prefix_cache,
)
from tests.gpu.conftest import Load

CUDA = pytest.mark.cuda_only
CASES = [
    pytest.param(("llama", "bfloat16", {}), id="llama"),
    pytest.param(("llama", "float32", {}), id="llama-float32", marks=CUDA),
    pytest.param(("qwen3_moe", "bfloat16", {}), id="qwen3_moe"),
    pytest.param(("gemma3", "bfloat16", {}), id="gemma3"),
    pytest.param(("wide", "bfloat16", {}), id="wide"),
    pytest.param(("wide", "float32", {}), id="wide-float32", marks=CUDA),
    pytest.param(("wide", "bfloat16", {"quantization": "fp8"}), id="wide-fp8", marks=CUDA),
    pytest.param(("wide", "bfloat16", {"quantization": "int4"}), id="wide-int4"),
    pytest.param(("wide", "bfloat16", {"kv_cache_dtype": "fp8"}), id="wide-fp8-kv", marks=CUDA),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, load: Load) -> Iterator[Case]:
    family, dtype, settings = request.param
    harness = load(family, dtype, **settings)
    yield Case(harness, make_requests(harness, 12, 24, 300))
    harness.forget()


@pytest.fixture(scope="module")
def harness(case: Case) -> Harness:
    return case.harness
