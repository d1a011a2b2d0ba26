"""Dashboard and alerts against the metrics of a server: every query is well formed and finds what it asks for."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from model_runner.runner_interface import LearningStats, SpeculationStats
from scheduler.interface import EngineStats
from server.engine.client import RequestFailedError
from server.ray.front import merged
from server.telemetry.metrics import exposition
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat
from tests.server.tenants.keys import of_tenant

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "samewise.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
OF_GRAFANA = {"__rate_interval": "1m", "__range": "1h"}


@dataclass(frozen=True)
class Query:
    title: str
    expression: str
    legend: str = ""


def queries() -> list[Query]:
    of_panels = [
        Query(f"{panel['title']}, {target['refId']}", target["expr"], target["legendFormat"])
        for panel in PANELS
        for target in panel["targets"]
    ]
    (restarts,) = DASHBOARD["annotations"]["list"]
    of_alerts = [Query(rule["alert"], rule["expr"], rule["annotations"]["summary"]) for rule in ALERTS]
    return [*of_panels, Query("annotation", restarts["expr"], restarts["titleFormat"]), *of_alerts]


def filled_in(text: str, prefix: str) -> str:
    """As Grafana does it, with all values of the variables chosen."""
    values = {"prefix": prefix, "model_name": ".*", "instance": ".*", **OF_GRAFANA}
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], text)


class Served:
    """The metrics of a server, as Prometheus has them."""

    def __init__(self, text: str, job: str = "samewise") -> None:
        added = {"instance": "samewise:8000", "job": job}
        self.series: dict[str, list[dict[str, str]]] = {"up": [added]}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.series.setdefault(sample.name, []).append({**sample.labels, **added})

    def labels_of(self, expression: promql.Expr) -> set[str] | None:
        """Labels of an expression's result; None for a number. Raises AssertionError if there is no result."""
        match expression:
            case promql.NumberLiteral():
                return None
            case promql.VectorSelector():
                return self._select(expression)
            case promql.MatrixSelector():
                return self._select(expression.vector_selector)
            case promql.ParenExpr():
                return self.labels_of(expression.expr)
            case promql.Call():
                return self._call(expression)
            case promql.AggregateExpr():
                inner = self.labels_of(expression.expr)
                by = set(expression.modifier.labels) if expression.modifier else set()
                assert inner is not None
                assert by <= inner, f"{by - inner} are no labels of {expression.expr.prettify()}"
                return by
            case promql.BinaryExpr():
                left, right = self.labels_of(expression.lhs), self.labels_of(expression.rhs)
                assert None in (left, right) or left == right, f"{left} and {right} have no labels in common"
                return left if left is not None else right
        raise AssertionError(f"{type(expression)} is not known here")

    def _call(self, call: promql.Call) -> set[str]:
        if call.func.name == "vector":
            return set()
        (labels,) = [found for argument in call.args if (found := self.labels_of(argument)) is not None]
        if call.func.name == "histogram_quantile":
            assert "le" in labels
            return labels - {"le"}
        return labels

    def _select(self, selector: promql.VectorSelector) -> set[str]:
        assert selector.name in self.series, f"there is no {selector.name}"
        series = self.series[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in series[0], f"{selector.name} has no label {matcher.name}"
            series = [labels for labels in series if _fits(matcher, labels[matcher.name])]
            assert series, f"nothing fits {matcher} of {selector.name}"
        return set(series[0])


def _fits(matcher: promql.Matcher, value: str) -> bool:
    regular = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
    fits = re.fullmatch(matcher.value, value) is not None if regular else matcher.value == value
    return fits == (matcher.op in (promql.MatchOp.Re, promql.MatchOp.Equal))


@pytest.fixture
async def busy(make_with_keys: Callable[..., FastAPI], engine: FakeEngine) -> Callable[[str], Any]:
    """A server with activity: its metrics as text, and two replicas' metrics merged by Ray's front."""

    async def metrics(prefix: str) -> tuple[str, str]:
        app = make_with_keys({"ann": {"metrics": True}}, metrics_prefix=prefix)
        speculation = SpeculationStats("suffix", 30, (8, 4), (10, 8), 10, 22, draft_s=0.5, verify_s=2.25)
        learning = LearningStats(900, 0, 7, 2, 1, 1.25, 1.75)
        engine.stats = EngineStats(speculation=(speculation,), learning=learning)
        async with of_tenant(app, "ann") as client:
            assert (await client.post(CHAT, json=chat())).status_code == 200
            engine.refuse = RequestFailedError("broken")
            assert (await client.post(CHAT, json=chat())).status_code >= 500
            collected = app.state.services.collect()
            on_ray = exposition(merged((name, collected) for name in "ab"), of_tenants=True)
            return (await client.get("/metrics")).text, on_ray.decode()

    return metrics


@pytest.fixture
async def served(busy: Callable[[str], Any]) -> Callable[[str], Any]:
    async def metrics(prefix: str) -> Served:
        return Served((await busy(prefix))[0])

    return metrics


@pytest.mark.parametrize("prefix", VARIABLES["prefix"]["query"].split(","))
async def test_every_query_finds_what_it_asks_for(busy: Callable[[str], Any], prefix: str) -> None:
    alone, on_ray = map(Served, await busy(prefix))
    for query in queries():
        expression = promql.parse(filled_in(query.expression, prefix).replace("samewise:", f"{prefix}:"))
        named = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", query.legend))
        for metrics, not_there in ((alone, {"replica"}), (on_ray, set())):
            labels = metrics.labels_of(expression)
            assert named - not_there <= labels, f"{query.title}: {named - labels} are no labels of the result"


async def test_replicas_have_their_own_lines(busy: Callable[[str], Any]) -> None:
    on_ray = Served((await busy("samewise"))[1])
    for panel in PANELS:
        for target in panel["targets"]:
            if "replica" in (on_ray.labels_of(promql.parse(filled_in(target["expr"], "samewise"))) or ()):
                assert "{{replica}}" in target["legendFormat"], panel["title"]


@pytest.mark.parametrize("job", ["samewise", "llm-samewise", "samewise-http"])
async def test_alerts_hold_whatever_the_service_is_called(busy: Callable[[str], Any], job: str) -> None:
    """The Prometheus Operator calls a job after its Service."""
    metrics = Served((await busy("samewise"))[0], job)
    for rule in ALERTS:
        metrics.labels_of(promql.parse(rule["expr"]))


@pytest.mark.parametrize("name", ["model_name", "instance"])
async def test_the_choices_of_a_variable_are_values_of_a_label(served: Callable[[str], Any], name: str) -> None:
    called = re.fullmatch(r"label_values\((.*), (\w+)\)", filled_in(VARIABLES[name]["query"], "samewise"))
    assert called is not None
    assert called[2] == name
    assert name in (await served("samewise")).labels_of(promql.parse(called[1]))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("sum(samewise:num_requests_runing)", "there is no samewise:num_requests_runing"),
        ("sum by (reason) (samewise:num_requests_waiting)", "no labels of"),
        ('samewise:engine_state{status="ready"}', "has no label status"),
        ('samewise:engine_state{state="well"}', "nothing fits"),
        ("sum by (instance) (up) / sum(up)", "no labels in common"),
    ],
)
async def test_a_query_that_finds_nothing_is_noticed(
    served: Callable[[str], Any], expression: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        (await served("samewise")).labels_of(promql.parse(expression))


def test_panels_have_their_own_places() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for first, second in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        assert not set(_cells(first)) & set(_cells(second)), (first, second)


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    assert place["x"] + place["w"] <= 24
    return ((x, y) for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"]))  # fmt: skip


def test_every_panel_asks_the_prometheus_that_is_chosen() -> None:
    assert VARIABLES["datasource"]["type"] == "datasource"
    for part in [*PANELS, *DASHBOARD["annotations"]["list"], VARIABLES["model_name"], VARIABLES["instance"]]:
        assert part["datasource"] == {"type": "prometheus", "uid": "$datasource"}
