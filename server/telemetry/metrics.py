"""Prometheus metrics with vLLM's names, so that what reads vLLM's needs at most another prefix."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from server.engine.client import EngineClient
from server.telemetry.engine_metrics import EngineCollector
from server.telemetry.families import Families, HttpRequests, exposition

_BETWEEN_TOKENS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)


class GeneratedTokens(Collector):
    """Counts the tokens and the time between them. A counter and a histogram of the library would take as long for each
    token as all else that is done for it.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
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
        yield self._families.counter("generation_tokens", "Tokens generated.", self._num_tokens)
        name, text = "inter_token_latency_seconds", "Between tokens of a choice."
        yield self._families.histogram(name, text, _BETWEEN_TOKENS_S, self._counts, self._seconds)


EndReason = Literal["stop", "length", "tool_calls", "abort", "error", "timeout"]
"""Why a choice ended; `abort`: the client left, or there was no room for another prompt of its request."""

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *_REQUEST_S)
"""Of a request that is short, or waits for nothing, as well."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 128)


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, engine: EngineClient, model: str, prefix: str) -> None:
        """All names begin with the prefix and a colon; it has letters, digits and `_`, no digit first."""
        self._registry = CollectorRegistry()
        self._model = model
        self._families = Families(prefix, model)
        self._registry.register(EngineCollector(engine, self._families))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.generated = GeneratedTokens(self._families)
        self._registry.register(self.generated)
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._prompt_tokens_total = self._counter(
            "prompt_tokens", "Prompt tokens of the requests that the engine took."
        )
        self._cached_tokens_total = self._counter(
            "prompt_tokens_cached", "Those of them that it found in the prefix cache."
        )
        self._sources = self._counter_of("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source")
        text = "Choices that ended, by reason; abort: the client left, or there was no room for all of its request."
        self._success = self._counter_of("request_success", text, "finished_reason")
        for reason in get_args(EndReason):
            self._success.labels(self._model, reason)  # so that the first one is an increase
        self._http = HttpRequests(self._families, self._registry)
        self._usage = self._counter_of("tenant_tokens", "Tokens of ended requests, by key.", "tenant", "kind")
        self._usage_requests = self._counter_of("tenant_requests", "Ended requests, by key.", "tenant")

    def _make_histograms(self) -> None:
        make = self._histogram
        self._first_token = make("time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN_S)
        text = "Between tokens, the mean of a choice that has at least two."
        self._per_token = make("request_time_per_output_token_seconds", text, _PER_TOKEN_S)
        self._latency = make("e2e_request_latency_seconds", "From request to last token.", _REQUEST_S)
        self._queue = make("request_queue_time_seconds", "From when the engine took it to its first step.", _PHASE_S)
        self._prefill = make("request_prefill_time_seconds", "From its first step to its first token.", _PHASE_S)
        self._decode = make("request_decode_time_seconds", "From its first token to its last.", _PHASE_S)
        self._inference = make("request_inference_time_seconds", "From its first step to its last token.", _PHASE_S)
        self._prompt_length = make("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        text = "Prompt tokens of a request that were not in the prefix cache."
        self._computed_length = make("request_prefill_kv_computed_tokens", text, _TOKENS)
        self._generated_length = make("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        text = "Generated tokens of the longest choice of a request."
        self._longest_choice_length = make("request_max_num_generation_tokens", text, _TOKENS)
        self._max_tokens = make("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._n = make("request_params_n", "n of a request.", _CHOICES)

    def observe_http(self, method: str, handler: str, status: int) -> None:
        self._http.observe(method, handler, status)

    def observe_start(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """The engine has taken a prompt."""
        self._prompt_tokens_total.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)
        self._n.observe(n)

    def observe_prefill(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has been through a prompt, of which so much was in the prefix cache."""
        self._cached_tokens_total.inc(cached_tokens)
        self._sources.labels(self._model, "local_cache_hit").inc(cached_tokens)
        self._sources.labels(self._model, "local_compute").inc(prompt_tokens - cached_tokens)
        self._computed_length.observe(prompt_tokens - cached_tokens)

    def observe_usage(self, tenant: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """A request of the tenant with this label has ended; those that were cached are among the prompt's."""
        self._usage_requests.labels(self._model, tenant).inc()
        kinds = {"prompt": prompt_tokens, "cached": cached_tokens, "completion": completion_tokens}
        for kind, count in kinds.items():
            self._usage.labels(self._model, tenant, kind).inc(count)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_choice_end(self, reason: EndReason) -> None:
        self._success.labels(self._model, reason).inc()

    def observe_time_per_output_token(self, seconds: float) -> None:
        """A choice with at least two tokens has ended: from its first to its last, divided by those after the first."""
        self._per_token.observe(seconds)

    def observe_end(self, seconds: float, generated: Sequence[int]) -> None:
        """All choices of a request have ended, with so many tokens each."""
        self._latency.observe(seconds)
        self._generated_length.observe(sum(generated))
        self._longest_choice_length.observe(max(generated))

    def observe_phases(self, queue_s: float, prefill_s: float | None, decode_s: float | None) -> None:
        """A request that somebody waited for has ended: how long it waited in the engine, until its first token then,
        and from there to its last; None for what it did not come to. Preemptions count where they fall.
        """
        self._queue.observe(queue_s)
        if prefill_s is not None:
            self._prefill.observe(prefill_s)
            self._inference.observe(prefill_s + (decode_s or 0.0))
        if decode_s is not None:
            self._decode.observe(decode_s)

    def collect(self) -> Sequence[Metric]:
        """All of them as they are now, for whoever renders those of several servers."""
        return list(self._registry.collect())

    def render(self, *, of_tenants: bool) -> bytes:
        """The exposition format of Prometheus, with or without what each tenant has used."""
        return exposition(self.collect(), of_tenants=of_tenants)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counter_of(name, text).labels(self._model)

    def _counter_of(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._families.name(name), text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        name = self._families.name(name)
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)
