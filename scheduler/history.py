"""The timeline of a choice in the engine: when it ran, in how many steps, and what delayed it.

All times are seconds on the clock of time.perf_counter, which all processes of one Linux machine share.

A step counts for a choice if it computed something for it. A step that ran out of memory counts for no choice.

Members of a group are counted together. A beam search has one history, reported for each of its choices; a choice with
guidance counts steps of either member. Prompt and output tokens are the choice's own.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class MethodDrafts:
    """Drafts that one speculation method made for a choice."""

    method: str
    accepted: int
    """Draft tokens that became output."""
    rejected: int
    """Draft tokens that were verified and rejected."""


@dataclass(frozen=True, slots=True)
class ChoiceHistory:
    """The history of one choice in one engine, up to `as_of`. A restarted engine begins a new history."""

    choice: int
    arrived_at: float
    """When the engine received the request. Preparation, such as compiling a grammar, counts as waiting."""
    as_of: float
    """Time of this snapshot, or of the end of the choice."""
    has_ended: bool
    prompt_tokens: int
    admitted_at: float | None = None
    """When it first left the queue."""
    first_token_at: float | None = None
    """When the prompt was computed and this engine's first token came. None for pooling and before that time."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    output_tokens: int = 0
    """Tokens this engine generated. For a running beam search: the tokens that all beams share."""
    steps: int = 0
    prefill_steps: int = 0
    """Steps that computed known tokens, from an admission to the first token after it."""
    preemptions: int = 0
    """How often it was preempted and went back to the queue."""
    waited_again_s: float = 0.0
    """Seconds spent in the queue after preemptions."""
    is_waiting: bool = False
    """Whether it is in the queue now, for the first time or again."""
    drafts: tuple[MethodDrafts, ...] = ()
    """By speculation method. Methods without drafts are omitted."""

    @property
    def queue_s(self) -> float:
        """Seconds until the first admission. `queue_s`, `prefill_s` and `decode_s` add up to the time since arrival."""
        return (self.as_of if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first admission to the first token, or to `as_of` if none came. None before admission."""
        if self.admitted_at is None:
            return None
        return (self.as_of if self.first_token_at is None else self.first_token_at) - self.admitted_at

    @property
    def decode_s(self) -> float | None:
        """Seconds since the first token. None before it."""
        return None if self.first_token_at is None else self.as_of - self.first_token_at

    def until(self, moment: float) -> "ChoiceHistory":
        """A copy whose times end at `moment`. Counts are unchanged."""
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
    """Counters of a live choice, shared by all members of a group."""

    arrived_at: float
    num_prompt: int
    num_before: int = 0
    """Number of output tokens it arrived with."""
    steps: int = 0
    last_step: int = 0
    """Number of the last step counted. A step counts once, even if it computes several members."""
    is_prefilling: bool = True
    """Whether no token has come yet since the last admission."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    prefill_steps: int = 0
    """Steps of completed prefills."""
    prefill_began: int = 0
    """Value of `steps` when the current prefill began."""
    preemptions: int = 0
    waiting_since: float | None = None
    """When it last went back to the queue; None while it runs."""
    waited_again_s: float = 0.0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(accepted, rejected) by method."""

    def note_step(self, number: int) -> None:
        """Count step `number`, which computed something for this choice or another member of its group."""
        if self.last_step != number:
            self.last_step = number
            self.steps += 1

    def note_admission(self, now: float, num_cached: int) -> None:
        """Record that it left the queue. `num_cached` counts only at the first admission."""
        if self.admitted_at is None:
            self.admitted_at = now
            self.num_cached = num_cached
        if self.waiting_since is not None:
            self.waited_again_s += now - self.waiting_since
            self.waiting_since = None

    def note_preemption(self, now: float) -> None:
        """Record that it went back to the queue and must recompute its tokens."""
        self.preemptions += 1
        self.waiting_since = now
        self._end_prefill()
        self.prefill_began = self.steps
        self.is_prefilling = True

    def note_token(self, now: float) -> None:
        """Record that the last counted step brought the first token since the last admission."""
        self._end_prefill()
        self.is_prefilling = False
        if self.first_token_at is None:
            self.first_token_at = now

    def note_drafts(self, method: str, accepted: int, rejected: int) -> None:
        """Add the draft tokens that one step verified."""
        before = self.drafts.get(method, (0, 0))
        self.drafts[method] = before[0] + accepted, before[1] + rejected

    def history(self, choice: int, num_output: int, now: float, *, has_ended: bool = False) -> ChoiceHistory:
        """A snapshot for the choice with this index and number of output tokens."""
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
