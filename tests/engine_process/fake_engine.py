"""An engine whose tokens are a pure function of the request, and which breaks where a prompt tells it to."""

import os
import signal
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from model_runner.model_needs import ModelNeeds
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import BACKGROUND, ChoiceHistory, EngineRequest, EngineStats, FinishReason, RequestOutput
from scheduler.request import Progress
from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig, Plan

VOCAB = 1000
EXIT, KILL, RAISE, HANG, REJECT = range(VOCAB, VOCAB + 5)  # in a prompt, these tokens break the engine
POISON_AFTER = 3  # tokens, so that the engine dies mid-stream
STEP_S = 0.002


def next_token(prompt: tuple[int, ...], output: tuple[int, ...], seed: int, choice: int) -> int:
    return zlib.crc32(repr((prompt, output, seed, choice)).encode()) % VOCAB


def expected(request: EngineRequest, choice: int = 0) -> tuple[int, ...]:
    """Tokens that an undisturbed engine generates."""
    output: tuple[int, ...] = ()
    while len(output) < request.max_tokens:
        output += (next_token(request.prompt, output, request.sampling.seed, choice),)
        if output[-1] in request.sampling.stop_token_ids:
            break
    return output


@dataclass
class Running:
    request: EngineRequest
    choice: int
    output: tuple[int, ...]
    progress: Progress

    def history(self, *, has_ended: bool = False) -> ChoiceHistory:
        return self.progress.history(self.choice, len(self.output), time.perf_counter(), has_ended=has_ended)


@dataclass
class FakeEngine:
    dies: bool = False
    """As soon as it is ready."""
    running: dict[tuple[str, int], Running] = field(default_factory=dict)
    steps: int = 0
    integrity_checks: int = 0

    @property
    def has_work(self) -> bool:
        if self.dies:
            raise RuntimeError("told to die")
        return bool(self.running)

    def add(self, request: EngineRequest) -> None:
        if REJECT in request.prompt:
            raise ValueError("the prompt does not fit")
        for state in request.choices:
            now = time.perf_counter()
            progress = Progress(now, len(request.prompt), len(state.output))
            progress.note_admission(now, 0)
            self.running[request.request_id, state.index] = Running(request, state.index, state.output, progress)

    def abort(self, request_id: str, choice: int | None = None) -> list[ChoiceHistory]:
        keys = [key for key in self.running if key[0] == request_id and choice in {None, key[1]}]
        assert keys, "the loop passes on only what is live"
        return [self.running.pop(key).history(has_ended=True) for key in keys]

    def explain(self, request_id: str) -> list[ChoiceHistory]:
        return [running.history() for key, running in self.running.items() if key[0] == request_id]

    def step(self) -> list[RequestOutput]:
        time.sleep(STEP_S)
        self.steps += 1
        for running in self.running.values():
            if len(running.output) >= POISON_AFTER:
                break_down(running.request.prompt)
        return [self._advance(running) for running in list(self.running.values())]

    def _advance(self, running: Running) -> RequestOutput:
        """A step with speculation accepts all drafts but one, as far as there is room."""
        request, start = running.request, len(running.output)
        num_drafts = 0 if request.speculation is None else request.speculation.num_tokens or 0
        reason = None
        running.progress.steps += 1
        if running.progress.is_prefilling:
            running.progress.note_token(time.perf_counter())
        while reason is None and len(running.output) < start + max(1, num_drafts):
            running.output += (next_token(request.prompt, running.output, request.sampling.seed, running.choice),)
            if running.output[-1] in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif len(running.output) == request.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[request.request_id, running.choice]
        tokens = running.output[start:]
        accepted = len(tokens) - 1
        return RequestOutput(
            request.request_id,
            running.choice,
            tokens,
            finish_reason=reason,
            num_accepted=accepted,
            num_rejected=num_drafts - accepted,
            draft_method=request.speculation.method if request.speculation and accepted else "",
            history=None if reason is None else running.history(has_ended=True),
        )

    def stats(self) -> EngineStats:
        num_background = sum(running.request.tier >= BACKGROUND for running in self.running.values())
        counts = {"steps": self.steps, "steps_done": self.steps, "step_s": STEP_S * self.steps}
        return EngineStats(len(self.running), num_background_running=num_background, **counts)

    def check_integrity(self) -> None:
        assert not self.running
        self.integrity_checks += 1


def break_down(prompt: tuple[int, ...]) -> None:
    if EXIT in prompt:
        os._exit(1)
    if KILL in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    if RAISE in prompt:
        raise RuntimeError("told to raise")
    if HANG in prompt:
        time.sleep(1000)


WARM_BYTES = 123
CACHE_BYTES = 1000


def warm() -> int:
    return WARM_BYTES


def plan(asked: Plan) -> ModelNeeds:
    """Does what the model's name says; needs as many bytes as it gets, up to CACHE_BYTES."""
    cache = min(asked.budgets.get("cpu", 4), CACHE_BYTES)
    name = asked.config.runner.model.name
    match name:
        case "refused":
            raise ValueError("the model needs 80 GiB, 16 GiB are free")
        case "crashing":
            raise RuntimeError("told to raise")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            time.sleep(1000)
        case "growing":
            grown = bytearray(1 << 28)
            time.sleep(1000)
            del grown
    return ModelNeeds("cpu", 0, 1, 2, 3, cache, 5, 6, os.getpid(), 1024, 2048, VOCAB, kv_cache_gib=0.1)


def load(config: EngineConfig) -> LoadedEngine:
    """Does what the next line of the file `loads` in the model's folder says; loads when there is none."""
    plan = config.runner.model / "loads"
    word, _, rest = plan.read_text().partition("\n") if plan.exists() else ("", "", "")
    if plan.exists():
        plan.write_text(rest)
    match word:
        case "exit":
            os._exit(3)
        case "raise":
            raise RuntimeError("told to raise")
        case "refuse":
            raise ValueError("the model needs 80 GiB, 16 GiB are free")
        case "slowly":
            time.sleep(0.5)
        case "forever":
            time.sleep(1000)
        case "beside":
            ThreadPoolExecutor(1).submit(threading.Event().wait)
    info = RunnerInfo(
        vocab_size=VOCAB,
        max_model_len=1024,
        block_size=config.runner.block_size,
        num_blocks=100,
        max_num_seqs=config.runner.max_num_seqs or 64,
        max_num_batched_tokens=512,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        kernels="none",
        speculation_methods=("auto", "lookahead"),
    )
    return LoadedEngine(FakeEngine(dies=word == "die"), info)
