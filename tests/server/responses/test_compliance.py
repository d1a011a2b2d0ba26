"""What the public tester of Open Responses asks of a server: all but images, which are refused."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import _BUNDLED_SPEC, SpecLoader
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS

from scheduler.interface import EngineRequest
from tests.server.fake_engine import FakeEngine, Script
from tests.server.helpers import serving
from tests.server.test_reasoning import ECHOING
from tests.server.test_tools import written
from tests.server.tiny_model import END, write_folder

NAME = "gpt-5-tiny"
"""By their names it knows models that think."""
TEMPLATE = ECHOING.replace("message.role == 'assistant' and loop.first", "false")
"""Of a model that may have begun the conversation."""
THOUGHT = "<think>\nIs it?\n</think>\n\n"
CASES = [case for case in OPEN_RESPONSES_TESTS if case.id != "image-input"]

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")  # used by the tester


def model(*, thinks: bool) -> Script:
    """It calls where it has to."""

    def script(request: EngineRequest, choice: int) -> list[int]:
        if request.sampling.grammar is not None:
            return [*written("get_weather", location="San Francisco").encode(), END]
        return [*(THOUGHT if thinks else "").encode(), *b"Hello there.", END]

    return script


@pytest.fixture
def tester(make_app: Callable[..., FastAPI], tmp_path: Path) -> Iterator[Runner]:
    folder = write_folder(tmp_path / "m", template=TEMPLATE)
    with serving(make_app(folder, served_model_name=NAME)) as address:
        config = ComplianceConfig(base_url=f"{address}/v1", api_key="none", model=NAME)
        yield Runner(config, CASES, SpecLoader(str(_BUNDLED_SPEC)))


def test_the_tester_is_content(tester: Runner, engine: FakeEngine) -> None:
    for case in CASES:
        engine.script = model(thinks=case.id == "reasoning-summary")  # in streams, it knows other events than OpenAI's
        result = tester.run_one(case)
        assert (case.id, result.status.value, result.errors, result.warnings) == (case.id, "passed", [], [])
