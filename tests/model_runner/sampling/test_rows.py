"""Slots: readmission, release, and what is refused."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from model_runner.batch import SampleRows
from model_runner.contract import Breaker, Dry, Mirostat, SamplingParams, Xtc
from model_runner.draft_tree import NO_DRAFT
from model_runner.sampling.noise import Stream
from model_runner.sampling.rows import Entries, SamplingRows, SamplingState, Setting

from .cases import OUTPUT, PROMPT, SETTINGS
from .harness import CPU


def plain(rows: SamplingRows) -> dict[str, object]:
    """The same as lists, which compare with ==."""

    def listed(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, Entries):
            return sorted(zip(value.rows.tolist(), value.tokens.tolist(), value.values.tolist(), strict=True))
        if isinstance(value, Setting):
            return value.name, value.rows.tolist(), value.values.tolist()
        return [listed(used) for used in value] if isinstance(value, tuple) else value

    return {field.name: listed(getattr(rows, field.name)) for field in fields(rows)}


def pre_sampled(state: SamplingState, slot: int) -> object:
    """How a kernel would sample the slot's next token; the position does not matter."""
    plan = state.plan_early_sampling([SampleRows(0, 0, NO_DRAFT)], [slot], np.array([len(PROMPT)]))
    return plan.keys.tolist(), plan.temperatures.tolist(), plan.choices


@pytest.mark.parametrize("name", SETTINGS)
def test_readmission_equals_admission_and_commits(name):
    state = SamplingState(3, 25, CPU)
    state.admit(0, SETTINGS[name], PROMPT)
    for token in OUTPUT:
        state.commit(0, token)
    state.admit(1, SETTINGS[name], PROMPT, OUTPUT)
    state.admit(2, SETTINGS[name], PROMPT, OUTPUT[:3])
    for token in OUTPUT[3:]:
        state.commit(2, token)
    assert plain(state.rows([0])) == plain(state.rows([1])) == plain(state.rows([2]))
    state.release(0)
    state.admit(0, SETTINGS[name], PROMPT, OUTPUT)
    assert plain(state.rows([0])) == plain(state.rows([1]))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fork_equals_admission_and_neither_touches_the_other(name):
    """As beams are forked, one token further on, and as choices are, behind the prompt; of forks too."""
    settings = SETTINGS[name]
    other = replace(settings, choice=3, prompt_logprobs=2)
    state = SamplingState(7, 25, CPU)
    outputs = [OUTPUT[:4], (*OUTPUT[:4], 9), (), (7,), (*OUTPUT[:4], 9, 3)]
    state.admit(0, settings, PROMPT)
    for token in OUTPUT[:4]:
        state.commit(0, token)
    state.admit(1, settings, PROMPT, outputs[1], forked_from=0)
    state.admit(2, other, PROMPT, outputs[2], forked_from=0)
    state.admit(3, other, PROMPT, outputs[3], forked_from=1)
    state.admit(4, settings, PROMPT, outputs[4], forked_from=1)
    for further in ((), (5, 3, 5, 1), (3, 5)):
        for slot in range(5):
            outputs[slot] = (*outputs[slot], *further[slot % 2 :])
            for token in further[slot % 2 :]:
                state.commit(slot, token)
        for slot, output in enumerate(outputs):
            state.admit(5, other if slot in (2, 3) else settings, PROMPT, output)
            assert plain(state.rows([slot])) == plain(state.rows([5]))
            assert pre_sampled(state, slot) == pre_sampled(state, 5)
            state.release(5)


def test_a_fork_of_one_that_began_with_output_is_right_too():
    """How it was behind the prompt is known no longer."""
    state = SamplingState(3, 25, CPU)
    state.admit(0, SETTINGS["everything"], PROMPT, OUTPUT[:3])
    state.commit(0, 5)
    state.admit(1, SETTINGS["everything"], PROMPT, (8,), forked_from=0)
    state.admit(2, SETTINGS["everything"], PROMPT, (8,))
    assert plain(state.rows([1])) == plain(state.rows([2]))


def test_a_released_slot_keeps_nothing():
    state = SamplingState(1, 25, CPU)
    state.admit(0, SETTINGS["everything"], PROMPT, OUTPUT)
    state.release(0)
    with pytest.raises(KeyError, match="slot 0 is free"):
        state.rows([0])
    state.admit(0, SETTINGS["everything"], (1,))
    fresh = SamplingState(1, 25, CPU)
    fresh.admit(0, SETTINGS["everything"], (1,))
    assert plain(state.rows([0])) == plain(fresh.rows([0]))


def test_a_taken_slot_is_not_overwritten():
    state = SamplingState(1, 25, CPU)
    state.admit(0, SamplingParams(), (1,))
    with pytest.raises(ValueError, match="slot 0 is taken"):
        state.admit(0, SamplingParams(), (1,))


def test_a_slot_may_have_several_rows():
    state = SamplingState(2, 25, CPU)
    state.admit(0, SETTINGS["everything"], PROMPT, OUTPUT)
    state.admit(1, SamplingParams(seed=4), PROMPT)
    rows = state.rows([0, 1, 0])
    assert rows.key(0) == rows.key(2) != rows.key(1)
    assert (rows.whole, rows.truncated) == ((1,), (0, 2))


def test_noise_follows_seed_choice_and_output_position():
    state = SamplingState(4, 25, CPU)
    state.admit(0, SamplingParams(seed=1), (1, 2, 3))
    state.admit(1, SamplingParams(seed=1), (9,))
    state.admit(2, SamplingParams(seed=2), (9,))
    state.admit(3, SamplingParams(seed=1, choice=1), (9,))
    rows = state.rows(range(4))
    keys = [rows.key(row) for row in range(4)]
    assert keys[0] == keys[1]  # the prompt plays no part
    assert len(set(keys)) == 3
    state.commit(0, 5)
    assert state.rows([0]).key(0) != keys[0]
    assert len({rows.key(0, stream) for stream in Stream}) == len(Stream)
    assert rows.key(0) == rows.key(0, Stream.TARGET) != replace(rows, stream=Stream.RESIDUAL).key(0)


def test_mu_follows_the_surprise_and_is_carried_over():
    params = SamplingParams(mirostat=Mirostat(tau=3.0, eta=0.25))
    state = SamplingState(2, 25, CPU)
    state.admit(0, params, PROMPT)
    assert state.sampler_state(0) == 6.0
    state.commit(0, 5, 7.0)
    assert state.sampler_state(0) == 6.0 - 0.25 * (7.0 - 3.0)
    state.commit(0, 6, 0.5)
    assert state.sampler_state(0) == 5.0 + 0.25 * 2.5
    state.admit(1, params, PROMPT, (5, 6), state.sampler_state(0))
    for slot in (0, 1):
        state.commit(slot, 7, 1.0)
    assert state.sampler_state(0) == state.sampler_state(1)
    assert plain(state.rows([0])) == plain(state.rows([1]))
    assert state.rows([0]).truncations[0].values.item() == state.sampler_state(0)


def test_mu_of_a_sibling_begins_anew():
    params = SamplingParams(mirostat=Mirostat(tau=3.0, eta=0.25))
    state = SamplingState(2, 25, CPU)
    state.admit(0, params, PROMPT)
    state.commit(0, 5, 7.0)
    state.admit(1, replace(params, choice=1), PROMPT, forked_from=0)
    assert (state.sampler_state(0), state.sampler_state(1)) == (5.0, 6.0)


@pytest.mark.parametrize("is_readmitted", [False, True])
def test_a_token_costs_its_frequency_penalty_each_time_it_comes(is_readmitted):
    params, output = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), (4,) * 3 + (7,) + (4,) * 97
    state = SamplingState(1, 25, CPU)
    state.admit(0, params, PROMPT, output if is_readmitted else ())
    for token in () if is_readmitted else output:
        state.commit(0, token)
    penalty = state.rows([0]).output_penalty
    assert dict(zip(penalty.tokens.tolist(), penalty.values.tolist(), strict=True)) == {4: 50.25, 7: 0.75}


def test_only_mirostat_has_a_state_of_its_own():
    for params in SETTINGS.values():
        state = SamplingState(1, 25, CPU)
        state.admit(0, params, PROMPT, OUTPUT)
        assert (state.sampler_state(0) is None) == (params.mirostat is None)


def test_the_coin_of_xtc_falls_as_often_as_it_should_and_by_seed_choice_and_position():
    def falls(params: SamplingParams, num_output: int = 0) -> bool:
        state = SamplingState(1, 25, CPU)
        state.admit(0, params, PROMPT, (1,) * num_output)
        return bool(state.rows([0]).truncations)

    xtc = SamplingParams(xtc=Xtc(0.3))
    series = [
        [falls(replace(xtc, seed=seed)) for seed in range(2000)],
        [falls(replace(xtc, choice=choice)) for choice in range(2000)],
        [falls(xtc, position) for position in range(400)],
    ]
    for one in series:
        assert sum(one) / len(one) == pytest.approx(0.3, abs=0.07)
    assert len({tuple(one[:400]) for one in series}) == 3
    assert not falls(SamplingParams(xtc=Xtc(0.0)))
    assert falls(SamplingParams(xtc=Xtc(1.0)))


def test_each_row_has_its_own_order():
    last = ("top_p", "temperature")
    cases = [
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=0.5, top_p=0.8, sampler_order=last),
        SamplingParams(temperature=0.5, min_p=0.1),
    ]
    state = SamplingState(3, 25, CPU)
    for slot, params in enumerate(cases):
        state.admit(slot, params, PROMPT)
    truncations = state.rows(range(3)).truncations
    assert [(used.name, used.rows.tolist()) for used in truncations] == [
        *(("temperature", [0, 2]), ("top_p", [0]), ("min_p", [2])),
        *(("top_p", [1]), ("temperature", [1])),
    ]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias=((25, 1.0),)), "logit_bias: token id 25"),
        (SamplingParams(allowed_token_ids=(3, -1)), "allowed_token_ids: token id -1"),
        (SamplingParams(bad_words=((1, 99),)), "bad_words: token id 99"),
        (SamplingParams(bad_words=((),)), "bad_words: a word has no tokens"),
        (SamplingParams(stop_token_ids=(25,)), "stop_token_ids: token id 25"),
        (SamplingParams(dry=Dry(1.0, breakers=(Breaker((3, 25, 4)),))), "dry: token id 25"),
        (SamplingParams(dry=Dry(1.0, breakers=(Breaker((3,), (4, -1)),))), "dry: token id -1"),
    ],
)
def test_settings_that_the_vocabulary_does_not_fit_are_refused(params, message):
    state = SamplingState(1, 25, CPU)
    with pytest.raises(ValueError, match=message):
        state.admit(0, params, (1,))
    state.admit(0, SamplingParams(), (1,))  # the slot stayed free
