"""Counting in windows, against all hits written down; here and in a Redis."""

import asyncio
import logging
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from limits.errors import StorageError

from server.tenants.usage_counters import Count, CountedUse, UsageCounters, Window
from tests.server.tenants.keys import Clock

MINUTE = Window("ann/tokens", "tokens", 100, 60, slides=True)
DAY = Window("ann/tokens/day", "tokens", 100, 86400, slides=False)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Redis of this test's own."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server here (Debian: apt install redis-server)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ready to accept connections" in line:
            break
    yield f"redis://127.0.0.1:{port}"
    process.terminate()
    process.communicate()


@pytest.fixture(params=["here", "in a Redis"])
async def windows(request: pytest.FixtureRequest, clock: Clock):
    if request.param == "here":
        yield UsageCounters()
        return
    url = request.getfixturevalue("redis_url")
    clock.now += 86400 * random.SystemRandom().randrange(1, 10**6)  # nobody else's windows
    made = UsageCounters(url)
    yield made
    await made.close()


def used(hits: list[tuple[float, int]], window: Window, now: float) -> float:
    """The truth: of the hits in this window all, of those in the one before by the share of it that is not long ago."""
    start = now // window.seconds * window.seconds
    share = 1 - (now - start) / window.seconds if window.slides else 0
    before = sum(cost for at, cost in hits if start - window.seconds <= at < start)
    return before * share + sum(cost for at, cost in hits if at >= start)


@pytest.mark.parametrize("window", [MINUTE, DAY], ids=["a minute", "a day"])
async def test_what_is_taken_is_what_there_is(windows: UsageCounters, clock: Clock, window: Window) -> None:
    pick, hits, taken = random.Random(1), [], []
    for _ in range(300):
        clock.now += pick.choice([0, 1, window.seconds / 40, window.seconds / 5])
        if taken and pick.random() < 0.2:
            place = pick.randrange(len(taken))
            cost = pick.randint(0, hits[place][1])
            await windows.correct(taken[place], cost)
            taken[place] = replace(taken[place], cost=cost)
            hits[place] = (hits[place][0], cost)
            continue
        cost, before = pick.randint(1, 60), used(hits, window, clock.now)
        count, one = await windows.take(window, cost)
        assert (one is not None) == (before + cost <= window.limit)
        if one is not None:
            hits.append((clock.now, cost))
            taken.append(one)
        assert count.used == pytest.approx(used(hits, window, clock.now))
        assert count == await windows.look(window)
    assert len(taken) > 50


@pytest.mark.parametrize("window", [MINUTE, DAY], ids=["a minute", "a day"])
def test_after_the_wait_there_is_room_and_not_before(window: Window) -> None:
    """A step at a time: the first moment at which so much more fits."""
    pick = random.Random(2)
    for _ in range(200):
        before = pick.randint(0, 100) if window.slides else 0
        count = Count(window, before, pick.randint(0, 100), elapsed=pick.uniform(0, window.seconds))
        cost = pick.randint(1, 100)
        hits = [(-1.0, count.before), (0.0, count.now)]
        wait = count.wait_s(cost)
        assert used(hits, window, count.elapsed + wait + 1e-6) + cost <= window.limit + 1e-3
        if wait:
            assert used(hits, window, count.elapsed + wait * 0.999 - 1e-3) + cost > window.limit - 1e-3
        assert used(hits, window, count.elapsed + count.reset_s + 1e-6) == pytest.approx(0, abs=1e-3)


async def test_of_many_at_once_none_gets_what_is_not_there(windows: UsageCounters) -> None:
    results = await asyncio.gather(*(windows.take(MINUTE, 7) for _ in range(50)))
    got = [one for _, one in results if one is not None]
    assert len(got) <= 100 // 7
    assert (await windows.look(MINUTE)).now == 7 * len(got)
    _, one = await windows.take(MINUTE, 100 - 7 * len(got))
    assert one is not None, "nothing is lost to those that were refused"


async def test_two_servers_share_a_limit(redis_url: str, clock: Clock) -> None:
    clock.now += 86400 * random.SystemRandom().randrange(1, 10**6)
    first, second = UsageCounters(redis_url), UsageCounters(redis_url)
    _, one = await first.take(MINUTE, 60)
    assert isinstance(one, CountedUse)
    assert (await second.take(MINUTE, 60))[1] is None
    await first.correct(one, 10)
    assert (await second.take(MINUTE, 60))[1] is not None
    await first.close()
    await second.close()


async def test_while_redis_is_away_each_server_counts_for_itself(
    clock: Clock, caplog: pytest.LogCaptureFixture, redis_url: str
) -> None:
    caplog.set_level(logging.INFO)
    away = UsageCounters("redis://127.0.0.1:1")
    assert (await away.take(MINUTE, 60))[1] is not None
    assert (await away.take(MINUTE, 60))[1] is None
    assert [line for line in caplog.messages if line.startswith("Redis does not answer")] == caplog.messages[:1]
    caplog.clear()
    clock.now += 10
    back = UsageCounters(redis_url)
    back._lose(StorageError(OSError("gone")))
    clock.now += 10
    await back.take(MINUTE, 1)
    assert caplog.messages[-1].startswith("Redis answers again")
    await back.close()
    await away.close()


async def test_what_was_corrected_while_redis_was_away_is_told_when_it_is_back(redis_url: str, clock: Clock) -> None:
    clock.now += 86400 * random.SystemRandom().randrange(1, 10**6)
    windows, other = UsageCounters(redis_url), UsageCounters(redis_url)
    _, one = await windows.take(DAY, 60)
    assert one is not None
    windows._lose(StorageError(OSError("gone")))
    await windows.correct(one, 10)
    assert (await other.look(DAY)).now == 60
    clock.now += 10
    await windows.look(DAY)
    assert (await other.look(DAY)).now == 10
    await windows.close()
    await other.close()


async def test_what_is_refused_takes_nothing_from_others_not_even_for_a_moment(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, amounts = UsageCounters(), []
    incr = windows._own.incr

    async def noted(key: str, expiry: float, amount: int = 1) -> int:
        amounts.append(amount)
        return await incr(key, expiry, amount=amount)

    monkeypatch.setattr(windows._own, "incr", noted)
    await windows.take(MINUTE, 60)
    assert (await windows.take(MINUTE, 41))[1] is None
    assert (await windows.take(MINUTE, 40))[1] is not None
    assert amounts == [60, 40]


@pytest.mark.parametrize("url", ["memory", "http://me:secret@there", "redis://:secret@host:port"])
def test_what_is_no_redis_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="redis_url is not usable") as caught:
        UsageCounters(url)
    assert "secret" not in str(caught.value)
