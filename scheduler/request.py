"""One choice of a request while it is live in the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from model_runner.contract import (
    ChoiceResult,
    Failure,
    SamplingParams,
    ScheduledRequest,
    Speculation,
    TokenLogprobs,
)
from model_runner.image import Image
from model_runner.shared_list import SharedList
from scheduler.interface import (
    BACKGROUND,
    ChoiceHistory,
    ChoiceState,
    EngineRequest,
    FinishReason,
    MethodDrafts,
    RequestOutput,
)
from scheduler.prefix_cache import BlockChain


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


class Group(Protocol):
    """Requests that are admitted, computed and preempted together. The first one represents them in the queue."""

    members: list["Request"]
    """Members that are live now."""
    width: int
    """The largest number of members at any time. This many slots are reserved while the group runs."""


@dataclass(slots=True, eq=False)
class Request:
    """A choice: its parameters, its progress, and the KV blocks it holds while it runs.

        tokens   | prompt ......................... | output ........ |
                 0          num_computed        num_prompt       len(tokens)
        blocks   |  KV is there  |  room, filled by later steps  |

    Each step computes some of the tokens between `num_computed` and `len(tokens)`.
    """

    key: str
    """Unique among live choices."""
    request_id: str
    arrival: int
    """Position in the arrival order. Preemption does not change it."""
    sampling: SamplingParams
    max_tokens: int
    priority: int
    tier: int
    client: str
    weight: float
    cache_salt: str
    tokens: list[int] | SharedList[int]
    """A SharedList once the choice was forked, because beams are forked repeatedly."""
    num_prompt: int
    chain: BlockChain
    progress: Progress
    """Shared by all members of a group."""
    speculation: Speculation | None = None
    learn: bool = True
    images: tuple[Image, ...] = ()
    num_computed: int = 0
    """Number of leading tokens whose KV is in the blocks. Less than len(tokens) between steps."""
    blocks: list[int] = field(default_factory=list)
    group_blocks: list[dict[int, int]] = field(default_factory=list)
    """For each cache group, the blocks it holds by index, in ascending order."""
    num_state_blocks: int = 0
    """Number of leading blocks whose effect is in the newest page of recurrent states."""
    cached_blocks_at_admission: int = 0
    """Number of leading blocks that the prefix cache had at admission, whether other cache groups could follow."""
    num_published: int = 0
    """Number of leading blocks already offered to the prefix cache."""
    num_pages_published: int = 0
    """Number of leading blocks whose recurrent states were already offered to the prefix cache."""
    num_cached: int | None = None
    """Number of prompt tokens found in the prefix cache; None until the first admission."""
    num_written: int = 0
    """Number of prompt tokens this choice added to the prefix cache, counting only blocks the same prompt would look
    up."""
    num_draft: int = 0
    """Number of draft tokens the runner proposes to verify in the next step."""
    num_candidates: int = 0
    """Number of contrastive-search candidates the next step must compute together with the last known token."""
    sampler_state: float | None = None
    """Sampler state the runner reported with the last token; sent back when the choice is admitted again."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Collected over prompt chunks, and returned with the first output."""
    spans: tuple[tuple[int, int], ...] = ()
    """Places that one step must compute together, as (first, end): the rows of each image, if they see each other."""
    features_from: int | None = None
    """Features of images with rows at this place or later are held for it; None if none are."""
    group: "Group | None" = None
    """The group this choice is a member of, if any."""
    guides: str | None = None
    """If this request is a guide: the key of the request it guides. A guide is not a choice itself."""
    chosen: int | None = None
    """The last token, if the runner does not have it yet."""
    decode_share: ScheduledRequest = field(init=False)
    """Reused for every plain decoding step (one token, no new block), to avoid an allocation."""
    forked_from: "Request | None" = None
    """The running member to fork from in the next step. It shares all tokens except the last."""

    def __post_init__(self) -> None:
        self.decode_share = ScheduledRequest(self.key, 1, ())

    @property
    def members(self) -> Sequence["Request"]:
        """All members of its group, or just itself."""
        return (self,) if self.group is None else self.group.members

    @property
    def is_background(self) -> bool:
        """Whether it is scheduled only when other work leaves room."""
        return self.tier >= BACKGROUND

    @property
    def remaining(self) -> int:
        """Number of known tokens still to compute; 1 when decoding."""
        return len(self.tokens) - self.num_computed

    def images_from(self, place: int) -> tuple[Image, ...]:
        """The images with rows at this place or later."""
        return tuple(image for image in self.images if image.end > place)

    def whole(self, start: int, num_tokens: int) -> int:
        """How many tokens from `start` on, at most this many, a step can compute without cutting a span."""
        end = start + num_tokens
        return next((max(first - start, 0) for first, last in self.spans if first < end < last), num_tokens)

    def is_cut(self, place: int) -> bool:
        """Whether a span has places before and from this one on."""
        return any(first < place < end for first, end in self.spans)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def needs_every_position(self) -> bool:
        """Whether this choice must compute every position itself, so that cached KV is not enough."""
        pooling = self.sampling.pooling
        needs_every_token = pooling is not None and pooling.needs_every_token
        return needs_every_token or self.wants_prompt_logprobs or self.sampling.num_candidates > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be returned, which requires computing every prompt position."""
        return self.sampling.prompt_logprobs is not None

    @property
    def only_decodes(self) -> bool:
        """Whether its next step computes only its last token, alone."""
        return (
            len(self.tokens) - self.num_computed == 1
            and self.group is None
            and not self.num_candidates
            and self.forked_from is None
        )

    def history(self, now: float, *, has_ended: bool = False) -> ChoiceHistory:
        """Its history up to now."""
        return self.progress.history(self.sampling.choice, self.num_output, now, has_ended=has_ended)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the collected prompt logprobs once; recomputing the prompt later does not collect them again."""
        if not self.wants_prompt_logprobs:
            return ()
        taken = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        self.sampling = replace(self.sampling, prompt_logprobs=None)
        return taken

    def reset_progress(self) -> None:
        """Reset all progress after the blocks were released."""
        self.num_computed = 0
        self.num_state_blocks = 0
        self.num_published = 0
        self.num_pages_published = 0
        self.clear_proposals()
        self.blocks = []
        self.group_blocks = []
        self.prompt_logprobs.clear()
        self.chosen = None
        self.forked_from = None

    def clear_proposals(self) -> None:
        """Discard the drafts and candidates of the next step."""
        self.num_draft = 0
        self.num_candidates = 0

    def take_chosen(self) -> int | None:
        """The token the runner does not have yet, returned once."""
        chosen, self.chosen = self.chosen, None
        return chosen

    def fork(self, key: str, token: int) -> "Request":
        """Add a member to the group that shares all computed tokens and continues with `token`."""
        if not isinstance(self.tokens, SharedList):
            self.tokens = SharedList(self.tokens)
        return replace(
            self,
            key=key,
            tokens=self.tokens.fork(self.num_computed).appended(token),
            chain=self.chain.fork(),
            features_from=None,
            blocks=[],
            group_blocks=[],
            prompt_logprobs=[],
            chosen=None,
            forked_from=self,
        )


def make_choices(
    request: EngineRequest, first_arrival: int, arrived_at: float, block_size: int, *, sees_images: bool = False
) -> list[Request]:
    """Make one Request per choice. Only choice 0 returns prompt logprobs, and only if it has no output yet."""
    spans = tuple((image.start, image.end) for image in request.images) if sees_images else ()
    return [
        Request(
            key=f"{request.request_id}/{choice.index}",
            request_id=request.request_id,
            arrival=first_arrival + offset,
            sampling=_sampling_of(request, choice),
            max_tokens=request.max_tokens,
            priority=request.priority,
            tier=request.tier,
            client=request.client,
            weight=request.weight,
            cache_salt=request.cache_salt,
            tokens=[*request.prompt, *choice.output],
            num_prompt=len(request.prompt),
            chain=chain_of(request.cache_salt, request.sampling, block_size, request.images),
            progress=Progress(arrived_at, len(request.prompt), len(choice.output)),
            speculation=request.speculation,
            learn=request.learn and not request.images,  # heads embed ids, and cannot know what an image shows
            images=request.images,
            spans=spans,
            sampler_state=choice.sampler_state,
        )
        for offset, choice in enumerate(request.choices)
    ]


def chain_of(salt: str, sampling: SamplingParams, block_size: int, images: Sequence[Image] = ()) -> BlockChain:
    """The block chain of a request. Contrastive choices get their own, because their blocks also hold auxiliary KV."""
    return BlockChain(salt, block_size, b"auxiliary" if sampling.contrastive is not None else b"", images)


def _sampling_of(request: EngineRequest, choice: ChoiceState) -> SamplingParams:
    delivers = choice.index == 0 and not choice.output
    prompt_logprobs = request.sampling.prompt_logprobs if delivers else None
    return replace(request.sampling, choice=choice.index, prompt_logprobs=prompt_logprobs)


@dataclass(frozen=True, slots=True)
class StopCheck:
    """How many sampled tokens are kept, and why the choice ends, if it does."""

    num_kept: int
    reason: FinishReason | None = None
    stop_token_id: int | None = None


_CONTINUES = StopCheck(1)


def check_stop(request: Request, sampled: Sequence[int]) -> StopCheck:
    """Apply stop tokens and the length limit to sampled tokens. A stop token is kept and takes precedence.

    A choice that was already complete keeps none: max_tokens is 0, or it was resumed after its last token.
    """
    stops = request.sampling.stop_token_ids
    if request.num_output and request.tokens[-1] in stops:
        return StopCheck(0, FinishReason.STOP, request.tokens[-1])
    room = request.max_tokens - request.num_output
    if len(sampled) == 1 < room and sampled[0] not in stops:
        return _CONTINUES
    for index, token in enumerate(sampled[:room]):
        if token in stops:
            return StopCheck(index + 1, FinishReason.STOP, token)
    if len(sampled) >= room:
        return StopCheck(room, FinishReason.LENGTH)
    return StopCheck(len(sampled))


def output_of(request: Request, choice: ChoiceResult, stop: StopCheck, now: float) -> RequestOutput:
    """Build the output of a step from the kept tokens, and count its drafts."""
    num_accepted = min(choice.num_accepted, stop.num_kept)  # drafts come first among the tokens
    num_rejected = choice.num_accepted + choice.num_rejected - num_accepted
    if num_accepted or num_rejected:
        request.progress.note_drafts(choice.method, num_accepted, num_rejected)
    return RequestOutput(
        request_id=request.request_id,
        choice=request.sampling.choice,
        tokens=choice.tokens[: stop.num_kept],
        logprobs=choice.logprobs[: stop.num_kept],
        prompt_logprobs=request.take_prompt_logprobs(),
        num_cached_tokens=request.num_cached or 0,
        num_written_tokens=request.num_written,
        finish_reason=stop.reason,
        stop_token_id=stop.stop_token_id,
        num_accepted=num_accepted,
        num_rejected=num_rejected,
        draft_method=choice.method if num_accepted else "",
        sampler_state=choice.sampler_state,
        pooled=choice.pooled,
        history=None if stop.reason is None else request.history(now, has_ended=True),
    )


def failure_of(history: ChoiceHistory, request_id: str, error: Failure) -> RequestOutput:
    """Build the final output of a choice that failed."""
    return RequestOutput(request_id, history.choice, (), finish_reason=FinishReason.ERROR, error=error, history=history)
