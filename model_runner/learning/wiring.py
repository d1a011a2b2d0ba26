"""Sets up online training for a runner: chooses the heads to train, and connects them to a learner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_runner.config import RunnerConfig
from model_runner.features import Feature
from model_runner.heads.base import Heads, TargetShape
from model_runner.hub.repository import cache_folder
from model_runner.learning.learning import HeadsLearning
from model_runner.learning.link import Begin, ProcessLink
from model_runner.learning.plan import (
    FRESH_DEPTH,
    TRAINED_KINDS,
    check_model,
    fresh_shape,
    learning_needs,
    ring_bytes,
    training_bytes,
    weight_bytes,
)
from model_runner.learning.recorder import Recorder
from model_runner.learning.store import load_learnt
from model_runner.platforms.memory import GIB
from model_runner.platforms.platform import Platform
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.heads import BY_WORTH, HeadsProposer, HydraProposer, method_of
from model_runner.target import LoadedModel

_THREADS = 1
_RING_BYTES = GIB // 4
"""Default size of the ring."""
_SPARES = 3
"""Copies of new heads on the device at a time: in use, waiting, and in preparation."""
_PROCESS_BYTES = 300 << 20
"""Memory of a process that has only imported its modules: 284 MiB measured, private to it."""

MakeLink = Callable[[Begin, Callable[[bytes], Heads]], ProcessLink]
"""Connects to a learner; tests and benchmarks replace the process."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The heads that are trained."""

    kind: str
    folder: Path | None
    """Folder of the initial heads; None for fresh ones."""
    target: TargetShape
    """Shape of the target."""
    needs: tuple[Feature, ...]
    """Features that are recorded."""
    num_bytes: int
    """Host memory that training takes, on top of an idle process."""

    spare_bytes: int
    """Device memory that new heads take until they are in use."""

    @property
    def planned_bytes(self) -> int:
        """Host memory of the whole learner process."""
        return self.num_bytes + _PROCESS_BYTES

    @property
    def method(self) -> str:
        """The speculation method that uses these heads."""
        return method_of(self.kind)


def choose_learned(config: RunnerConfig, heads: Sequence[Heads], target: TargetShape) -> Learned:
    """The heads of the default method, or fresh Hydra heads if there are none.

    Args:
        config: has the folders of the heads.
        heads: all loaded heads.
        target: shape of the target.

    Raises:
        ValueError: if this kind of heads cannot be trained, or memory is too small for training.
    """
    of_methods = {method_of(one.kind): (folder, one) for folder, one in zip(config.heads, heads, strict=True)}
    method = next((method for method in (config.speculation, *BY_WORTH) if method in of_methods), None)
    folder, one = (None, None) if method is None else of_methods[method]
    kind = "hydra" if one is None else one.kind
    if kind not in TRAINED_KINDS:
        raise ValueError(
            f"the heads in {folder} are of the kind {kind}, which cannot be trained; remove --learn, or use heads of "
            f"the kinds {', '.join(TRAINED_KINDS)}"
        )
    like = one or fresh_shape(target)
    num_bytes = training_bytes(like, target) + _RING_BYTES
    if config.learn_memory_gib is not None:
        num_bytes = int(config.learn_memory_gib * GIB)
    ring_bytes(num_bytes, like, target)
    check_model(num_bytes, config.model)
    return Learned(kind, folder, target, learning_needs(like), num_bytes, _SPARES * weight_bytes(like))


def fresh_proposer(learned: Learned, model: LoadedModel) -> HeadsProposer:
    """A proposer for Hydra heads that do not exist yet."""
    return HydraProposer(None, model.get_input_embeddings(), GrowthLimits(FRESH_DEPTH), learned.needs)


def make_learning(
    config: RunnerConfig,
    learned: Learned,
    proposer: HeadsProposer,
    controller: SpeculationController,
    platform: Platform,
    make_link: MakeLink,
) -> HeadsLearning:
    """Connect the heads' learner, the proposer that drafts with them, and the controller that judges drafts."""

    def replace_heads(heads: Heads) -> None:
        proposer.replace_heads(heads)
        controller.stats[learned.method].forget_savings()

    def prepare(checkpoint: bytes) -> Heads:
        heads = load_learnt(checkpoint, learned.target)
        if missing := set(heads.needs) - proposer.needs:
            raise ValueError(f"they need {', '.join(sorted(missing))}, which the target does not record")
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
