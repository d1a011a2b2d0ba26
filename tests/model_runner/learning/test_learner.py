"""A learner with traffic on a tiny target."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_runner.features import LAST
from model_runner.heads.base import Heads, TargetShape
from model_runner.heads.eagle3 import Eagle3Heads
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.learning import learner as module
from model_runner.learning.learner import Learner, Ring, Trainee, judge
from model_runner.learning.link import NewHeads
from model_runner.learning.store import Stored, load_learnt, pack_learnt
from model_runner.training.eagle3 import draft_layer_config, fresh_eagle3
from model_runner.training.hydra import fresh_hydra
from model_runner.training.objectives import fresh_medusa, objective_of
from model_runner.training.teacher import TargetWeights
from tests.model_runner.learning.traffic import FEATURE, PIECE, pieces

SUBJECT = list(range(10, 50))
OTHER = list(range(200, 240))


class Store:
    """Serialises heads, and stores none."""

    def __init__(self, target: TargetShape, learnt: Heads | None = None, version: int = 0) -> None:
        self.target = target
        self.learnt = learnt
        self.last_version = version

    def read(self) -> Stored | None:
        return None if self.learnt is None else Stored(self.last_version, b"", self.learnt)

    def write(self, version: int, checkpoint: bytes) -> bool:
        return False

    def pack(self, heads: Heads, version: int) -> bytes:
        return pack_learnt(heads, version, "tiny", self.target.num_layers)

    def load(self, checkpoint: bytes) -> Heads:
        return load_learnt(checkpoint, self.target)


class Clock:
    """Every look at it is so much later."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path]) -> TargetWeights:
    return TargetWeights.load(tiny_model("llama"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny heads learn quickly; none of the rest depends on how quickly."""
    monkeypatch.setattr(module, "LEARNING_RATE", 5e-3)
    monkeypatch.setattr(module, "BATCH_ROWS", 256)


def make(target: TargetWeights, first: Heads | None, learnt: Heads | None = None, version: int = 0) -> Learner:
    clock = Clock(module.PUBLISH_EVERY_S)
    return Learner(target, first, Store(target.shape, learnt, version), Ring(1 << 22), clock=clock)


def teach(
    learner: Learner, target: TargetWeights, subject: Sequence[int], rounds: int, seed: int = 0, **how: bool
) -> list[NewHeads]:
    """Rounds of eight pieces, with all the steps that they are good for."""
    published = []
    for number in range(rounds):
        learner.take(pieces(target, subject, 8, 1000 * seed + number, **how))
        while learner.has_work:
            learner.train()
        publication = learner.decide()
        if publication is not None:
            published.append(publication)
    return published


def accepted(heads: Heads, target: TargetWeights, subject: Sequence[int]) -> float:
    """Tokens per step on pieces that nobody has seen."""
    objective = objective_of(heads, target, torch.float32)
    tallies = judge(objective, pieces(target, subject, 20, 99_999), 3)
    return 1 + sum(one.accepted for one in tallies) / sum(one.rows for one in tallies)


def given(target: TargetWeights, kind: str = "hydra", ids: Sequence[int] = range(100)) -> Heads:
    """Fresh heads with a small vocabulary."""
    torch.manual_seed(0)
    draft_ids = torch.tensor(ids)
    if kind == "medusa":
        return fresh_medusa(target, draft_ids, 3, 1)
    if kind == "eagle3":
        raise AssertionError("made where the model's folder is known")
    return fresh_hydra(target, draft_ids, 3, 1, (FEATURE,), pieces(target, SUBJECT, 4, 5))


def exported(trainee: Trainee) -> Heads:
    """The heads that it would publish."""
    with trainee.candidate() as objective:
        return objective.export()


def test_fresh_heads_learn_what_can_be_foreseen(target: TargetWeights) -> None:
    learner = make(target, None)
    published = teach(learner, target, SUBJECT, 16)
    assert published
    assert learner.version == published[-1].version == len(published) == learner.published
    assert learner.first == 1.0
    assert accepted(load_learnt(published[-1].checkpoint, target.shape), target, SUBJECT) > 2.0
    assert learner.current is not None
    assert learner.current > 1.2


def test_what_cannot_be_foreseen_is_not_learnt(target: TargetWeights) -> None:
    """Randomly drawn tokens can be memorised in training; later tokens show that nothing general was learnt."""
    tokens = range(target.shape.vocab_size)
    learner = make(target, given(target, ids=tokens))
    teach(learner, target, tokens, 6, is_random=True)
    assert learner.current is not None
    chance = 1 / len(tokens)
    limit = 2 * chance + 4 * math.sqrt(chance / learner.tokens)
    assert learner.current < 1 + limit
    assert learner._candidate.mean < limit
    assert learner._trainee is not None
    with learner._trainee.candidate() as objective:
        tallies = judge(objective, learner._ring.newest(10_000), 3)
    assert sum(one.accepted for one in tallies) / sum(one.rows for one in tallies) > 2 * limit


@pytest.mark.parametrize("kind", ["hydra", "medusa", "eagle3"])
def test_every_kind_goes_on_from_its_heads(target: TargetWeights, tiny_model: Callable[[str], Path], kind: str) -> None:
    """Before the first step the candidate guesses as the heads that it was given do; then it gets better."""
    if kind == "eagle3":
        torch.manual_seed(0)
        config = draft_layer_config(tiny_model("llama"))
        heads: Heads = fresh_eagle3(target, torch.arange(100), (FEATURE, FEATURE, FEATURE), config)
    else:
        heads = given(target, kind)
    heads = Store(target.shape).load(Store(target.shape).pack(heads, 1))  # as from a file
    sample = pieces(target, SUBJECT, 12, 3)
    candidate = Trainee(heads, target, torch.float32, sample)
    plain = objective_of(heads, target, torch.float32)
    with candidate.candidate() as objective:
        assert torch.equal(objective.ranks(sample), plain.ranks(sample))
        torch.testing.assert_close(objective.loss(sample), plain.loss(sample))
        content = objective.export().state_dict()
    for name, tensor in plain.export().state_dict().items():
        torch.testing.assert_close(content[name], tensor)
    before = float(plain.loss(sample).detach())
    for _ in range(15):
        assert candidate.step(sample[:4])
    with candidate.candidate() as objective:
        assert float(objective.loss(sample[:4]).detach()) < 0.95 * before
        assert torch.equal(objective.ranks(sample) < 0, plain.ranks(sample) < 0)
    assert float(plain.loss(sample).detach()) == before  # the given heads are left as they were


def test_a_step_of_no_length_changes_nothing(target: TargetWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEARNING_RATE", 0.0)
    heads = given(target)
    candidate = Trainee(heads, target, torch.float32, pieces(target, SUBJECT, 12, 3))
    candidate.step(pieces(target, SUBJECT, 4, 4))
    for name, tensor in exported(candidate).state_dict().items():
        torch.testing.assert_close(heads.state_dict()[name], tensor)


def test_the_candidate_is_the_mean_of_where_the_steps_led(
    target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AVERAGED", 0.75)
    heads = given(target, "medusa")  # whose inputs are not scaled in training
    candidate = Trainee(heads, target, torch.float32, pieces(target, SUBJECT, 12, 3))
    mean = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    for step in range(1, 7):
        candidate.step(pieces(target, SUBJECT, 2, step))
        for name, tensor in candidate._heads.state_dict().items():
            mean[name] += (tensor - mean[name]) * max(0.25, 1 / (step + 1))
    content = exported(candidate).state_dict()
    for name, tensor in mean.items():
        torch.testing.assert_close(content[name], tensor)
    assert not torch.equal(candidate._heads.state_dict()["lm_head.weight"], content["lm_head.weight"])


def test_the_candidate_is_judged_at_the_same_places_as_others(target: TargetWeights) -> None:
    """In training Hydra's heads see only places that drafts reach; a comparison counts all."""
    learner = make(target, None)
    teach(learner, target, SUBJECT, 2)
    assert learner._trainee is not None
    fresh = pieces(target, SUBJECT, 4, 555)
    with learner._trainee.candidate() as objective:
        rows = [one.rows for one in judge(objective, fresh, 3)]
    assert rows == [one.rows for one in judge(None, fresh, 3)]


def test_what_was_learnt_is_lost_for_something_worse_only_for_a_while(target: TargetWeights) -> None:
    """Heads that are bad on purpose are in use: the first ones come back, and training goes on from them."""
    first = teach(make(target, None), target, SUBJECT, 16)[-1]
    good = load_learnt(first.checkpoint, target.shape)
    bad = load_learnt(first.checkpoint, target.shape)
    assert isinstance(bad, HydraHeads)
    with torch.no_grad():
        for parameter in bad.parameters():
            parameter.normal_()
    learner = make(target, good, bad, version=7)
    learner.take(pieces(target, SUBJECT, 12, 77))
    publication = learner.decide()
    assert publication is not None
    assert publication.version == 8
    assert learner.rolled_back == 1
    restored = load_learnt(publication.checkpoint, target.shape).state_dict()
    for name, tensor in good.state_dict().items():
        torch.testing.assert_close(restored[name], tensor, rtol=2**-7, atol=0)
    learner.take(pieces(target, SUBJECT, 12, 78))
    assert learner.decide() is None
    assert learner.rolled_back == 1


def test_a_candidate_that_gets_worse_begins_again(target: TargetWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    first = teach(make(target, None), target, SUBJECT, 16)[-1]
    monkeypatch.setattr(module, "LEARNING_RATE", 5.0)
    learner = make(target, load_learnt(first.checkpoint, target.shape))
    assert teach(learner, target, SUBJECT, 6) == []
    monkeypatch.setattr(module, "LEARNING_RATE", 0.0)
    assert teach(learner, target, SUBJECT, 3, seed=2) == []
    assert learner._candidate.mean == 0.0
    assert learner.published == learner.rolled_back == 0


def test_numbers_out_of_range_are_never_published(
    target: TargetWeights, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make(target, given(target))
    monkeypatch.setattr(module, "LEARNING_RATE", 1e30)
    assert teach(learner, target, SUBJECT, 4) == []
    assert "no longer finite" in caplog.text
    assert learner.decide(is_last=True) is None
    monkeypatch.setattr(module, "LEARNING_RATE", 5e-3)
    for one in teach(learner, target, SUBJECT, 12, seed=1):
        heads = load_learnt(one.checkpoint, target.shape)
        assert all(tensor.isfinite().all() for tensor in heads.state_dict().values())
    assert learner.published


def test_pieces_without_numbers_are_left_out(target: TargetWeights) -> None:
    learner = make(target, given(target))
    broken = pieces(target, SUBJECT, 8, 1)
    for one in broken[:3]:
        one.features[LAST][5, 5] = float("nan")
    learner.take(broken)
    assert learner.tokens == learner.held == sum(one.num_answer for one in broken[3:])


def test_publications_keep_a_distance_but_for_the_last(target: TargetWeights) -> None:
    clock = Clock()
    learner = Learner(target, None, Store(target.shape), Ring(1 << 22), clock=clock)
    assert teach(learner, target, SUBJECT, 12) == []
    clock.now = module.PUBLISH_EVERY_S
    first = learner.decide()
    assert first is not None
    assert teach(learner, target, OTHER, 12) == []
    last = learner.decide(is_last=True)
    assert last is not None
    assert last.version == 2


def test_the_vocabulary_follows_the_subject(target: TargetWeights) -> None:
    """Heads that cannot name a token of the new subject get them as rows of the target's own head, and learn."""
    learner = make(target, given(target, ids=range(60)))
    assert teach(learner, target, SUBJECT, 8)
    published = teach(learner, target, OTHER, 24, seed=1)
    assert published
    heads = load_learnt(published[-1].checkpoint, target.shape)
    assert heads.draft_ids is not None
    assert set(OTHER) <= set(heads.draft_ids.tolist())
    assert len(set(heads.draft_ids.tolist())) == 60
    assert accepted(heads, target, OTHER) > 1.8


def test_new_rows_begin_as_training_left_the_others(target: TargetWeights) -> None:
    heads = given(target, ids=range(200))
    assert isinstance(heads, HydraHeads)
    with torch.no_grad():
        heads.get_parameter("hydra_lm_head.weight").mul_(0.5)
    candidate = Trainee(heads, target, torch.float32, pieces(target, SUBJECT, 12, 3))
    counts = module.TokenFrequencies(target.shape.vocab_size)
    counts.add(torch.tensor(OTHER * 9 + SUBJECT * 9))
    assert candidate.follow(counts) == len(OTHER)
    followed = exported(candidate)
    assert isinstance(followed, HydraHeads)
    assert followed.draft_ids is not None
    new = torch.isin(followed.draft_ids, torch.tensor(OTHER))
    head = followed.hydra_lm_head.weight
    assert isinstance(head, torch.Tensor)
    assert torch.equal(head[~new], 0.5 * target.head[followed.draft_ids[~new]])
    assert (head[new] - 0.5 * target.head[followed.draft_ids[new]]).norm() < 0.25 * head[new].norm()
    assert candidate.step(pieces(target, OTHER, 4, 4))
    assert candidate.follow(counts) == 0


def test_heads_over_the_whole_vocabulary_keep_it(target: TargetWeights) -> None:
    shape = HydraShape(target.shape.hidden, 3, 1, target.shape.vocab_size, shared_head=True, features=(FEATURE,))
    candidate = Trainee(HydraHeads(shape), target, torch.float32, pieces(target, SUBJECT, 12, 3))
    counts = module.TokenFrequencies(target.shape.vocab_size)
    counts.add(torch.tensor(OTHER * 9))
    assert candidate.follow(counts) == 0
    assert candidate.step(pieces(target, SUBJECT, 4, 4))
    assert exported(candidate).draft_ids is None


def test_eagle_heads_take_their_own_embedding_and_the_positions(
    target: TargetWeights, tiny_model: Callable[[str], Path]
) -> None:
    config = draft_layer_config(tiny_model("llama"))
    heads = fresh_eagle3(target, torch.arange(100), (FEATURE, FEATURE, FEATURE), config)
    sample = pieces(target, SUBJECT, 3, 3)
    seen: list[torch.Tensor] = []
    heads.rotary.register_forward_pre_hook(lambda rotary, arguments: seen.append(arguments[0]))
    plain = objective_of(heads, target, torch.float32)
    plain.ranks([replace(sample[0], start=500)])
    assert seen[0].tolist() == list(range(500, 500 + PIECE - 1))
    assert isinstance(heads, Eagle3Heads)
    heads.embed_tokens = torch.nn.Embedding(target.shape.vocab_size, target.shape.hidden)
    candidate = Trainee(heads, target, torch.float32, sample)
    candidate.step(sample)
    trained = exported(candidate)
    assert isinstance(trained, Eagle3Heads)
    assert trained.embed_tokens is not None
    assert torch.equal(trained.embed_tokens.weight, heads.embed_tokens.weight)
