"""The matrix: every method with every feature of the engine and half of the settings of sampling gives the tokens and
logprobs of no speculation, while choices are recorded and heads change every few steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench.speculation_matrix import FEATURES, Feature, Matrix
from model_runner.contract import Contrastive, DoLa, SamplingParams, Thinking
from tests.engine.conftest import Harness
from tests.engine.tiny_heads import write_eagle3

METHODS = [
    "auto", "draft_model", "eagle", "hydra", "lookahead", "medusa", "prediction", "suffix"
]  # fmt: skip
_ITEMS = '%llguidance {"no_forcing": true}\nstart: ("{\\"" /[ab]{1,3}/ "\\":" /[0-3]{2}/ "}" )+'
"""A grammar whose forced parts repeat, with free choices in between."""
_CALLS = (
    '%llguidance {"no_forcing": true}\nstart: (begin "\\"a\\":" /[0-3]{2}/ "}" )* /(.|\\n)*/\n'
    'begin[lazy]: /(.|\\n)*/ "{"\n'
)
"""As tools are called: any text, but what begins with a brace is held to a form."""
_HELD = SamplingParams(temperature=0.8, logprobs=1, seed=5, grammar=_ITEMS, stop_token_ids=(2,), min_tokens=20)
_DOLA = SamplingParams(temperature=0.8, logprobs=1, seed=5, dola=DoLa((0, 1, 2)))
_CONTRASTIVE = SamplingParams(temperature=0.8, logprobs=1, seed=5, contrastive=Contrastive())
ALL_FEATURES = FEATURES | {
    "DoLa": Feature(_DOLA),
    "contrastive": Feature(_CONTRASTIVE),
    "contrastive, greedy, preemption": Feature(
        replace(_CONTRASTIVE, temperature=0.0), chunk=64, is_short_of_blocks=True
    ),
    "contrastive, n = 3, prefix hit": Feature(_CONTRASTIVE, num_choices=3, is_warm=True, chunk=32),
}
"""The amateur is the draft model."""
HELD = {
    "grammar, top-p, penalties": Feature(replace(_HELD, top_p=0.9, frequency_penalty=0.3, presence_penalty=0.2)),
    "grammar, n = 3, prefix hit": Feature(_HELD, num_choices=3, is_warm=True, chunk=32),
    "grammar, preemption": Feature(_HELD, chunk=64, is_short_of_blocks=True),
    "grammar, mixed batch": Feature(_HELD, is_mixed=True),
    "calls in free text": Feature(replace(_HELD, grammar=_CALLS)),
    "calls in free text, greedy, preemption": Feature(
        replace(_HELD, grammar=_CALLS, temperature=0.0, stop_token_ids=()), chunk=64, is_short_of_blocks=True
    ),
    "thinking budget": Feature(replace(_HELD, grammar=None, thinking=Thinking(6, b"[", b']"', is_begun=True))),
}


@pytest.fixture(scope="module")
def drafting(load_drafting: Callable[..., Harness]) -> Iterator[Harness]:
    harness = load_drafting(write_eagle3, swaps=True)
    yield harness
    harness.forget()


@pytest.fixture(scope="module")
def matrix(drafting: Harness) -> Matrix:
    return drafting.matrix(ALL_FEATURES | HELD)


def test_all_methods_are_here(drafting: Harness) -> None:
    assert sorted(drafting.runner.info.speculation_methods) == sorted([*METHODS, "grammar"])


CELLS = [
    (method, name)
    for which, method in enumerate(METHODS)
    for index, (name, feature) in enumerate(ALL_FEATURES.items())
    if (index + which) % 2 or replace(feature, sampling=SamplingParams()) != Feature(SamplingParams())
]
"""`python -m bench.speculation` has all of them."""


@pytest.mark.parametrize(("method", "feature"), CELLS)
def test_equal_to_no_speculation(drafting: Harness, matrix: Matrix, method: str, feature: str) -> None:
    link = drafting.swapping
    assert link is not None
    num_swaps = link.num_swaps
    cell = matrix.cell(method, feature)
    assert cell.is_equal
    assert link.num_swaps > num_swaps + 1
    assert cell.num_drafted > 0
    assert cell.num_preempted > 0 or not ALL_FEATURES[feature].is_short_of_blocks


@pytest.mark.parametrize("feature", HELD)
@pytest.mark.parametrize("method", ["auto", "eagle", "grammar", "lookahead", "suffix"])
def test_held_to_a_grammar_too(matrix: Matrix, method: str, feature: str) -> None:
    cell = matrix.cell(method, feature)
    assert cell.is_equal
    assert cell.num_accepted > 0 or method != "grammar" or not feature.startswith("grammar")
    assert cell.num_preempted > 0 or not HELD[feature].is_short_of_blocks
