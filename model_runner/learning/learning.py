"""What the runner has to do with learning: it records what it computes, and changes heads between steps."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from model_runner.contract import AdmittedRequest
from model_runner.learning.link import LearnerLink
from model_runner.learning.recorder import Recorder
from model_runner.models.features import Feature
from model_runner.platforms.memory import oom_reason
from model_runner.runner_interface import LearningStats
from model_runner.speculative.proposer import TargetStep

logger = logging.getLogger("samewise.learning")

ReplaceHeads = Callable[[Any], None]
"""Has a proposer use other heads of its kind from its next draft on; they are in the platform's form already. Cheap."""


class Learning(Protocol):
    """Told of choices as proposers are."""

    needs: frozenset[Feature]
    """What the target has to tell of the tokens that it computes."""

    def start(self) -> None:
        """Called when the model is warmed up."""
        ...

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        """A choice begins, or begins again after preemption."""
        ...

    def has(self, slot: int) -> bool:
        """Whether it looks at what the target computes for the choice in this slot."""
        ...

    def observe(self, step: TargetStep) -> None:
        """A step is over. Its features are copied where they are wanted, and heads are changed if there are others."""
        ...

    def end(self, slot: int) -> None:
        """The choice in the slot has ended or was preempted."""
        ...

    def stats(self) -> LearningStats | None:
        """What came of it; None where nothing is learnt."""
        ...

    def close(self) -> None:
        """Nothing is learnt any more."""
        ...


class NoLearning:
    """Implements Learning where nothing is learnt."""

    needs: frozenset[Feature] = frozenset()

    def start(self) -> None:
        """See Learning."""

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        """See Learning."""

    def has(self, slot: int) -> bool:
        """See Learning."""
        return False

    def observe(self, step: TargetStep) -> None:
        """See Learning."""

    def end(self, slot: int) -> None:
        """See Learning."""

    def stats(self) -> LearningStats | None:
        """See Learning."""
        return None

    def close(self) -> None:
        """See Learning."""


class HeadsLearning:
    """Implements Learning for one method's heads and a learner elsewhere."""

    def __init__(self, recorder: Recorder, link: LearnerLink, replace_heads: ReplaceHeads) -> None:
        """The recorder offers its pieces to the link."""
        self.needs = recorder.needs
        self._recorder = recorder
        self._link = link
        self._replace_heads = replace_heads

    def start(self) -> None:
        """See Learning."""
        self._link.start()

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        """See Learning."""
        if self._link.is_open:
            self._recorder.begin(slot, admitted)

    def has(self, slot: int) -> bool:
        """See Learning."""
        return self._recorder.has(slot)

    def observe(self, step: TargetStep) -> None:
        """See Learning. Where memory runs out, what was recorded is dropped: the step stands."""
        heads = self._link.take_heads()
        if heads is not None:
            self._replace_heads(heads)
        try:
            self._recorder.observe(step)
        except (MemoryError, RuntimeError) as error:
            logger.warning("Out of memory while recording: %s", oom_reason(error))
            self._recorder.forget()

    def end(self, slot: int) -> None:
        """See Learning."""
        self._recorder.end(slot)

    def stats(self) -> LearningStats:
        """See Learning."""
        report = self._link.report
        if report is None:
            return LearningStats(pieces_dropped=self._link.num_dropped)
        return LearningStats(
            tokens=report.tokens,
            pieces_dropped=self._link.num_dropped,
            steps=report.steps,
            publications=report.published,
            rollbacks=report.rolled_back,
            tokens_per_step_first=report.first,
            tokens_per_step_current=report.current,
        )

    def close(self) -> None:
        """See Learning."""
        self._link.close()


NO_LEARNING = NoLearning()
