"""The runner's interface to online training: it records computed tokens and replaces heads between steps."""

import logging
from collections.abc import Callable, Set
from typing import Any

from model_runner.contract import AdmittedRequest
from model_runner.features import Feature
from model_runner.learning.link import ProcessLink
from model_runner.learning.recorder import Recorder
from model_runner.platforms.memory import oom_reason
from model_runner.runner_interface import LearningStats
from model_runner.speculative.proposer import TargetStep

logger = logging.getLogger("samewise.learning")

ReplaceHeads = Callable[[Any], None]
"""Makes a proposer use other heads of its kind from its next draft on; they are already prepared. Cheap."""


class Learning:
    """Observes choices and steps, as proposers do. This one trains nothing."""

    needs: frozenset[Feature] = frozenset()
    """Hidden states of the target that training needs."""
    recorded: Set[int] = frozenset()
    """Slots of the choices that are being recorded."""

    def start(self) -> None:
        """Start the learner; called after warm-up."""

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        """A choice begins, or returns after preemption."""

    def observe(self, step: TargetStep) -> None:
        """Observe a finished step that recorded or drafting choices are in.

        Copies the required features, and replaces heads if there are new ones.
        """

    def end(self, slot: int) -> None:
        """The choice in the slot has ended or was preempted."""

    def stats(self) -> LearningStats | None:
        """Statistics of training; None if nothing is trained."""
        return None

    def close(self) -> None:
        """Stop training."""


NO_LEARNING = Learning()


class HeadsLearning(Learning):
    """Trains one method's heads, with a learner behind a link."""

    def __init__(self, recorder: Recorder, link: ProcessLink, replace_heads: ReplaceHeads) -> None:
        """The recorder must offer its pieces to the link."""
        self.needs, self.recorded = recorder.needs, recorder.slots
        self._recorder = recorder
        self._link = link
        self._replace_heads = replace_heads

    def start(self) -> None:
        self._link.start()

    def begin(self, slot: int, admitted: AdmittedRequest) -> None:
        if self._link.is_open:
            self._recorder.begin(slot, admitted)

    def observe(self, step: TargetStep) -> None:
        """Record the step. If memory runs out, the recordings are dropped and the step remains valid."""
        heads = self._link.take_heads()
        if heads is not None:
            self._replace_heads(heads)
        try:
            self._recorder.observe(step)
        except (MemoryError, RuntimeError) as error:
            logger.warning("Out of memory while recording training data, which was dropped: %s", oom_reason(error))
            self._recorder.forget()

    def end(self, slot: int) -> None:
        self._recorder.end(slot)

    def stats(self) -> LearningStats:
        return self._link.stats

    def close(self) -> None:
        self._link.close()
