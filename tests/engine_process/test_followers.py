"""Notifications about requests apart from outputs: each choice's end is reported once, for any reason."""

import asyncio

import pytest

from server.engine.client import EngineState, EngineUnavailableError, RequestFailedError
from server.engine.live_requests import PendingAcks
from tests.engine_process.conftest import collect, request
from tests.engine_process.fake_engine import RAISE, REJECT
from tests.engine_process.followers import Recorded
from tests.engine_process.outputs import outputs_of
from tests.waiting import until

LONG = 100_000  # tokens that no test waits for


async def take(client, wanted, follower, count=None):
    """So many outputs, or all; then the stream is closed."""
    outputs = outputs_of(client, wanted, follower)
    taken = []
    async for output in outputs:
        taken.append(output)
        if len(taken) == count:
            break
    await outputs.aclose()
    return taken


async def test_the_end_of_a_choice_tells_its_history(running):
    follower = Recorded()
    async with running() as client:
        outputs = await take(client, request("a", 1, 2, max_tokens=5, n=2), follower)
    assert [choice for choice, _ in follower.histories] == [0, 1]
    for choice, history in follower.histories:
        assert history == [output for output in outputs if output.choice == choice][-1].history
        counts = (history.prompt_tokens, history.output_tokens, history.steps, history.prefill_steps)
        assert (history.has_ended, counts) == (True, (2, 5, 5, 1))


async def test_what_was_aborted_tells_its_history_after_its_stream_was_closed(running):
    follower = Recorded()
    async with running() as client:
        await take(client, request("a", max_tokens=LONG, n=3), follower, count=3)
        await until(lambda: len(follower.histories) == 3)
    assert sorted(choice for choice, _ in follower.histories) == [0, 1, 2]
    assert all(history.has_ended and history.output_tokens >= 1 for _, history in follower.histories)


async def test_a_single_choice_that_was_aborted_tells_its_own(running):
    follower = Recorded()
    async with running() as client:
        outputs = outputs_of(client, request("a", max_tokens=LONG, n=2), follower)
        await anext(outputs)
        client.abort_choice("a", 1)
        await until(lambda: len(follower.histories) == 1)
        assert follower.histories[0][0] == follower.histories[0][1].choice == 1
        (running_one,) = await client.explain("a")
        assert (running_one.choice, running_one.has_ended) == (0, False)
        await outputs.aclose()
        await until(lambda: len(follower.histories) == 2)


async def test_a_running_request_is_explained_and_others_are_not(running):
    async with running() as client:
        outputs = outputs_of(client, request("a", max_tokens=LONG, n=2), Recorded())
        await anext(outputs)
        first = await client.explain("a")
        again, _ = await asyncio.gather(client.explain("a"), client.explain("a"))
        assert [history.choice for history in first] == [0, 1]
        assert first[0].as_of <= again[0].as_of
        assert first[0].steps <= again[0].steps
        assert await client.explain("unknown") == ()
        await outputs.aclose()
        assert await client.explain("a") == ()


async def test_who_asks_after_an_abort_hears_of_it_first(running):
    follower = Recorded()
    async with running() as client:
        await take(client, request("a", max_tokens=LONG, n=3), follower, count=3)
        assert follower.histories == []
        assert await client.explain("a") == ()
        assert sorted(choice for choice, _ in follower.histories) == [0, 1, 2]
        assert await client.explain("a") == (), "nothing is left of it to be asked for"


async def test_an_engine_that_dies_interrupts_and_the_next_one_tells(running):
    follower = Recorded()
    async with running() as client:
        poison = asyncio.create_task(collect(client, request("poison", RAISE)))
        await take(client, request("a", max_tokens=40), follower)
        with pytest.raises(RequestFailedError):
            await poison
    assert follower.num_interruptions >= 1
    ((_, history),) = follower.histories
    assert 0 < history.output_tokens < 40  # those before are the dead engine's


@pytest.mark.parametrize("how", ["rejected", "culprit", "stopped"])
async def test_who_fails_without_a_history_is_told_to_have_ended(running, how):
    follower = Recorded()
    prompt = {"rejected": REJECT, "culprit": RAISE, "stopped": 7}[how]
    async with running() as client:
        task = asyncio.create_task(take(client, request("a", prompt, max_tokens=LONG, n=2), follower))
        if how == "stopped":
            await until(lambda: client.stats.steps > 0)
            await client.stop()
        with pytest.raises((RequestFailedError, EngineUnavailableError)):
            await task
    assert follower.histories == [(0, None), (1, None)]


async def test_nothing_is_known_of_what_no_engine_has(running):
    follower = Recorded()
    async with running(loads=("", "slowly")) as client:
        held = asyncio.create_task(take(client, request("held", max_tokens=LONG), follower))
        poison = asyncio.create_task(collect(client, request("poison", RAISE)))
        await until(lambda: client.state is EngineState.RESTARTING)
        assert await client.explain("held") == ()
        held.cancel()
        await asyncio.wait([held])
        assert follower.histories == [(0, None)]
        with pytest.raises(RequestFailedError):
            await poison


async def test_a_question_to_an_engine_that_dies_is_answered_with_nothing():
    pending, follower = PendingAcks(), Recorded()
    pending.expect("a", [0, 1], follower)
    sent = []
    answers = [asyncio.ensure_future(pending.ask("a", lambda: sent.append("a"))) for _ in range(2)]
    await asyncio.sleep(0)
    assert sent == ["a"]
    pending.engine_ended()
    assert [await answer for answer in answers] == [(), ()]
    assert follower.histories == [(0, None), (1, None)]


def test_many_single_aborts_are_told_one_by_one():
    pending, follower = PendingAcks(), Recorded()
    pending.expect("a", range(3), follower)
    pending.expect("b", [1], follower)
    for choice in (2, 0):
        pending.abort_acknowledged("a", choice, ())
    assert follower.histories == [(2, None), (0, None)]
    assert pending.is_expected("a")
    pending.abort_acknowledged("a", None, ())
    pending.abort_acknowledged("a", None, ())
    assert follower.histories[2:] == [(1, None)]
    assert (pending.is_expected("a"), pending.is_expected("b")) == (False, True)


async def test_who_asks_and_leaves_takes_nothing_from_others():
    pending = PendingAcks()
    leaves, stays = (asyncio.ensure_future(pending.ask("a", lambda: None)) for _ in range(2))
    leaves.cancel()
    await asyncio.wait([leaves])
    pending.explained("a", ("what",))
    assert await stays == ("what",)
