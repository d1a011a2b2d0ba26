"""One choice of a request while it lives in the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from model_runner.contract import SamplingParams, Speculation, TokenLogprobs
from scheduler.block_pool import blocks_for
from scheduler.config import SchedulerConfig
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest
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
    cache_salt: str
    tokens: list[int]
    num_prompt: int
    chain: BlockChain
    speculation: Speculation | None = None
    num_computed: int = 0
    """Leading tokens whose KV is in the blocks; below len(tokens) between steps."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    """Leading blocks that were offered to the prefix cache."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache; None until the first admission."""
    num_draft: int = 0
    """Draft tokens that the runner offered to verify in the next step, or candidates that it has to compare."""
    sampler_state: float | None = None
    """What the runner said with the last of `tokens`, for when the choice is admitted again."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Collected over the chunks of the prompt until the first output takes them along."""
    group: "Group | None" = None
    """Of which it is a member."""
    chosen: int | None = None
    """The last token, if the runner does not know it yet."""
    forked_from: "Request | None" = None
    """A running member of the group, to be forked at the next step, that shares all tokens but the last."""

    @property
    def members(self) -> Sequence["Request"]:
        """Those of its group, or only itself."""
        return (self,) if self.group is None else self.group.members

    @property
    def remaining(self) -> int:
        """Known tokens still to compute; 1 when decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_candidates(self) -> int:
        """Candidates of contrastive search, which the next step must compute beside the last known token."""
        return self.num_draft if self.sampling.num_candidates else 0

    @property
    def needs_every_position(self) -> bool:
        """Whether all tokens must be computed for this choice itself: what others computed does not tell enough."""
        return self.wants_prompt_logprobs or self.sampling.num_candidates > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be delivered, for which every position must be computed."""
        return self.sampling.prompt_logprobs is not None

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
        self.num_draft = 0
        self.blocks = []
        self.prompt_logprobs.clear()
        self.chosen = None
        self.forked_from = None

    def take_chosen(self) -> int | None:
        """The token to tell the runner of, once."""
        chosen, self.chosen = self.chosen, None
        return chosen

    def fork(self, key: str, token: int) -> "Request":
        """A member of the same group that shares what is computed and goes on with this token."""
        return replace(
            self,
            key=key,
            tokens=[*self.tokens[: self.num_computed], token],
            chain=self.chain.fork(),
            blocks=[],
            prompt_logprobs=[],
            chosen=None,
            forked_from=self,
        )


def make_choices(request: EngineRequest, first_arrival: int, block_size: int) -> list[Request]:
    """One Request for each choice. Choice 0 alone delivers prompt logprobs, unless its first output is already out."""
    return [
        Request(
            key=f"{request.request_id}/{choice.index}",
            request_id=request.request_id,
            arrival=first_arrival + offset,
            sampling=_sampling_of(request, choice),
            max_tokens=request.max_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tokens=[*request.prompt, *choice.output],
            num_prompt=len(request.prompt),
            chain=BlockChain(request.cache_salt, block_size, _kv_kind(request.sampling)),
            speculation=request.speculation,
            sampler_state=choice.sampler_state,
        )
        for offset, choice in enumerate(request.choices)
    ]


def _kv_kind(sampling: SamplingParams) -> bytes:
    """Blocks of contrastive choices hold the auxiliary model's KV as well, and those of others do not."""
    return b"auxiliary" if sampling.contrastive is not None else b""


def _sampling_of(request: EngineRequest, choice: ChoiceState) -> SamplingParams:
    delivers = choice.index == 0 and not choice.output
    prompt_logprobs = request.sampling.prompt_logprobs if delivers else None
    return replace(request.sampling, choice=choice.index, prompt_logprobs=prompt_logprobs)


def check_request(request: EngineRequest, config: SchedulerConfig, num_blocks: int) -> None:
    """Raise ValueError if the request is malformed or could not run even with the engine to itself."""
    name, num_prompt, max_tokens = request.request_id, len(request.prompt), request.max_tokens
    if num_prompt == 0:
        raise ValueError(f"request {name!r} has an empty prompt")
    if max_tokens < 0:
        raise ValueError(f"request {name!r} asks for {max_tokens} tokens")
    indices = [choice.index for choice in request.choices]
    if not indices or len(set(indices)) < len(indices) or min(indices) < 0:
        raise ValueError(f"request {name!r} must have choices of different, non-negative indices, not {indices}")
    longest = max(len(choice.output) for choice in request.choices)
    if longest > max_tokens:
        raise ValueError(f"request {name!r} is resumed with {longest} tokens of output, more than its {max_tokens}")
    needs_state = request.sampling.mirostat is not None
    if any(needs_state and choice.output and choice.sampler_state is None for choice in request.choices):
        raise ValueError(f"request {name!r} is resumed without the state of its sampler")
    total = num_prompt + max_tokens
    if total > config.max_model_len:
        raise ValueError(
            f"request {name!r} needs {num_prompt} prompt + {max_tokens} output tokens = {total}, "
            f"the context holds {config.max_model_len}"
        )
    width = 1 if request.beam_search is None else check_beam_search(request, request.beam_search, config)
    num_candidates = request.sampling.num_candidates
    if 1 + num_candidates > config.max_num_batched_tokens:
        raise ValueError(
            f"request {name!r} computes a token and {num_candidates} candidates in one step, "
            f"which holds {config.max_num_batched_tokens}"
        )
    needed = width * blocks_for(total + num_candidates, config.block_size)
    if needed > num_blocks:
        beside = f" and {num_candidates} candidates" if num_candidates else f" of {width} beams" if width > 1 else ""
        raise ValueError(
            f"request {name!r} needs {needed} KV blocks of {config.block_size} tokens "
            f"for {num_prompt} prompt + {max_tokens} output tokens{beside}, there are {num_blocks}"
        )


def check_beam_search(request: EngineRequest, search: BeamSearch, config: SchedulerConfig) -> int:
    """The width of a beam search. Raises ValueError if it is malformed or too wide."""
    name, width = request.request_id, search.width
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    if not 1 <= width <= most:
        raise ValueError(f"request {name!r} asks for {width} beams, at least 1 and at most {most} can run")
    if search.groups < 1 or width % search.groups:
        raise ValueError(f"request {name!r} splits {width} beams into {search.groups} groups")
    if max(choice.index for choice in request.choices) >= width:
        raise ValueError(f"request {name!r} wants more sequences than its {width} beams find")
    if request.max_tokens < 1 or request.speculation is not None:
        raise ValueError(f"request {name!r} searches beams for no tokens or with speculation")
    return width
