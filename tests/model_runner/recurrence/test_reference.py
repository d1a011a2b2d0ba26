"""The reference against transformers, and its exactness."""

import pytest

from model_runner.recurrence.reference import ReferenceRecurrence
from tests.model_runner.recurrence.exactness import ExactnessTests
from tests.model_runner.recurrence.streams import MakeBackend


@pytest.fixture
def make() -> MakeBackend:
    return ReferenceRecurrence


class TestReference(ExactnessTests):
    """In plain torch."""
