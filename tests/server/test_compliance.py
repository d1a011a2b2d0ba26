"""Requests of a public compliance test for each API."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llm_comply.schema
import pytest
from fastapi import FastAPI
from llm_comply.config import ComplianceConfig
from llm_comply.http import close_client
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.test_case import TestCase as Case
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

from scheduler.interface import EngineRequest
from tests.server.fake_engine import FakeEngine, Script
from tests.server.helpers import serving
from tests.server.images.conftest import LISTS, write_image_folder
from tests.server.test_reasoning import ECHOING
from tests.server.test_tools import written
from tests.server.tiny_model import END, write_folder

SPECS = Path(llm_comply.schema.__file__).parent / "specs"
TEMPLATE = ECHOING.replace("message.role == 'assistant' and loop.first", "false")
"""Template of a model whose conversations may begin with an assistant message."""
pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")  # used by the tester


@dataclass(frozen=True)
class Api:
    """Properties of an API that the tests use."""

    cases: Sequence[Case]
    spec: str
    model: str
    """By their names it knows models that think: in a chat it asks these for a field that OpenAI has not."""
    config: dict[str, Any] = field(default_factory=dict)


APIS = {
    "chat": Api(OPENAI_CHAT_TESTS, "openai_chat.json", "tiny"),
    "responses": Api(OPEN_RESPONSES_TESTS, "openresponses.json", "gpt-5-tiny"),
    "messages": Api(
        ANTHROPIC_TESTS, "anthropic.json", "claude-opus-tiny", {"auth_header": "x-api-key", "use_bearer_prefix": False}
    ),
}  # fmt: skip
CASES = [pytest.param(api, case, id=f"{name}: {case.id}") for name, api in APIS.items() for case in api.cases]


def model(*, thinks: bool) -> Script:
    """It calls where it has to."""

    def script(request: EngineRequest, choice: int) -> list[int]:
        calls = request.sampling.grammar is not None
        said = written("get_weather", location="San Francisco") if calls else "Hello there."
        return [*("<think>\nIs it?\n</think>\n\n" if thinks else "").encode(), *said.encode(), END]

    return script


NAMELESS = ("chat-error-handling", "compact-missing-model", "error-handling")
"""Cases that send no model and want that refused, as OpenAI does. Here only a strict server refuses it."""


@pytest.fixture
def test_with(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[Api, Case], Any]]:
    engine.info_ = replace(engine.info_, max_model_len=2048, num_blocks=256)
    names = tuple({api.model for api in APIS.values()})
    case_id = request.getfixturevalue("case").id
    is_strict = case_id in NAMELESS
    folder = tmp_path / "m"
    if "image" in case_id:
        write_image_folder(folder, "llava", LISTS)
        engine.info_ = replace(engine.info_, takes_images=True, max_image_rows=1 << 20)
    else:
        write_folder(folder, template=TEMPLATE)
    with serving(make_app(folder, served_model_name=names, strict=is_strict)) as address:

        def test(api: Api, case: Case) -> Any:
            config = ComplianceConfig(f"{address}/v1", "none", api.model, **api.config)
            return Runner(config, [case], llm_comply.schema.SpecLoader(str(SPECS / api.spec))).run_one(case)

        yield test
    close_client()


@pytest.mark.parametrize(("api", "case"), CASES)
def test_the_tester_is_content(test_with: Callable[[Api, Case], Any], engine: FakeEngine, api: Api, case: Case) -> None:
    engine.script = model(thinks=any(word in case.id for word in ("reasoning", "thinking")))
    result = test_with(api, case)
    if result.status is not Status.SKIPPED or case.id != "chat-reasoning-summary":
        assert (result.status, result.errors, result.warnings) == (Status.PASSED, [], [])
