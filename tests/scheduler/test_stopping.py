"""Where an output ends."""

import pytest

from model_runner.contract import SamplingParams
from scheduler.interface import ChoiceState, EngineRequest, FinishReason
from scheduler.request import StopCheck, check_stop, make_choices

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "sampled", "max_tokens", "expected"),
    [
        ((), (5,), 3, StopCheck(1)),
        ((5, 5), (5,), 3, StopCheck(1, LENGTH)),
        ((), (8,), 3, StopCheck(1, STOP, 8)),
        ((5, 5), (9,), 3, StopCheck(1, STOP, 9)),  # a stop token in the last place is a stop
        ((), (5, 8, 5), 3, StopCheck(2, STOP, 8)),  # what was sampled beyond the end does not count
        ((5,), (5, 5, 8), 3, StopCheck(2, LENGTH)),
        ((), (5, 5), 3, StopCheck(2)),
        ((), (8,), 0, StopCheck(0, LENGTH)),
        ((5, 5, 5), (8,), 3, StopCheck(0, LENGTH)),  # resumed when complete
        ((5, 8), (5,), 3, StopCheck(0, STOP, 8)),
        ((8, 5), (5,), 3, StopCheck(1, LENGTH)),
    ],
)
def test_judge(output, sampled, max_tokens, expected):
    sampling = SamplingParams(stop_token_ids=(8, 9))
    request = EngineRequest("r", (8,), sampling, max_tokens, choices=(ChoiceState(0, output),))
    assert check_stop(make_choices(request, 0, 0.0, block_size=4)[0], sampled) == expected
