"""Measures one request for the metrics and for its line in the log."""

import time

from scheduler.interface import EngineRequest
from server.telemetry.metrics import EndReason, Metrics
from server.http.middleware import RequestRecord
from server.generation.planning.planner import Plan
from server.text.tokenizer import Tokenizer


class Meter:
    """Told what happens to a request; passes it on to the metrics and the request's record."""

    def __init__(self, metrics: Metrics, record: RequestRecord) -> None:
        self._metrics = metrics
        self._record = record
        self._last: dict[tuple[int, int], float] = {}
        self._num_running = 0  # choices that the engine has taken and that have not ended
        self._keep_text = False

    def start(self, plan: Plan, tokenizer: Tokenizer, *, keep_text: bool) -> None:
        """The request is valid. `keep_text` puts prompt and output into the log."""
        self._keep_text = keep_text
        self._record.answer_id = plan.id
        self._record.tokens_in = sum(len(request.prompt) for request in plan.requests)
        self._record.tokens_out = 0
        if keep_text:
            texts = (tokenizer.decode(request.prompt, skip_special_tokens=False) for request in plan.requests)
            self._record.prompt = "\n".join(texts)
            self._record.output = ""

    def admitted(self, request: EngineRequest) -> None:
        """The engine has taken one of the prompts."""
        self._num_running += len(request.choices)
        self._metrics.observe_start(len(request.prompt), request.max_tokens, len(request.choices))

    def tokens(self, choice: tuple[int, int], count: int, text: str) -> None:
        """`count` tokens of a choice came, and showed this text."""
        if not count:
            return
        now = time.perf_counter()
        if self._record.ttft_s is None:
            self._record.ttft_s = now - self._record.started
            self._metrics.observe_first_token(self._record.ttft_s)
        last = self._last.get(choice)
        self._metrics.observe_tokens(count, None if last is None else now - last)
        self._last[choice] = now
        self._record.tokens_out = (self._record.tokens_out or 0) + count
        if self._keep_text:
            self._record.output = (self._record.output or "") + text

    def choice_end(self, reason: EndReason) -> None:
        self._num_running -= 1
        self._metrics.observe_choice_end(reason)

    def end(self, reason: EndReason) -> None:
        """All choices that still run end for this reason."""
        while self._num_running:
            self.choice_end(reason)

    def prompt_end(self, num_tokens: int) -> None:
        """All choices of a prompt have ended, with so many tokens in all."""
        self._metrics.observe_end(time.perf_counter() - self._record.started, num_tokens)
