"""Prometheus metrics, with vLLM's names and the prefix `samewise:`: existing dashboards need a changed prefix."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model_runner.info import LearningStats, SpeculationStats
from server.engine.client import EngineClient, EngineState

EndReason = Literal["stop", "length", "tool_calls", "abort", "error", "timeout"]
"""Why a choice ended; `abort`: nobody wants it any more."""

_PREFIX = "samewise:"
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 128)
_BY_METHOD: Sequence[tuple[str, str, Callable[[SpeculationStats], float]]] = (
    ("num_drafts", "Steps of single choices that verified drafts.", lambda stats: stats.steps),
    ("num_emitted_tokens", "Tokens that these steps generated.", lambda stats: stats.tokens),
    ("num_draft_tokens", "Draft tokens verified.", lambda stats: stats.drafted),
    ("num_accepted_tokens", "Draft tokens accepted.", lambda stats: sum(stats.accepted_by_depth)),
    ("draft_seconds", "Time spent on making drafts.", lambda stats: stats.draft_s),
    ("verify_seconds", "Time spent on the forward passes that verified drafts.", lambda stats: stats.verify_s),
)
_BY_POSITION: Sequence[tuple[str, str, Callable[[SpeculationStats], Sequence[int]]]] = (
    (
        "num_draft_tokens_per_pos",
        "Times that a draft was there, and all before it accepted.",
        lambda stats: stats.verified_by_depth,
    ),
    ("num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", lambda stats: stats.accepted_by_depth),
)
_OF_LEARNING: Sequence[tuple[str, str, Callable[[LearningStats], float]]] = (
    ("tokens", "Tokens of answers that heads were trained on, or will be.", lambda stats: stats.tokens),
    ("pieces_dropped", "Parts of answers that came too fast to be learnt from.", lambda stats: stats.pieces_dropped),
    ("steps", "Steps of training heads.", lambda stats: stats.steps),
    ("publications", "Heads that were put to use because they were better.", lambda stats: stats.publications),
    ("rollbacks", "Times that older heads were put to use again.", lambda stats: stats.rollbacks),
)


class EngineCollector(Collector):
    """Reads the engine's last snapshot whenever the metrics are asked for."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats, held = self._engine.stats, self._engine.num_held
        yield self._state()
        yield self._gauge("num_requests_running", "Choices that the engine computes now.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Choices that wait for the engine.", stats.num_waiting + held)
        yield self._gauge("num_requests_held", "Those of them that it has not: it restarts, or died of one.", held)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", stats.kv_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Choices put back into the queue for want of memory.", stats.preemptions)
        yield self._counter("out_of_memory_steps", "Steps for which memory ran out, done again.", stats.out_of_memory)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield self._counter("scheduled_tokens", "Tokens computed, recomputation included.", stats.scheduled_tokens)
        yield self._counter("engine_restarts", "Times the engine was started again.", self._engine.num_restarts)
        yield from speculation_metrics(stats.speculation, self._model)
        yield from learning_metrics(stats.learning, self._model)

    def _state(self) -> Metric:
        family = GaugeMetricFamily(
            _PREFIX + "engine_state", "1 for the state it is in.", labels=["model_name", "state"]
        )
        for state in EngineState:
            family.add_metric([self._model, state.value], state is self._engine.state)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def speculation_metrics(methods: Sequence[SpeculationStats], model: str) -> Iterator[Metric]:
    """What each method of speculation did. Position 0 is the first draft token after the last known one.

    Tokens per step: emitted_tokens / drafts. Acceptance at a position: accepted_tokens_per_pos / draft_tokens_per_pos.
    """
    for name, text, value in _BY_METHOD:
        family = CounterMetricFamily(f"{_PREFIX}spec_decode_{name}", text, labels=["model_name", "method"])
        for stats in methods:
            family.add_metric([model, stats.method], value(stats))
        yield family
    for name, text, values in _BY_POSITION:
        labels = ["model_name", "method", "position"]
        family = CounterMetricFamily(f"{_PREFIX}spec_decode_{name}", text, labels=labels)
        for stats in methods:
            for position, count in enumerate(values(stats)):
                family.add_metric([model, stats.method, str(position)], count)
        yield family


def learning_metrics(stats: LearningStats | None, model: str) -> Iterator[Metric]:
    """What came of `--learn`; nothing without it. `first` are the heads of the engine's start."""
    for name, text, value in _OF_LEARNING:
        family = CounterMetricFamily(f"{_PREFIX}learning_{name}", text, labels=["model_name"])
        if stats is not None:
            family.add_metric([model], value(stats))
        yield family
    text = "What these heads bring on what is served lately, as measured before it is trained on."
    tokens = GaugeMetricFamily(f"{_PREFIX}learning_tokens_per_step", text, labels=["model_name", "heads"])
    if stats is not None:
        for heads, per_step in (("first", stats.tokens_per_step_first), ("current", stats.tokens_per_step_current)):
            if per_step is not None:
                tokens.add_metric([model, heads], per_step)
    yield tokens


class GeneratedTokens(Collector):
    """Counts the tokens and the time between them. A counter and a histogram of the library would take as long for each
    token as all else that is done for it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._num_tokens = 0
        self._counts = [0] * (len(_BETWEEN_TOKENS_S) + 1)
        self._seconds = 0.0

    def observe(self, count: int, seconds: float | None) -> None:
        """`count` tokens of a choice came together, `seconds` after the ones before; None for the first."""
        self._num_tokens += count
        if seconds is not None:
            self._counts[bisect_left(_BETWEEN_TOKENS_S, seconds / count)] += count
            self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(_PREFIX + "generation_tokens", "Tokens generated.", labels=["model_name"])
        tokens.add_metric([self._model], self._num_tokens)
        yield tokens
        name, text = _PREFIX + "inter_token_latency_seconds", "Between tokens of a choice."
        between = HistogramMetricFamily(name, text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in _BETWEEN_TOKENS_S), "+Inf"]
        between.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._seconds)
        yield between


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._registry.register(EngineCollector(engine, model))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that the engine took.")
        self.generated = GeneratedTokens(model)
        self._registry.register(self.generated)
        text = "Choices that ended, by reason; abort: the client left."
        self._success = self._counter_of("request_success", text, "finished_reason")
        for reason in get_args(EndReason):
            self._success.labels(self._model, reason)  # so that the first one is an increase
        self._http = Counter(
            f"{_PREFIX}http_requests", "HTTP requests.", ["method", "handler", "status"], registry=self._registry
        )
        self._usage = self._counter_of("tenant_tokens", "Tokens of ended requests, by key.", "tenant", "kind")
        self._usage_requests = self._counter_of("tenant_requests", "Ended requests, by key.", "tenant")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN_S
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From request to last token.", _REQUEST_S)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_output = self._histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._request_max = self._histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._request_n = self._histogram("request_params_n", "n of a request.", _CHOICES)

    def observe_http(self, method: str, handler: str, status: int) -> None:
        self._http.labels(method if method in _METHODS else "other", handler, str(status)).inc()

    def observe_start(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """The engine has taken a prompt."""
        self._prompt_tokens.inc(prompt_tokens)
        self._request_prompt.observe(prompt_tokens)
        self._request_max.observe(max_tokens)
        self._request_n.observe(n)

    def observe_usage(self, tenant: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """A request of the tenant of this name has ended; those that were cached are among the prompt's."""
        self._usage_requests.labels(self._model, tenant).inc()
        kinds = {"prompt": prompt_tokens, "cached": cached_tokens, "completion": completion_tokens}
        for kind, count in kinds.items():
            self._usage.labels(self._model, tenant, kind).inc(count)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_choice_end(self, reason: EndReason) -> None:
        self._success.labels(self._model, reason).inc()

    def observe_end(self, seconds: float, generated: int) -> None:
        """All choices of a request have ended."""
        self._latency.observe(seconds)
        self._request_output.observe(generated)

    def collect(self) -> Sequence[Metric]:
        """All of them as they are now, for whoever renders those of several servers."""
        return list(self._registry.collect())

    def render(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _counter_of(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(_PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return metric.labels(self._model)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
