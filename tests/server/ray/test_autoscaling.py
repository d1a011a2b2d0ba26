"""From loads to a number of replicas."""

from types import SimpleNamespace

import pytest

from server.ray.autoscaling import LoadPolicy


def wanted(loads: dict[str, float], running: str, target: float = 0.5, current: int = 1) -> int:
    context = SimpleNamespace(
        aggregated_metrics={"load": loads} if loads else {}, running_replicas=list(running), target_num_replicas=current
    )
    number, remembered = LoadPolicy(target)(context)
    assert remembered == {}
    return number


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ({"a": 0.0}, 1),
        ({"a": 0.5}, 1),
        ({"a": 0.51}, 2),
        ({"a": 3.0}, 6),
        ({"a": 0.5, "b": 0.5}, 2),
        ({"a": 0.25, "b": 0.25}, 1),
        ({"a": 0.1, "b": 0.1, "c": 0.31}, 2),
    ],
)
def test_the_mean_load_becomes_the_target(loads: dict[str, float], number: int) -> None:
    assert wanted(loads, "".join(loads)) == number


def test_sums_of_rounded_numbers_start_no_replica() -> None:
    assert wanted({"a": 0.1, "b": 0.2, "c": 0.3}, "abc", target=0.3) == 2  # 0.6000000000000001 / 0.3


def test_what_replicas_that_have_ended_said_does_not_count() -> None:
    assert wanted({"a": 0.4, "gone": 9.0}, "a") == 1


@pytest.mark.parametrize("loads", [{}, {"gone": 9.0}])
def test_nothing_changes_as_long_as_nobody_has_told(loads: dict[str, float]) -> None:
    assert wanted(loads, "a", current=3) == 3
