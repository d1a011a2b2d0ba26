"""Learning on real engines: what is recorded is what the target computes, and heads come and go without a trace."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.heads.base import Example, Heads, TargetShape
from model_runner.heads.loading import load_heads
from model_runner.learning.link import Begin
from model_runner.learning.store import pack_learnt
from model_runner.model_needs import DoesNotFitError
from model_runner.modules.loading import load_config
from model_runner.runner import ModelRunner
from model_runner.training.examples import TargetForTraining
from scheduler.interface import EngineRequest
from tests.engine import tiny_heads
from tests.engine.conftest import SMALL_VOCAB, Answer, Harness
from tests.engine.swapping import ListeningLink
from tests.engine.test_sameness import same

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
LONGEST = 512


class GivingLink(ListeningLink):
    """Gives what it is given."""

    heads: Heads | None = None

    def take_heads(self) -> Heads | None:
        heads, self.heads = self.heads, None
        return heads


class Learner:
    """An engine on a tiny model without heads, and the other end of its line."""

    def __init__(self, config: RunnerConfig) -> None:
        self.links: list[GivingLink] = []
        self.config = config
        self.harness = Harness(ModelRunner.load(config, make_link=self._make_link))
        self.target = TargetShape.of(load_config(config.model))

    def _make_link(self, begin: Begin, prepare: Callable[[bytes], Heads]) -> GivingLink:
        self.links.append(GivingLink(begin, prepare))
        return self.links[-1]

    @property
    def link(self) -> GivingLink:
        (link,) = self.links
        return link

    def give(self, folder: Path) -> None:
        """As they come from a learner."""
        heads = load_heads(folder, self.target)
        self.link.heads = self.link.prepare(pack_learnt(heads, 1, "", self.target.num_layers))

    def ask(self, *requests: EngineRequest, **limits: int) -> dict[tuple[str, int], Answer]:
        return self.harness.run(self.harness.engine(**limits), requests)  # type: ignore[arg-type]

    def pieces(self) -> list[Example]:
        """Pieces recorded since the last call."""
        self.harness.forget()  # finished choices are reported with the next step
        taken, self.link.pieces = self.link.pieces, []
        return taken


@pytest.fixture(scope="module")
def config(tiny_model: Callable[..., Path]) -> RunnerConfig:
    return RunnerConfig(model=tiny_model("llama", SMALL_VOCAB), kv_cache_gib=0.02, max_num_seqs=8, learn=True)


@pytest.fixture(scope="module")
def learner(config: RunnerConfig) -> Iterator[Learner]:
    learner = Learner(config)
    yield learner
    learner.harness.forget()


def request(name: str, count: int = 20, max_tokens: int = 40, **more: object) -> EngineRequest:
    prompt = tuple(np.random.default_rng(len(name) + count).integers(3, SMALL_VOCAB, count).tolist())
    return EngineRequest(name, prompt, GREEDY, max_tokens, **more)  # type: ignore[arg-type]


def half(rows: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    return rows.half().numpy()


@pytest.fixture(scope="module")
def alone(config: RunnerConfig, learner: Learner) -> TargetForTraining:
    """The same model, run over whole sequences."""
    return TargetForTraining(replace(config, learn=False), learner.harness.runner._learning.needs, LONGEST)


@pytest.mark.parametrize("method", [None, "suffix"])
@pytest.mark.parametrize("num_blocks", [None, 6])
def test_pieces_hold_what_the_target_computes_for_their_tokens(
    learner: Learner, alone: TargetForTraining, method: str | None, num_blocks: int | None
) -> None:
    speculation = None if method is None else Speculation(method, 4)
    requests = [request(f"r{index}", 10 + 30 * index, 90, speculation=speculation) for index in range(4)]
    learner.ask(requests[2])  # so that something is in the prefix cache of another engine only: it changes nothing
    learner.pieces()
    engine = learner.harness.engine(chunk=48, num_blocks=num_blocks)
    answers = learner.harness.run(engine, requests)
    assert engine.stats().preemptions > 0 or num_blocks is None
    pieces = learner.pieces()
    assert len(pieces) >= len(requests)
    taught: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for piece in pieces:
        tokens = piece.tokens.tolist()
        (name, whole) = next(
            (one.request_id, whole)
            for one in requests
            if (whole := [*one.prompt, *answers[one.request_id, 0].tokens])[piece.start :][: len(tokens)] == tokens
        )
        computed = alone.features(whole[: piece.start + len(tokens)])
        for feature, rows in piece.features.items():
            assert np.array_equal(rows, half(computed[feature][piece.start :]))
        taught[name] += range(piece.start + piece.num_prompt, piece.start + len(tokens))
    for places in taught.values():
        assert len(set(places)) == len(places)
    if num_blocks is None:
        assert [len(places) for places in taught.values()] == [90 - 1] * 4  # nothing follows the last token


def test_who_asks_not_to_be_learnt_from_is_not(learner: Learner) -> None:
    learner.pieces()
    learner.ask(request("a", learn=False), request("b", cache_salt="mine"))
    assert not learner.pieces()
    learner.ask(request("c"))
    assert len(learner.pieces()) == 1


def test_what_the_prefix_cache_spared_is_left_out(learner: Learner) -> None:
    learner.pieces()
    engine = learner.harness.engine()
    first, again = request("x", 50), replace(request("x", 50), request_id="again")
    answers = learner.harness.run(engine, [first]) | learner.harness.run(engine, [again])
    assert answers["again", 0].num_cached > 0
    assert [(piece.start, piece.num_prompt) for piece in learner.pieces()] == [
        (0, 50),
        (answers["again", 0].num_cached, 50 - answers["again", 0].num_cached),
    ]


def test_a_model_without_heads_begins_with_none_and_drafts_when_some_come(config: RunnerConfig, tmp_path: Path) -> None:
    learner = Learner(config)
    begin = learner.link.begin
    assert (begin.kind, begin.heads, begin.threads, begin.model) == ("hydra", None, 1, str(config.model))
    assert "hydra" in learner.harness.runner.info.speculation_methods
    torch.manual_seed(3)
    plain = request("r", 30, 60)
    asking = replace(plain, speculation=Speculation("hydra", 4))
    expected = learner.ask(plain)
    before = learner.ask(asking)
    assert same(before, expected)
    assert before["r", 0].num_accepted + before["r", 0].num_rejected == 0
    learner.give(tiny_heads.write_hydra(tmp_path / "first", SMALL_VOCAB))
    after = learner.ask(asking)
    assert same(after, expected)
    assert after["r", 0].num_accepted + after["r", 0].num_rejected > 0
    assert learner.link.heads is None
    assert learner.pieces()
    learner.harness.runner.close()
    assert same(learner.ask(asking), expected)
    assert not learner.pieces()
    learner.harness.forget()


@pytest.mark.parametrize(
    ("method", "write"),
    [
        ("medusa", tiny_heads.write_medusa),
        ("hydra", tiny_heads.write_hydra),
        ("eagle", tiny_heads.write_eagle3),
    ],
)
def test_drafts_are_those_of_the_heads_that_came_last(
    config: RunnerConfig, tmp_path: Path, method: str, write: Callable[[Path, int], Path]
) -> None:
    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        folders.append(write(tmp_path / f"heads-{seed}", SMALL_VOCAB))
    asking = [request(f"r{index}", 30, 60, speculation=Speculation(method, 4)) for index in range(3)]

    def drafts(first: Path, *others: Path) -> list[tuple[int, int]]:
        learner = Learner(replace(config, heads=(first,)))
        for other in others:
            learner.give(other)
            learner.ask(request("other", max_tokens=1))
        answers = learner.ask(*asking)
        return [(answer.num_accepted, answer.num_rejected) for answer in answers.values()]

    assert drafts(folders[0], folders[2]) == drafts(folders[1], folders[0], folders[2])
    assert drafts(folders[0], folders[2]) != drafts(folders[0])


def test_heads_of_other_features_are_not_taken(learner: Learner, tmp_path: Path) -> None:
    folder = tiny_heads.write_eagle3(tmp_path / "eagle3", SMALL_VOCAB)
    with pytest.raises(ValueError, match="which the target does not record"):
        learner.give(folder)


def test_the_heads_that_speculation_names_learn(config: RunnerConfig, tmp_path: Path) -> None:
    heads = tuple(
        write(tmp_path / write.__name__, SMALL_VOCAB) for write in (tiny_heads.write_medusa, tiny_heads.write_hydra)
    )
    for speculation, folder in (("auto", heads[1]), ("medusa", heads[0]), ("hydra", heads[1])):
        links: list[ListeningLink] = []

        def make_link(
            begin: Begin, prepare: Callable[[bytes], Heads], links: list[ListeningLink] = links
        ) -> ListeningLink:
            links.append(ListeningLink(begin, prepare))
            return links[-1]

        ModelRunner.load(replace(config, heads=heads, speculation=speculation), make_link=make_link)  # type: ignore[arg-type]
        assert links[0].begin.heads == str(folder)


def test_the_memory_is_set_aside(config: RunnerConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ModelRunner.load(replace(config, learn_memory_gib=0.5), make_link=ListeningLink)
    assert "learning   812.0 MiB" in caplog.messages
    with pytest.raises(DoesNotFitError, match=r"next to 100000.3 GiB for training heads"):
        ModelRunner.load(replace(config, learn_memory_gib=100_000), make_link=ListeningLink)


def test_too_little_memory_is_refused_at_the_start(config: RunnerConfig) -> None:
    with pytest.raises(ValueError, match="but only 0 MiB are allowed"):
        ModelRunner.load(replace(config, learn_memory_gib=0.0001), make_link=ListeningLink)
