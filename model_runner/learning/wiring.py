"""What a runner with `learn` needs: which heads learn, and all that stands between them and their learner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from model_runner.config import RunnerConfig
from model_runner.learning.checkpoint import load_learnt
from model_runner.learning.learning import HeadsLearning
from model_runner.learning.link import LearnerLink
from model_runner.learning.messages import Begin, LearnedKind
from model_runner.learning.recorder import Recorder
from model_runner.memory import GIB
from model_runner.models.features import LAST
from model_runner.models.heads.base import Heads, TargetShape
from model_runner.models.repository import cache_folder
from model_runner.platforms.platform import Platform
from model_runner.speculative.heads import BY_WORTH, HeadsProposer, method_of

_THREADS = 1
_MEMORY_GIB = 0.5

MakeLink = Callable[[Begin, Callable[[bytes], Heads]], LearnerLink]
"""See ProcessLink."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The heads that learn."""

    kind: LearnedKind
    folder: Path | None = None
    """Of the heads to begin with; None for fresh ones."""

    @property
    def method(self) -> str:
        """What a request names them by."""
        return method_of(self.kind)


def choose_learned(config: RunnerConfig, heads: Sequence[Heads]) -> Learned:
    """Those that requests use which name no method; fresh Hydra heads where there are none at all.

    Args:
        config: names the folders of the heads.
        heads: all of them.

    Raises:
        ValueError: if there is no objective for heads of their kind.
    """
    of_methods = {method_of(one.kind): (folder, one.kind) for folder, one in zip(config.heads, heads, strict=True)}
    method = next((method for method in (config.speculation, *BY_WORTH) if method in of_methods), None)
    if method is None:
        return Learned("hydra")
    folder, kind = of_methods[method]
    for known in get_args(LearnedKind):
        if kind == known:
            return Learned(known, folder)
    raise ValueError(
        f"the heads in {folder} are of the kind {kind}, which cannot learn; leave out learn, or name heads of the "
        f"kinds {', '.join(get_args(LearnedKind))}"
    )


def learning_bytes(config: RunnerConfig) -> int:
    """Memory of the host that a learner takes; 0 without one."""
    return int((config.learn_memory_gib or _MEMORY_GIB) * GIB) if config.learn else 0


def make_learning(
    config: RunnerConfig, learned: Learned, proposer: HeadsProposer, target: TargetShape, platform: Platform,
    make_link: MakeLink,
) -> HeadsLearning:  # fmt: skip
    """Between the learner of these heads and the proposer that drafts with them."""

    def prepare(checkpoint: bytes) -> Heads:
        heads = load_learnt(checkpoint, target)
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
        memory=learning_bytes(config),
    )
    link = make_link(begin, prepare)
    return HeadsLearning(Recorder({*proposer.needs, LAST}, link.offer), link, proposer.replace_heads)
