"""What became of a choice in the engine: when, in how many steps, and what held it up.

All times are seconds on the clock of time.perf_counter, which on Linux the processes of one machine share.

A step counts for a choice if it computed something for it. One for which memory ran out brought nobody anything, so it
counts for nobody; whoever had to make room for it was preempted.

Those who go on together are counted together: a beam search has one history, which each of its choices tells, and the
steps of a choice with a guide are those of either. Tokens of the prompt and of the output are the choice's own.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class MethodDrafts:
    """What one method of speculation drafted for a choice."""

    method: str
    accepted: int
    """Draft tokens that became output, and ..."""
    rejected: int
    """... those that were verified and did not."""


@dataclass(frozen=True, slots=True)
class ChoiceHistory:
    """One choice in one engine, up to a moment. After a restart of the engine, the next one begins another history."""

    choice: int
    arrived_at: float
    """The engine had the request. What has to be prepared for it, such as a grammar, is part of waiting."""
    as_of: float
    """When this was so: the choice's end, if it has ended."""
    has_ended: bool
    prompt_tokens: int
    admitted_at: float | None = None
    """It left the queue, for the first time."""
    first_token_at: float | None = None
    """The prompt was computed, which brought the first token of this engine. None where other things are asked for."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache at the first admission."""
    output_tokens: int = 0
    """That this engine generated. A search that runs has those that all of its beams share."""
    steps: int = 0
    prefill_steps: int = 0
    """Those of them, each with a chunk of known tokens, from an admission to the first token after it."""
    preemptions: int = 0
    """Times that it went back into the queue, to make room, and ..."""
    waited_again_s: float = 0.0
    """... the time that it spent there."""
    is_waiting: bool = False
    """Whether it is in the queue, for the first time or again."""
    drafts: tuple[MethodDrafts, ...] = ()
    """By method; those that drafted nothing for it are left out."""

    @property
    def queue_s(self) -> float:
        """Until it was first admitted. With the next two, this is all the time since it arrived."""
        return (self.as_of if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def prefill_s(self) -> float | None:
        """From there to the first token, or on, where none came; None before it."""
        if self.admitted_at is None:
            return None
        return (self.as_of if self.first_token_at is None else self.first_token_at) - self.admitted_at

    @property
    def decode_s(self) -> float | None:
        """From the first token on; None before it."""
        return None if self.first_token_at is None else self.as_of - self.first_token_at

    def until(self, moment: float) -> "ChoiceHistory":
        """The same with times up to this moment. What was counted after it stays counted."""
        if moment >= self.as_of:
            return self
        admitted_at, first_token_at = (
            None if at is None or at > moment else at for at in (self.admitted_at, self.first_token_at)
        )
        return replace(
            self,
            arrived_at=min(self.arrived_at, moment),
            as_of=moment,
            admitted_at=admitted_at,
            first_token_at=first_token_at,
        )


@dataclass(slots=True, eq=False)
class Progress:
    """What is counted of a choice while it lives; members of a group have one together."""

    arrived_at: float
    num_prompt: int
    num_before: int = 0
    """Tokens of output that it came with."""
    steps: int = 0
    last_step: int = 0
    """The number of the one that was counted last: each counts once, whatever number of members it computes for."""
    is_prefilling: bool = True
    """Whether a token has yet to come since it was admitted last."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    prefill_steps: int = 0
    """Of prefills that are over."""
    prefill_began: int = 0
    """Steps before the last one."""
    preemptions: int = 0
    waiting_since: float | None = None
    """In the queue again."""
    waited_again_s: float = 0.0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Accepted and rejected, by method."""

    def note_step(self, number: int) -> None:
        """The step of this number has computed something for it, or for another member of its group."""
        if self.last_step != number:
            self.last_step = number
            self.steps += 1

    def note_admission(self, now: float, num_cached: int) -> None:
        """It leaves the queue; so many tokens of its prompt were found in the prefix cache when it first did."""
        if self.admitted_at is None:
            self.admitted_at = now
            self.num_cached = num_cached
        if self.waiting_since is not None:
            self.waited_again_s += now - self.waiting_since
            self.waiting_since = None

    def note_preemption(self, now: float) -> None:
        """It goes back into the queue, and computes what it had again."""
        self.preemptions += 1
        self.waiting_since = now
        self._end_prefill()
        self.prefill_began = self.steps
        self.is_prefilling = True

    def note_token(self, now: float) -> None:
        """The step that is counted last brought the first token since the last admission."""
        self._end_prefill()
        self.is_prefilling = False
        if self.first_token_at is None:
            self.first_token_at = now

    def note_drafts(self, method: str, accepted: int, rejected: int) -> None:
        """So many draft tokens of this method were verified in a step."""
        before = self.drafts.get(method, (0, 0))
        self.drafts[method] = before[0] + accepted, before[1] + rejected

    def history(self, choice: int, num_output: int, now: float, *, has_ended: bool = False) -> ChoiceHistory:
        """As it stands, of the choice of this index, whose output has so many tokens."""
        waiting_s = 0.0 if self.waiting_since is None else now - self.waiting_since
        return ChoiceHistory(
            choice=choice,
            arrived_at=self.arrived_at,
            as_of=now,
            has_ended=has_ended,
            prompt_tokens=self.num_prompt,
            admitted_at=self.admitted_at,
            first_token_at=self.first_token_at,
            cached_tokens=self.num_cached,
            output_tokens=num_output - self.num_before,
            steps=self.steps,
            prefill_steps=self.prefill_steps + self._num_prefilling,
            preemptions=self.preemptions,
            waited_again_s=self.waited_again_s + waiting_s,
            is_waiting=not has_ended and (self.admitted_at is None or self.waiting_since is not None),
            drafts=tuple(MethodDrafts(method, *counts) for method, counts in self.drafts.items()),
        )

    @property
    def _num_prefilling(self) -> int:
        return self.steps - self.prefill_began if self.is_prefilling else 0

    def _end_prefill(self) -> None:
        self.prefill_steps += self._num_prefilling
