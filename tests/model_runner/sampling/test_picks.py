"""Plans for tokens that are found before sampling: for whom, with which noise and temperature."""

from dataclasses import replace

import numpy as np
import pytest

from model_runner.batch import SampleRows
from model_runner.contract import Contrastive, DoLa, SamplingParams, Verification
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.sampling.noise import Stream, noise_key
from model_runner.sampling.rows import SamplingState

from .cases import OUTPUT, PROMPT, SETTINGS
from .harness import CPU

VOCAB = 25
TREE = DraftTree((1, 2, 3, 4), (ROOT, ROOT, 1, 2), (0.5,) * 4)
SERVED = {"temperature", "cold", "top_k above vocabulary"}
OTHERS = {
    "logprobs": SamplingParams(logprobs=0),
    "candidates": SamplingParams(beam_candidates=2),
    "guidance": SamplingParams(guidance=1.0),
    "contrastive": SamplingParams(contrastive=Contrastive(alpha=0.0)),
    "dola": SamplingParams(dola=DoLa("low", alpha=0.0)),
}


def is_served(sampling: SamplingParams, verify: Verification = "match") -> bool:
    state = SamplingState(1, VOCAB, CPU)
    state.admit(0, sampling, PROMPT, OUTPUT)
    plan = state.plan_early_sampling([SampleRows(5, 0, NO_DRAFT, verify)], [0], np.array([14]))
    assert plan.choices <= {5}
    return bool(plan.choices)


@pytest.mark.parametrize("name", SETTINGS)
def test_only_a_temperature_stands_between_logits_and_picks(name: str) -> None:
    assert is_served(SETTINGS[name]) == (name in SERVED)
    plain = SamplingParams(temperature=0, top_k=2, top_p=0.3, min_p=0.5, typical_p=0.2)  # decide nothing
    assert is_served(plain)


@pytest.mark.parametrize("sampling", OTHERS.values(), ids=OTHERS)
def test_who_asks_for_more_is_not_served(sampling: SamplingParams) -> None:
    assert not is_served(sampling)
    assert not is_served(replace(sampling, temperature=0.0))


@pytest.mark.parametrize("mode", ["rejection", "typical"])
def test_modes_that_test_drafts_are_served_at_temperature_zero(mode: Verification) -> None:
    assert is_served(SamplingParams(temperature=0.0), mode)
    assert not is_served(SamplingParams(), mode)


def test_each_row_has_the_key_and_temperature_of_its_place() -> None:
    kinds = [
        (SamplingParams(seed=2**64 - 1, temperature=0.7), TREE),
        (SamplingParams(presence_penalty=1.0), TREE),
        (SamplingParams(temperature=0.0), TREE),
        (SamplingParams(seed=5, choice=3), NO_DRAFT),
    ]
    state = SamplingState(4, VOCAB, CPU)
    samples: list[SampleRows] = []
    positions: list[int] = []
    for slot, (sampling, tree) in enumerate(kinds):
        output = OUTPUT[: 2 * slot]
        state.admit(slot, sampling, PROMPT, output)
        positions += [99, 99]  # rows that nobody draws from
        samples.append(SampleRows(slot, len(positions), tree))
        positions += [len(PROMPT) + len(output) - 1 + depth for depth in (0, *tree.depths())]
    plan = state.plan_early_sampling(samples, range(4), np.array(positions))
    assert plan.choices == {0, 2, 3}
    keys = [noise_key(2**64 - 1, 0, Stream.TARGET, depth) for depth in (0, 1, 1, 2, 3)]
    keys_of_last = [noise_key(5, 3, Stream.TARGET, 6)]
    assert plan.keys.tolist() == [0, 0, *keys, *[0] * 16, *keys_of_last]
    assert plan.temperatures.tolist() == [0, 0, *[0.7] * 5, *[0] * 16, 1.0]


def test_a_step_without_rows() -> None:
    plan = SamplingState(1, VOCAB, CPU).plan_early_sampling([], [], np.empty(0, dtype=np.int64))
    assert (len(plan.keys), len(plan.temperatures), plan.choices) == (0, 0, frozenset())
