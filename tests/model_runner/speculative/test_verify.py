"""Verification of drafts: match mode gives the same tokens as without drafts, and all modes can be mixed."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.contract import Breaker, Dry, Failure, Mirostat, SamplingParams, Verification, Xtc
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.sampling.rows import EarlySamplingPlan, EarlyTokens
from model_runner.sampling.sampler import Sampler
from tests.model_runner.sampling import oracle
from tests.model_runner.sampling.harness import picks_of

from .worlds import CHAIN, TREE, VOCAB, Drawing, Said, Speakers, World, crowd, make_world

LENGTH = 24
SETTINGS = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.6),
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.8),
    "truncated": SamplingParams(temperature=0.9, top_p=0.8, min_p=0.05, presence_penalty=0.5),
    "bans": SamplingParams(no_repeat_ngram_size=4, bad_words=((1, 2), (4,)), min_tokens=9, stop_token_ids=(0,)),
    "mirostat": SamplingParams(mirostat=Mirostat(tau=1.2, eta=0.3), temperature=1.3),
    "dry and xtc": SamplingParams(dry=Dry(1.0, 1.5, 1, -1, (Breaker((3,)),)), xtc=Xtc(0.5, 0.15)),
    "cutoffs in another order": SamplingParams(
        temperature=1.7,
        eta_cutoff=0.2,
        top_n_sigma=1.0,
        top_p=0.9,
        sampler_order=("top_p", "top_n_sigma", "eta_cutoff", "temperature"),
    ),
    "length penalty": SamplingParams(stop_token_ids=(1,), exponential_decay_length_penalty=(3, 1.05)),
    "restricted": SamplingParams(logit_bias=((3, 1.5),), allowed_token_ids=(0, 1, 3, 4), typical_p=0.9, top_k=3),
}
NOT_FINITE = Failure("the model's logits are not finite")
MODES: tuple[Verification, ...] = ("match", "rejection", "typical")


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(2)


def random_tree(seed: int) -> Callable[[Said], DraftTree]:
    """Trees of up to 12 nodes with any tokens."""
    generator = random.Random(seed)

    def make(said: Said) -> DraftTree:
        edges: dict[tuple[int, int], None] = {}
        for _ in range(generator.randint(0, 12)):
            edges[generator.randint(ROOT, len(edges) - 1), generator.randrange(VOCAB)] = None
        parents, tokens = [p for p, _ in edges], [t for _, t in edges]
        return DraftTree(tuple(tokens), tuple(parents), (0.5,) * len(edges))

    return make


def choices(name: str, verify: Verification = "match", count: int = 40) -> list[Said]:
    return [Said(replace(SETTINGS[name], seed=seed, logprobs=seed % 3 or None), verify) for seed in range(count)]


def broken(world: World) -> World:
    """The same world, but after some tokens the logits are not finite."""
    target = world.target.clone()
    target[0, 1, 2] = torch.nan
    target[2, 2] = torch.inf
    target[4, 0] = -torch.inf
    return replace(world, target=target)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
def test_random_trees_change_nothing_in_match_mode(world: World, name: str, is_broken: bool) -> None:
    world = broken(world) if is_broken else world
    drafted, alone = choices(name), choices(name)
    Speakers(world, drafted).speak(LENGTH, random_tree(1))
    Speakers(world, alone).speak(LENGTH, lambda one: NO_DRAFT)
    assert sum(one.num_accepted for one in drafted) > 20
    for one, other in zip(drafted, alone, strict=True):
        count = len(other.output)
        assert one.output[:count] == other.output
        assert one.logprobs[:count] == other.logprobs
        assert one.error == other.error
        assert len(one.output) == count or other.error is None
    errors = {one.error for one in alone} - {None}
    assert errors == ({NOT_FINITE} if is_broken else set())


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_where_the_logits_are_broken_ends_the_walk_before_it(mode: Verification) -> None:
    target = torch.zeros(VOCAB, VOCAB, VOCAB)
    target[..., 2] = 50.0
    target[2, 2] = torch.nan
    chain = DraftTree((2, 2, 2), (ROOT, 0, 1), (1.0,) * 3)
    said = [Said(SamplingParams(), mode), Said(SamplingParams(temperature=0.0), mode)]
    speakers = Speakers(World(target, target[..., :-1]), said)
    speakers.step([0, 1], [chain, chain])
    for one in said:
        assert (one.output, one.num_accepted, one.error) == ((2, 2), 1, None)
    speakers.step([0, 1], [chain, NO_DRAFT])
    for one in said:
        assert (one.output, one.num_accepted, one.error) == ((2, 2), 1, NOT_FINITE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["greedy", "greedy, penalties"])
def test_at_temperature_zero_every_mode_is_greedy(world: World, mode: Verification, name: str) -> None:
    drafted, alone = choices(name, mode), choices(name)
    Speakers(world, drafted).speak(LENGTH, Drawing(world, TREE, at_random=True))
    Speakers(world, alone).speak(LENGTH, lambda one: NO_DRAFT)
    assert [one.output[:LENGTH] for one in drafted] == [one.output for one in alone]
    assert [one.logprobs[:LENGTH] for one in drafted] == [one.logprobs for one in alone]


@pytest.mark.parametrize("name", ["plain", "truncated"])
def test_modes_in_one_batch_do_not_meet(world: World, name: str) -> None:
    draft = Drawing(world, TREE, at_random=True)
    apart = [choices(name, mode, 10) for mode in MODES]
    for said in apart:
        Speakers(world, said).speak(LENGTH, draft)
    mixed = [one for of_modes in zip(*(choices(name, mode, 10) for mode in MODES), strict=True) for one in of_modes]
    Speakers(world, mixed).speak(LENGTH, draft)
    for index, said in enumerate(apart):
        assert [one.output for one in mixed[index::3]] == [one.output for one in said]
        assert [one.logprobs for one in mixed[index::3]] == [one.logprobs for one in said]
    assert apart[0][1].output != apart[1][1].output


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_the_model_for_each_token(world: World, mode: Verification) -> None:
    said = [Said(replace(SETTINGS["truncated"], seed=seed, logprobs=0), mode) for seed in range(20)]
    Speakers(world, said).speak(LENGTH, Drawing(world, TREE, at_random=True))
    for one in said:
        for place, report in enumerate(one.logprobs):
            before, last, token = one.tokens[place : place + 3]
            expected = torch.log_softmax(world.target[before, last], -1)[token]
            assert (report.token_id, report.logprob) == (token, pytest.approx(expected.item(), abs=1e-6))


def test_mirostat_counts_the_surprise_of_every_token_drafted_or_not(world: World) -> None:
    """Against its definition: mu falls by eta for each bit by which a token surprised more than by tau."""
    params = SamplingParams(mirostat=Mirostat(tau=0.6, eta=0.3), temperature=1.3)
    said = crowd(params, "match", 10)
    speakers = Speakers(world, said)
    speakers.speak(LENGTH, Drawing(world, TREE, at_random=True))
    assert sum(one.num_accepted for one in said) > 20
    for slot, one in enumerate(said):
        mu = 1.2
        for before, last, token in zip(one.tokens, one.tokens[1:], one.output, strict=False):
            scores = oracle.truncated(world.target[before, last].double().numpy(), params, mu=mu)
            mu -= 0.3 * (-np.log2(oracle.softmax(scores)[token]) - 0.6)
        assert speakers.sampler_state(slot) == pytest.approx(mu, abs=1e-4)


def bare(name: str, verify: Verification = "match", count: int = 8) -> list[Said]:
    """Choices of which every other one needs nothing but tokens."""
    return [Said(replace(SETTINGS[name], seed=seed, logprobs=seed % 2 or None), verify) for seed in range(count)]


@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_were_found_beforehand_change_nothing(world: World, mode: Verification, is_broken: bool) -> None:
    world = broken(world) if is_broken else world
    names = "greedy", "plain", "cool", "greedy, penalties", "truncated", "mirostat", "bans"
    found, sampled = ([one for name in names for one in bare(name, mode)] for _ in range(2))
    served: list[int] = []

    def pick(logits: Tensor, plan: EarlySamplingPlan) -> EarlyTokens:
        served.append(len(plan.choices))
        return picks_of(logits, plan)

    Speakers(world, found, pick).speak(LENGTH, random_tree(4))
    Speakers(world, sampled).speak(LENGTH, random_tree(4))
    assert found == sampled
    assert sum(one.num_accepted for one in found) > 20
    assert any(one.error for one in found) == is_broken
    assert served[0] == (12 if mode == "match" else 4)


def test_tokens_that_were_found_beforehand_are_not_sampled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("a row is sampled")

    expected, said = ([Said(replace(SETTINGS["cool"], seed=seed), "match") for seed in range(9)] for _ in range(2))
    Speakers(world, expected).speak(LENGTH, random_tree(5))
    monkeypatch.setattr(Sampler, "__call__", forbidden)
    Speakers(world, said, picks_of).speak(LENGTH, random_tree(5))
    assert said == expected


def test_greedy_rows_without_settings_need_no_processors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("a plain row is processed")

    expected, said = choices("greedy", count=6), choices("greedy", count=6)
    Speakers(world, expected).speak(LENGTH, lambda one: NO_DRAFT)
    for one in said:
        one.params = replace(one.params, logprobs=None)
    monkeypatch.setattr(Sampler, "logprobs", forbidden)
    monkeypatch.setattr("model_runner.sampling.sampler.constrained", forbidden)
    Speakers(world, said).speak(LENGTH, Drawing(world, CHAIN, at_random=False))
    assert [one.output[:LENGTH] for one in said] == [one.output for one in expected]
