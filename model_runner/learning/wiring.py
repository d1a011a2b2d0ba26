"""What a runner with `learn` needs: which heads learn, and all that stands between them and their learner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from transformers import PreTrainedModel

from model_runner.config import RunnerConfig
from model_runner.learning.learning import HeadsLearning
from model_runner.learning.link import Begin, LearnedKind, LearnerLink
from model_runner.learning.plan import (
    FRESH_DEPTH,
    check_model,
    learning_needs,
    ring_bytes,
    training_bytes,
    weight_bytes,
)
from model_runner.learning.recorder import Recorder
from model_runner.learning.store import load_learnt
from model_runner.models.features import Feature
from model_runner.models.heads.base import Heads, TargetShape
from model_runner.models.repository import cache_folder
from model_runner.platforms.memory import GIB
from model_runner.platforms.platform import Platform
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.heads import BY_WORTH, HeadsProposer, HydraProposer, method_of

_THREADS = 1
_RING_BYTES = GIB // 4
"""What is learnt from, where nothing is said."""
_SPARES = 3
"""Heads that come while others wait to be used, while others are in use that were not there at the start."""
_PROCESS_BYTES = 300 << 20
"""Of a process that has only imported what it needs: 284 MiB as measured, private to it."""

MakeLink = Callable[[Begin, Callable[[bytes], Heads]], LearnerLink]
"""See ProcessLink."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The heads that learn."""

    kind: LearnedKind
    folder: Path | None
    """Of the heads to begin with; None for fresh ones."""
    target: TargetShape
    """What they are for."""
    needs: tuple[Feature, ...]
    """What is recorded for them."""
    num_bytes: int
    """Memory of the host that learning takes, beside that of a process which has done nothing yet."""

    spare_bytes: int
    """Memory of the model's device that heads take on their way into use."""

    @property
    def planned_bytes(self) -> int:
        """All of it."""
        return self.num_bytes + _PROCESS_BYTES

    @property
    def method(self) -> str:
        """What a request names them by."""
        return method_of(self.kind)


def choose_learned(config: RunnerConfig, heads: Sequence[Heads], target: TargetShape) -> Learned:
    """Those that requests use which name no method; fresh Hydra heads where there are none at all.

    Args:
        config: names the folders of the heads.
        heads: all of them.
        target: what they are for.

    Raises:
        ValueError: if there is no objective for heads of their kind, or too little memory for their training.
    """
    of_methods = {method_of(one.kind): (folder, one) for folder, one in zip(config.heads, heads, strict=True)}
    method = next((method for method in (config.speculation, *BY_WORTH) if method in of_methods), None)
    folder, one = (None, None) if method is None else of_methods[method]
    kind = _learned_kind("hydra" if one is None else one.kind, folder)
    num_bytes = training_bytes(one, target) + _RING_BYTES
    if config.learn_memory_gib is not None:
        num_bytes = int(config.learn_memory_gib * GIB)
    ring_bytes(num_bytes, one, target)
    check_model(num_bytes, config.model)
    spare_bytes = _SPARES * weight_bytes(one, target)
    return Learned(kind, folder, target, learning_needs(one, target), num_bytes, spare_bytes)


def _learned_kind(kind: str, folder: Path | None) -> LearnedKind:
    for known in get_args(LearnedKind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(
        f"the heads in {folder} are of the kind {kind}, which cannot learn; leave out learn, or name heads of the "
        f"kinds {', '.join(get_args(LearnedKind))}"
    )


def fresh_proposer(learned: Learned, model: PreTrainedModel) -> HeadsProposer:
    """For Hydra heads that are still to be learnt."""
    return HydraProposer(None, model.get_input_embeddings(), GrowthLimits(FRESH_DEPTH), learned.needs)


def make_learning(
    config: RunnerConfig,
    learned: Learned,
    proposer: HeadsProposer,
    controller: SpeculationController,
    platform: Platform,
    make_link: MakeLink,
) -> HeadsLearning:
    """Between the learner of these heads, the proposer that drafts with them and the controller that judges them."""

    def replace_heads(heads: Heads) -> None:
        proposer.replace_heads(heads)
        controller.stats[learned.method].forget_savings()

    def prepare(checkpoint: bytes) -> Heads:
        heads = load_learnt(checkpoint, learned.target)
        if missing := set(heads.needs) - proposer.needs:
            raise ValueError(f"they take {', '.join(sorted(missing))}, which the target is not asked for")
        platform.prepare_heads(heads)
        return heads

    begin = Begin(
        model=str(config.model),
        kind=learned.kind,
        heads=None if learned.folder is None else str(learned.folder),
        cache=str(cache_folder()),
        threads=config.learn_threads or _THREADS,
        memory=learned.num_bytes,
    )
    link = make_link(begin, prepare)
    return HeadsLearning(Recorder(learned.needs, link.offer), link, replace_heads)
