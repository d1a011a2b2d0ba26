"""An EngineClient without a model: its tokens follow a script, its delays and failures are set by the test."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from model_runner.contract import Failure, TokenLogprobs
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import ChoiceHistory, EngineRequest, EngineStats, FinishReason, RequestOutput
from server.engine.client import EngineState, EngineUnavailableError, QueueFullError
from server.engine.live_requests import Follower
from server.engine.step_log import StepLog
from tests.server.fake_stream import FakeStream

Script = Callable[[EngineRequest, int], Sequence[int]]
"""(request, choice) to the tokens that the model would generate without end."""


def noise(*values: int) -> int:
    """A number that depends on all of the values and on nothing else."""
    state = 1469598103934665603
    for value in values:
        state = ((state ^ (value & (2**64 - 1))) * 1099511628211) % 2**64
        state ^= state >> 29
    return state


def scripted(*tokens: Sequence[int]) -> Script:
    """Each choice gets its own tokens, the last ones over and over."""
    return lambda request, choice: tokens[min(choice, len(tokens) - 1)]


def letters(request: EngineRequest, choice: int) -> list[int]:
    """Lower-case letters that depend on prompt, seed and choice, as a model's would."""
    first = noise(*request.prompt, request.sampling.seed, choice)
    return [ord("a") + noise(first, position) % 26 for position in range(request.max_tokens)]


def logprob_of(token: int, position: int) -> float:
    return -(1 + noise(token, position) % 1000) / 128


def make_logprobs(token: int, position: int, count: int, vocab_size: int) -> TokenLogprobs:
    """The best `count` tokens in order; the token itself is somewhere below them."""
    top = tuple((noise(position, rank) % vocab_size, -0.25 * (rank + 1)) for rank in range(count))
    return TokenLogprobs(token, logprob_of(token, position) - 10, count + 1, top)


def make_numbers(request: EngineRequest, hidden_size: int) -> bytes:
    """Numbers in place of tokens, which depend on the prompt."""
    pooling = request.sampling.pooling
    if pooling is None:
        return b""
    sizes = {"logits": len(pooling.tokens), "classes": 1}
    size = sizes.get(pooling.by, pooling.dimensions or hidden_size)
    return struct.pack(f"<{size}f", *(noise(*request.prompt, place) % 1000 / 250 - 2 for place in range(size)))


@dataclass
class FakeEngine:
    """Fields may be changed while it runs."""

    script: Script = letters
    info_: RunnerInfo = field(
        default_factory=lambda: RunnerInfo(
            vocab_size=320,
            max_model_len=256,
            block_size=16,
            num_blocks=64,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            device="cpu",
            dtype="fake",
            kv_dtype="fake",
            activation_type="fake",
            kernels="fake",
            hidden_size=16,
            speculation_methods=("auto", "lookahead", "prediction", "suffix"),
            num_early_exits=4,
        )
    )
    state: EngineState = EngineState.READY
    stats: EngineStats = field(
        default_factory=lambda: EngineStats(num_running=3, kv_usage=0.5, prefix_queries=10, prefix_hits=4)
    )
    steps: StepLog = field(default_factory=StepLog)
    num_restarts: int = 2
    num_held: int = 0
    num_background_held: int = 0
    tokens_per_step: int = 1
    counts_drafts: bool = False
    """Report each step as one that verified `tokens_per_step` drafts, of which the last was rejected."""
    first_delay_s: float = 0.0
    step_delay_s: float = 0.0
    refuse: Exception | None = None
    """Raised instead of the first output."""
    fail_after: int | None = None
    """Outputs of each choice before `failure`."""
    failure: Exception | None = None
    error_output: Failure | None = None
    num_cached: int = 0
    num_written: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    closed_early: list[str] = field(default_factory=list)
    num_live: int = 0
    reason: str = ""
    """Why it ended."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def roomy(cls, max_model_len: int = 4096) -> "FakeEngine":
        """With room for tools and histories in the prompt."""
        engine = cls()
        engine.info_ = replace(engine.info_, max_model_len=max_model_len, num_blocks=512)
        return engine

    @property
    def info(self) -> RunnerInfo:
        if self.state is EngineState.STARTING:
            raise EngineUnavailableError("starting")
        return self.info_

    async def start(self) -> None: ...

    async def wait_ready(self) -> None: ...

    async def ended(self) -> str:
        await self.has_ended.wait()
        return self.reason

    async def stop(self) -> None: ...

    async def drain(self, grace_s: float) -> None:
        self.state = EngineState.DRAINING
        self.has_ended.set()

    def abort_choice(self, request_id: str, choice: int) -> None:
        self.aborted.append((request_id, choice))

    async def explain(self, request_id: str) -> Sequence[ChoiceHistory]:
        return ()

    def submit(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> FakeStream:
        self.requests.append(request)
        if isinstance(self.refuse, QueueFullError):
            raise self.refuse
        self.num_live += 1

        def ended(complete: bool) -> None:
            self.num_live -= 1
            if not complete:
                self.closed_early.append(request.request_id)
            for choice in request.choices:
                follower.ended(choice.index, None)

        return FakeStream(self._generate(request), wake, ended)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        await asyncio.sleep(self.first_delay_s)
        if self.refuse is not None:
            raise self.refuse
        async for output in self._outputs(request):
            yield output

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        running = {choice.index: self._tokens(request, choice.index) for choice in request.choices}
        position = 0
        while running:
            await asyncio.sleep(self.step_delay_s)
            if self.fail_after is not None and position >= self.fail_after:
                if self.error_output is not None:
                    yield RequestOutput(
                        request.request_id, 0, (), finish_reason=FinishReason.ERROR, error=self.error_output
                    )
                    return
                assert self.failure is not None
                raise self.failure
            for choice in list(running):
                if (request.request_id, choice) in self.aborted:
                    del running[choice]
                    continue
                output = self._step(request, choice, running[choice], position)
                if output.finish_reason is not None:
                    del running[choice]
                yield output
            position += self.tokens_per_step

    def _tokens(self, request: EngineRequest, choice: int) -> list[int]:
        pattern = list(self.script(request, choice))
        repeats = request.max_tokens // max(1, len(pattern)) + 1
        return (pattern * repeats)[: request.max_tokens]

    def _step(self, request: EngineRequest, choice: int, tokens: list[int], position: int) -> RequestOutput:
        new = tuple(tokens[position : position + self.tokens_per_step])
        stop = next((i for i, t in enumerate(new) if t in request.sampling.stop_token_ids), None)
        new = new if stop is None else new[: stop + 1]
        at_end = position + len(new) >= len(tokens)
        accepted = min(len(new), self.tokens_per_step - 1)
        vocab, count = self.info_.vocab_size, request.sampling.logprobs
        of_prompt = request.sampling.prompt_logprobs if choice == 0 and position == 0 else None
        return RequestOutput(
            request.request_id,
            choice,
            new,
            logprobs=()
            if count is None
            else tuple(make_logprobs(token, position + i, count, vocab) for i, token in enumerate(new)),
            prompt_logprobs=()
            if of_prompt is None
            else tuple(make_logprobs(t, i + 1, of_prompt, vocab) for i, t in enumerate(request.prompt[1:])),
            num_cached_tokens=self.num_cached if position == 0 else 0,
            num_written_tokens=self.num_written if position == 0 else 0,
            finish_reason=FinishReason.STOP if stop is not None else FinishReason.LENGTH if at_end else None,
            stop_token_id=None if stop is None else new[-1],
            beam_tokens=0 if request.beam_search is None else request.num_drawn * (position + len(new)),
            pooled=make_numbers(request, self.info_.hidden_size),
            num_accepted=accepted if self.counts_drafts else 0,
            num_rejected=self.tokens_per_step - accepted if self.counts_drafts else 0,
            draft_method="suffix" if self.counts_drafts and accepted else "",
        )
