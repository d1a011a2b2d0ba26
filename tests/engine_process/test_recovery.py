"""The crash policy against simulated engines: a set of poisons, and what must come of every request."""

import random

import pytest

from model_runner.processes import Backoff
from server.engine.recovery import CrashPolicy


def crowd(*names: str) -> CrashPolicy:
    policy = CrashPolicy()
    for name in names:
        policy.add(name)
    return policy


def test_new_requests_are_released_once_in_order():
    policy = crowd("b", "a", "c")
    assert policy.release() == ["b", "a", "c"]
    assert policy.release() == []
    assert policy.num_inside == 3


def test_a_first_crash_blames_nobody_and_all_go_back_together():
    policy = crowd("a", "b")
    policy.release()
    crash = policy.crashed()
    assert (crash.victims, crash.culprit) == (("a", "b"), None)
    assert policy.num_inside == 0
    assert policy.release() == ["a", "b"]


def test_a_lone_request_is_failed_at_its_second_crash():
    policy = crowd("a")
    policy.release()
    policy.crashed()
    policy.release()
    assert policy.crashed().culprit == "a"
    assert policy.release() == []


def test_the_only_suspect_is_the_culprit_and_the_unsuspected_go_on():
    policy = crowd("poison")
    policy.release()
    policy.crashed()
    policy.add("new")
    policy.release()
    crash = policy.crashed()
    assert (crash.victims, crash.culprit) == (("new",), "poison")
    assert policy.release() == ["new"]


def test_a_suspect_is_not_covered_by_those_that_came_during_the_restarts():
    policy = crowd("poison")
    culprits = []
    for number in range(3):
        policy.add(f"beside{number}")
        policy.release()
        culprits.append(policy.crashed().culprit)
        policy.add(f"later{number}")
    assert culprits == [None, None, "poison"]


def test_several_suspects_go_back_one_at_a_time_beside_the_unsuspected():
    policy = crowd("a", "b", "c")
    for _ in range(2):
        policy.release()
        policy.crashed()
    policy.add("new")
    assert policy.release() == ["a", "new"]
    policy.remove("new")
    assert policy.release() == []
    policy.remove("a")
    assert policy.release() == ["b"]
    assert policy.crashed().culprit == "b"
    assert policy.release() == ["c"]


def test_who_was_not_inside_is_no_victim():
    policy = crowd("a")
    policy.release()
    policy.add("late")
    assert policy.crashed().victims == ("a",)
    assert policy.release() == ["a", "late"]


def test_a_death_without_requests_blames_nobody():
    policy = crowd("a")
    for _ in range(5):
        assert policy.crashed().culprit is None
    assert policy.release() == ["a"]


def test_a_request_that_left_is_forgotten():
    policy = crowd("a", "b")
    policy.release()
    policy.crashed()
    policy.release()
    policy.remove("a")
    assert policy.crashed().culprit == "b"


@pytest.mark.parametrize("seed", range(20))
def test_every_poison_of_a_crowd_fails_and_everything_else_completes(seed):
    """An engine that dies in its third step with any poison in it; a request needs ten steps."""
    rng = random.Random(seed)
    names = [f"r{index}" for index in range(rng.randint(1, 30))]
    poisons = set(rng.sample(names, rng.randint(0, len(names))))
    policy = crowd(*names)
    remaining = dict.fromkeys(names, 10)
    failed = set()
    for _ in range(2000):
        inside = [name for name in remaining if policy.is_inside(name)] + policy.release()
        if not inside:
            break
        if any(name in poisons and remaining[name] <= 7 for name in inside):
            culprit = policy.crashed().culprit
            if culprit is not None:
                failed.add(culprit)
                del remaining[culprit]
            continue
        for name in inside:
            remaining[name] -= 1
            if remaining[name] == 0:
                policy.remove(name)
                del remaining[name]
    assert not remaining
    assert failed == poisons


def test_an_engine_stays_up_by_work_or_by_time():
    backoff = Backoff(steady_s=60.0)
    assert backoff.stayed_up(steps=1, ready_s=0.0)
    assert backoff.stayed_up(steps=0, ready_s=60.0)
    assert not backoff.stayed_up(steps=0, ready_s=59.0)


def test_backoff_doubles_to_its_longest_and_then_gives_up():
    backoff = Backoff(max_failures=5, first_s=0.5, longest_s=1.5)
    assert [backoff.delay(failures) for failures in range(6)] == [0.0, 0.5, 1.0, 1.5, 1.5, None]
