"""One choice of a request while it lives in the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from model_runner.contract import (
    ChoiceResult,
    Failure,
    SamplingParams,
    ScheduledRequest,
    SharedList,
    Speculation,
    TokenLogprobs,
)
from scheduler.history import ChoiceHistory, Progress
from scheduler.interface import BACKGROUND, ChoiceState, EngineRequest, FinishReason, RequestOutput
from scheduler.prefix_cache import BlockChain


class Group(Protocol):
    """Requests that are admitted, computed and preempted together. The first one stands in the queue for all."""

    members: list["Request"]
    """Those that live now."""
    width: int
    """The most members that it ever has; so many slots are kept for it while it runs."""


@dataclass(slots=True, eq=False)
class Request:
    """A choice: what it is, how far it got, and the blocks that it holds while it runs.

        tokens   | prompt ......................... | output ........ |
                 0          num_computed        num_prompt       len(tokens)
        blocks   |  KV is there  |  room, filled by later steps  |

    Scheduling is catching up: a step computes some of the tokens between `num_computed` and `len(tokens)`.
    """

    key: str
    """Unique among the choices that live."""
    request_id: str
    arrival: int
    """Position in the order of arrival; kept through preemption."""
    sampling: SamplingParams
    max_tokens: int
    priority: int
    tier: int
    client: str
    weight: float
    cache_salt: str
    tokens: list[int] | SharedList[int]
    """Shared once it was forked: beams are, again and again."""
    num_prompt: int
    chain: BlockChain
    progress: Progress
    """Of all members together, where it is of a group."""
    speculation: Speculation | None = None
    learn: bool = True
    num_computed: int = 0
    """Leading tokens whose KV is in the blocks; below len(tokens) between steps."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    """Leading blocks that were offered to the prefix cache."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache; None until the first admission."""
    num_written: int = 0
    """Prompt tokens that it added to the prefix cache, of those that the same prompt would look up."""
    num_draft: int = 0
    """Draft tokens that the runner offered to verify in the next step."""
    num_candidates: int = 0
    """Candidates of contrastive search, which the next step must compute beside the last known token."""
    sampler_state: float | None = None
    """What the runner said with the last of `tokens`, for when the choice is admitted again."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Collected over the chunks of the prompt until the first output takes them along."""
    group: "Group | None" = None
    """Of which it is a member."""
    guides: str | None = None
    """Key of the request that this one is the guide of; it is no choice itself."""
    chosen: int | None = None
    """The last token, if the runner does not know it yet."""
    decode_share: ScheduledRequest = field(init=False)
    """Of a step that computes its last token, within its blocks: the same object each time."""
    forked_from: "Request | None" = None
    """A running member of the group, to be forked at the next step, that shares all tokens but the last."""

    def __post_init__(self) -> None:
        self.decode_share = ScheduledRequest(self.key, 1, ())

    @property
    def members(self) -> Sequence["Request"]:
        """Those of its group, or only itself."""
        return (self,) if self.group is None else self.group.members

    @property
    def is_background(self) -> bool:
        """Whether it gets only the room that others leave."""
        return self.tier >= BACKGROUND

    @property
    def remaining(self) -> int:
        """Known tokens still to compute; 1 when decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def needs_every_position(self) -> bool:
        """Whether all tokens must be computed for this choice itself: what others computed does not tell enough."""
        pooling = self.sampling.pooling
        needs_every_token = pooling is not None and pooling.needs_every_token
        return needs_every_token or self.wants_prompt_logprobs or self.sampling.num_candidates > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be delivered, for which every position must be computed."""
        return self.sampling.prompt_logprobs is not None

    @property
    def only_decodes(self) -> bool:
        """Whether its next step computes its last token and nothing else, with nobody beside it."""
        return (
            len(self.tokens) - self.num_computed == 1
            and self.group is None
            and not self.num_candidates
            and self.forked_from is None
        )

    def history(self, now: float, *, has_ended: bool = False) -> ChoiceHistory:
        """What became of it so far."""
        return self.progress.history(self.sampling.choice, self.num_output, now, has_ended=has_ended)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Deliver the collected prompt logprobs, once: computing the prompt again will not ask for them."""
        if not self.wants_prompt_logprobs:
            return ()
        taken = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        self.sampling = replace(self.sampling, prompt_logprobs=None)
        return taken

    def start_over(self) -> None:
        """Forget everything computed, after the blocks were given back."""
        self.num_computed = 0
        self.num_published = 0
        self.forget_offers()
        self.blocks = []
        self.prompt_logprobs.clear()
        self.chosen = None
        self.forked_from = None

    def forget_offers(self) -> None:
        """The next step verifies and compares nothing."""
        self.num_draft = 0
        self.num_candidates = 0

    def take_chosen(self) -> int | None:
        """The token to tell the runner of, once."""
        chosen, self.chosen = self.chosen, None
        return chosen

    def fork(self, key: str, token: int) -> "Request":
        """A member of the same group that shares what is computed and goes on with this token."""
        if not isinstance(self.tokens, SharedList):
            self.tokens = SharedList(self.tokens)
        return replace(
            self,
            key=key,
            tokens=self.tokens.fork(self.num_computed).appended(token),
            chain=self.chain.fork(),
            blocks=[],
            prompt_logprobs=[],
            chosen=None,
            forked_from=self,
        )


def make_choices(request: EngineRequest, first_arrival: int, arrived_at: float, block_size: int) -> list[Request]:
    """One Request for each choice. Choice 0 alone delivers prompt logprobs, unless its first output is already out."""
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
            chain=chain_of(request.cache_salt, request.sampling, block_size),
            progress=Progress(arrived_at, len(request.prompt), len(choice.output)),
            speculation=request.speculation,
            learn=request.learn,
            sampler_state=choice.sampler_state,
        )
        for offset, choice in enumerate(request.choices)
    ]


def chain_of(salt: str, sampling: SamplingParams, block_size: int) -> BlockChain:
    """Blocks of contrastive choices hold the auxiliary model's KV as well, and those of others do not."""
    return BlockChain(salt, block_size, b"auxiliary" if sampling.contrastive is not None else b"")


def _sampling_of(request: EngineRequest, choice: ChoiceState) -> SamplingParams:
    delivers = choice.index == 0 and not choice.output
    prompt_logprobs = request.sampling.prompt_logprobs if delivers else None
    return replace(request.sampling, choice=choice.index, prompt_logprobs=prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of sampled tokens: how many of them count, and whether the choice ends with them."""

    num_kept: int
    reason: FinishReason | None = None
    stop_token_id: int | None = None


_GOES_ON = Verdict(1)


def judge(request: Request, sampled: Sequence[int]) -> Verdict:
    """Decide over tokens that follow the request's own. A stop token is kept, and wins over the length limit.

    A choice that was complete before keeps none of them: max_tokens is 0, or it was resumed after its last token.
    """
    stops = request.sampling.stop_token_ids
    if request.num_output and request.tokens[-1] in stops:
        return Verdict(0, FinishReason.STOP, request.tokens[-1])
    room = request.max_tokens - request.num_output
    if len(sampled) == 1 < room and sampled[0] not in stops:
        return _GOES_ON
    for index, token in enumerate(sampled[:room]):
        if token in stops:
            return Verdict(index + 1, FinishReason.STOP, token)
    if len(sampled) >= room:
        return Verdict(room, FinishReason.LENGTH)
    return Verdict(len(sampled))


def output_of(request: Request, choice: ChoiceResult, verdict: Verdict, now: float) -> RequestOutput:
    """The tokens that count, with all that is reported of them. The drafts are counted."""
    num_accepted = min(choice.num_accepted, verdict.num_kept)  # drafts come first among the tokens
    num_rejected = choice.num_accepted + choice.num_rejected - num_accepted
    if num_accepted or num_rejected:
        request.progress.note_drafts(choice.method, num_accepted, num_rejected)
    return RequestOutput(
        request_id=request.request_id,
        choice=request.sampling.choice,
        tokens=choice.tokens[: verdict.num_kept],
        logprobs=choice.logprobs[: verdict.num_kept],
        prompt_logprobs=request.take_prompt_logprobs(),
        num_cached_tokens=request.num_cached or 0,
        num_written_tokens=request.num_written,
        finish_reason=verdict.reason,
        stop_token_id=verdict.stop_token_id,
        num_accepted=num_accepted,
        num_rejected=num_rejected,
        draft_method=choice.method if num_accepted else "",
        sampler_state=choice.sampler_state,
        pooled=choice.pooled,
        history=None if verdict.reason is None else request.history(now, has_ended=True),
    )


def failure_of(history: ChoiceHistory, request_id: str, error: Failure) -> RequestOutput:
    """The end of a choice that cannot be computed."""
    return RequestOutput(request_id, history.choice, (), finish_reason=FinishReason.ERROR, error=error, history=history)
