"""A public tester's requests and checks of Anthropic's API. Images are not supported."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm_comply.schema
import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.http import close_client
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.tests.anthropic import ANTHROPIC_TESTS

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import serving
from tests.server.messages.test_answers import written
from tests.server.test_reasoning import OPENING
from tests.server.tiny_model import END, write_folder

MODEL = "claude-opus-tiny"
"""By names such as this the tester knows that a model thinks."""
SPEC = Path(llm_comply.schema.__file__).parent / "specs" / "anthropic.json"
CASES = [case for case in ANTHROPIC_TESTS if case.id != "anth-image-input"]


def script(request: Any, choice: int) -> list[int]:
    """Calls where it must."""
    said = written("get_weather", location="San Francisco") if request.sampling.grammar else "Hello."
    return [*f"Hm.</think>{said}".encode(), END]


@pytest.fixture
def address(make_app: Any, engine: FakeEngine, tmp_path: Path) -> Iterator[str]:
    engine.script = script
    with serving(make_app(write_folder(tmp_path / "m", template=OPENING), served_model_name=MODEL)) as address:
        yield address
    close_client()


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")  # the tester's
def test_compliance(address: str):
    config = ComplianceConfig(f"{address}/v1", "none", MODEL, auth_header="x-api-key", use_bearer_prefix=False)
    results = Runner(config, CASES, llm_comply.schema.SpecLoader(str(SPEC))).run_all().results
    assert [(one.id, one.status, one.errors, one.warnings) for one in results] == [
        (case.id, Status.PASSED, [], []) for case in CASES
    ]
