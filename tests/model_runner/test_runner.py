"""The runner with a fake model: what it asks of the model, and how one choice's failure stays its own."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
import torch

from model_runner.assemble import RunnerParts
from model_runner.attention.backend import AttentionOptions
from model_runner.batch import Batch
from model_runner.contract import AdmittedRequest, BlockCopy, SamplingParams, ScheduledRequest, StepPlan, StepResult
from model_runner.features import LAST, Feature
from model_runner.kv_cache import KVCache, KVShape
from model_runner.runner import ModelRunner
from model_runner.runner_interface import RunnerInfo
from model_runner.sampling.noise import Stream, noise_key
from model_runner.sampling.rows import NO_EARLY_TOKENS, EarlySamplingPlan, EarlyTokens, SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.scoring.contrastive_search import ContrastiveSearch
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.draft_kv import BlockGenerations, TargetBlocks
from model_runner.speculative.lookahead import LookaheadProposer
from model_runner.speculative.proposer import Proposer
from model_runner.speculative.speculator import Speculator
from model_runner.speculative.verify import Verifier
from model_runner.state import RunnerState
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.oracles.draw import TorchDraw
from tests.model_runner.speculative.world import Guesser

CPU = torch.device("cpu")
VOCAB = 40
BLOCK = 16
POISON = 39
GREEDY = SamplingParams(temperature=0.0)


class SummingModel:
    """Answers with (the mean of all tokens so far) + 1, found through the paged cache. POISON makes its values NaN."""

    def __init__(self, cache: KVCache, picked: Sequence[int]) -> None:
        self.rows: list[list[int]] = []
        self.plans: list[EarlySamplingPlan] = []
        self._picked = picked
        self._attention = ReferenceAttention(cache)

    def features(self) -> dict[str, torch.Tensor]:
        return {}

    def settle(self) -> None:
        pass

    def picks(self) -> Callable[[], EarlyTokens]:
        return lambda: EarlyTokens(self._picked, self.plans[-1].choices) if self._picked else NO_EARLY_TOKENS

    def forward(
        self, batch: Batch, also: Collection[Feature] = (), picks: EarlySamplingPlan | None = None, follows: None = None
    ) -> torch.Tensor:
        self.plans += [] if picks is None else [picks]
        self.rows.append(batch.logits_index.tolist())
        tokens = torch.from_numpy(batch.tokens)
        values = torch.where(tokens == POISON, torch.nan, tokens.float()).view(-1, 1, 1)
        zeros = torch.zeros_like(values)
        metadata = self._attention.prepare(batch)
        means = self._attention.forward(0, zeros, zeros, values, AttentionOptions(1.0), metadata)
        mean = means[batch.logits_index, 0, 0]
        return torch.where(mean.isnan(), mean, 0.0)[:, None] - (torch.arange(VOCAB) - mean.round()[:, None] - 1).abs()


def make_runner(picked: Sequence[int] = (), **proposers: Proposer) -> tuple[ModelRunner, SummingModel]:
    cache = KVCache([KVShape(1, 1, 1)], 8, BLOCK, torch.float32, CPU)
    model = SummingModel(cache, picked)
    sampling = SamplingState(4, VOCAB, CPU)
    sampler = Sampler(TorchDraw(VOCAB, CPU))
    search = ContrastiveSearch(sampling, sampler, 64)
    controller = SpeculationController()
    speculator = Speculator({"lookahead": LookaheadProposer(), **proposers}, controller, max_nodes=8)
    parts = RunnerParts(
        target=model,
        caches=[cache],
        state=RunnerState(TargetBlocks(8, BLOCK, 4, BlockGenerations(8)), sampling, speculator, search),
        speculator=speculator,
        controller=controller,
        verifier=Verifier(sampling, sampler),
        search=search,
        grammars=None,
    )
    return ModelRunner(parts, RunnerInfo(VOCAB, 64, 8, BLOCK, 4, 64, "cpu", "float32", "float32", "none")), model


def admit(
    key: str, tokens: list[int], block: int, sampling: SamplingParams = GREEDY, computed: int = 0
) -> AdmittedRequest:
    return AdmittedRequest(key, tuple(tokens), len(tokens), computed, (block,), sampling)


def step(
    runner: ModelRunner,
    *shares: tuple[str, int],
    admitted: tuple[AdmittedRequest, ...] = (),
    released: tuple[str, ...] = (),
    copies: tuple[BlockCopy, ...] = (),
) -> StepResult:
    scheduled = tuple(ScheduledRequest(key, count, ()) for key, count in shares)
    return runner.execute(StepPlan(released, copies, admitted, scheduled))


def test_without_the_package_for_grammars_only_requests_that_need_it_are_refused() -> None:
    runner, _ = make_runner()
    assert runner.prepare(GREEDY, 1) is None
    with pytest.raises(ValueError, match="need a package: run `pip install llguidance`"):
        runner.prepare(replace(GREEDY, grammar="start: /a/"), 1)


def test_a_chunk_brings_nothing_until_the_last_known_token_is_computed() -> None:
    runner, model = make_runner()
    assert step(runner, ("a", 2), admitted=(admit("a", [4, 6, 8], 0),)).choices[0].tokens == ()
    assert step(runner, ("a", 1)).choices[0].tokens == (7,)
    assert step(runner, ("a", 1)).choices[0].tokens == (round((4 + 6 + 8 + 7) / 4) + 1,)
    assert model.rows == [[], [0], [0]]  # logits only where they are needed


def test_prompt_logprobs_come_for_every_token_after_the_first_in_chunks() -> None:
    runner, model = make_runner()
    sampling = replace(GREEDY, prompt_logprobs=2)
    first = step(runner, ("a", 2), admitted=(admit("a", [4, 5, 4], 0, sampling),)).choices[0]
    second = step(runner, ("a", 1)).choices[0]
    assert [entry.token_id for entry in first.prompt_logprobs] == [5, 4]
    assert [entry.rank for entry in first.prompt_logprobs] == [
        1,
        2,
    ]  # 4 shares the second place with 6
    assert [len(entry.top) for entry in first.prompt_logprobs] == [2, 2]
    assert second.prompt_logprobs == ()
    assert len(second.tokens) == 1
    assert model.rows == [[0, 1], [0]]


def test_a_fork_starts_from_the_copied_block() -> None:
    runner, _ = make_runner()
    step(runner, ("a", 3), admitted=(admit("a", [4, 6, 8], 0),))
    forked = step(runner, ("b", 1), admitted=(admit("b", [4, 6, 8], 1, computed=2),), copies=(BlockCopy(0, 1),))
    assert forked.choices[0].tokens == (7,)


def test_a_key_may_be_released_and_admitted_in_one_plan() -> None:
    runner, _ = make_runner()
    step(runner, ("a", 3), admitted=(admit("a", [4, 6, 8], 0),))
    again = step(runner, ("a", 4), released=("a",), admitted=(admit("a", [4, 6, 8, 7], 2),))
    assert again.choices[0].tokens == (round(25 / 4) + 1,)


def test_slots_return_when_choices_are_released() -> None:
    runner, _ = make_runner()
    for number in range(20):
        released = (str(number - 1),) if number else ()
        assert (
            step(runner, (str(number), 1), admitted=(admit(str(number), [5], 0),), released=released).choices[0].tokens
        )


def test_one_choice_fails_alone_and_leaves_no_trace_in_its_blocks() -> None:
    runner, _ = make_runner()
    both = (admit("bad", [4, POISON, 4], 0), admit("good", [4, 6, 8], 1))
    bad, good = step(runner, ("bad", 3), ("good", 3), admitted=both).choices
    assert bad.tokens == ()
    assert bad.error is not None
    assert "not finite" in bad.error.message
    assert not bad.error.by_request
    assert good.tokens == (7,)
    step(runner, ("part", 2), released=("bad",), admitted=(admit("part", [POISON, 4, 4], 2),))  # ends before it fails
    heir = step(runner, ("heir", 1), released=("part",), admitted=(admit("heir", [5], 2),)).choices[0]
    assert heir.error is None
    assert heir.tokens == (6,)


def test_a_key_that_is_not_known_is_an_error() -> None:
    runner, _ = make_runner()
    with pytest.raises(KeyError):
        step(runner, ("nobody", 1))


def test_tokens_that_were_found_beforehand_are_taken() -> None:
    runner, model = make_runner(range(20, 30))
    asked = replace(GREEDY, prompt_logprobs=0)
    drawn, penalised = SamplingParams(temperature=0.5, seed=3), replace(GREEDY, presence_penalty=0.1)
    admitted = admit("a", [4, 6], 0, asked), admit("b", [4, 6], 1, penalised), admit("c", [4, 6], 2, drawn)
    results = step(runner, ("a", 2), ("b", 2), ("c", 2), admitted=admitted).choices
    assert [result.tokens for result in results] == [(21,), (6,), (23,)]
    assert results[0].prompt_logprobs[0].token_id == 6
    step(runner, ("c", 1))
    assert [plan.choices for plan in model.plans] == [{0, 2}, {0}]
    assert [plan.temperatures.tolist() for plan in model.plans] == [[0, 0, 0, 0.5], [0.5]]
    assert [int(plan.keys[-1]) for plan in model.plans] == [noise_key(3, 0, Stream.TARGET, output) for output in (0, 1)]


def test_trained_heads_draft_once_before_requests_do() -> None:
    heads, others = Guesser(0.9, needs=frozenset({LAST})), Guesser(0.9)
    runner, _ = make_runner(heads=heads, others=others)
    runner.warm_up()
    assert (heads.asked, others.asked) == (1, 0)
    assert not heads.running
    assert runner.speculation_stats() == ()
