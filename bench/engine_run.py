"""Runs single-choice requests through an in-process engine and records outputs and step times."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from model_runner.contract import SamplingParams, TokenLogprobs
from scheduler.engine import Engine
from scheduler.interface import BeamSearch, EngineRequest, RequestOutput


@dataclass(frozen=True, slots=True)
class Strategy:
    """A decoding strategy."""

    sampling: SamplingParams
    beam_search: BeamSearch | None = None

    def requests(self, prompts: Iterable[tuple[int, ...]], num_tokens: int) -> list[EngineRequest]:
        """One request per prompt, with its own seed and without speculation. The guide is the prompt's last token."""
        is_guided = self.sampling.guidance is not None
        return [
            EngineRequest(
                f"{index:03}",
                prompt,
                replace(self.sampling, seed=index),
                num_tokens,
                guide=prompt[-1:] if is_guided else (),
                beam_search=self.beam_search,
            )
            for index, prompt in enumerate(prompts)
        ]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Outputs and timing of a run."""

    outputs: tuple[tuple[RequestOutput, ...], ...]
    """For each request, in order, the outputs of the steps that produced any."""
    step_s: tuple[float, ...]
    """Duration of each step."""
    seconds: float
    """Duration of the whole run."""

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Output tokens of each request."""
        return tuple(tuple(chain.from_iterable(one.tokens for one in outputs)) for outputs in self.outputs)

    @property
    def prompt_logprobs(self) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Prompt log-probabilities of each request; requires that all requested them."""
        return tuple(outputs[0].prompt_logprobs for outputs in self.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def run(engine: Engine, requests: Sequence[EngineRequest], concurrency: int | None = None) -> EngineRun:
    """Run requests to their end, at most `concurrency` at a time. Raises RuntimeError if one fails."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting, num_running = list(reversed(requests)), 0
    step_s = []
    start = time.perf_counter()
    while waiting or num_running:
        while waiting and (concurrency is None or num_running < concurrency):
            engine.add(waiting.pop())
            num_running += 1
        step_start = time.perf_counter()
        brought = engine.step()
        step_s.append(time.perf_counter() - step_start)
        for output in brought:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error.message}")
            outputs[output.request_id].append(output)
            num_running -= output.finish_reason is not None
    return EngineRun(tuple(map(tuple, outputs.values())), tuple(step_s), time.perf_counter() - start)
