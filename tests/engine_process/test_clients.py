"""Guarantees of a client, with the engine in a process."""

import asyncio
from dataclasses import replace

import pytest

from model_runner.contract import SamplingParams
from model_runner.processes import Backoff
from scheduler.interface import BACKGROUND, BeamSearch, ChoiceState, EngineStats, FinishReason
from server.engine.client import (
    EngineClient,
    EngineState,
    EngineUnavailableError,
    QueueFullError,
    RequestFailedError,
)
from server.engine.supervisor import WATCHDOG_TICKS, EngineLimits
from tests.engine_process.conftest import MAX_NUM_SEQS, MAX_WAITING, collect, request, tokens_of
from tests.engine_process.fake_engine import RAISE, REJECT, VOCAB, expected
from tests.engine_process.followers import Recorded
from tests.engine_process.outputs import outputs_of
from tests.waiting import until

LONG = 100_000  # tokens that no test waits for


async def test_a_stream_is_what_the_engine_generates(running):
    async with running() as client:
        wanted = request("a", 5, 6, max_tokens=30, seed=2**64 - 1)
        outputs = [output async for output in outputs_of(client, wanted)]
    assert tokens_of(outputs) == {0: expected(wanted)}
    assert [output.finish_reason for output in outputs] == [None] * 29 + [FinishReason.LENGTH]


async def test_many_streams_with_several_choices_at_once(running):
    wanted = [request(f"r{i}", i, max_tokens=5 + i, n=1 + i % 3, seed=i) for i in range(24)]
    async with running() as client:
        got = await asyncio.gather(*(collect(client, r) for r in wanted))
        assert client.stats.num_running == 0
        assert client.stats.steps > 0
    assert got == [{c.index: expected(r, c.index) for c in r.choices} for r in wanted]


async def test_choices_may_end_at_different_times(running):
    first = expected(request("a", max_tokens=20))
    sampling = SamplingParams(stop_token_ids=(first[4],))
    wanted = replace(request("a", max_tokens=20, n=2), sampling=sampling)
    async with running() as client:
        assert await collect(client, wanted) == {0: expected(wanted), 1: expected(wanted, 1)}
    assert len(expected(wanted)) == 5


async def test_a_request_can_enter_with_outputs(running):
    wanted = request("a", max_tokens=20)
    tokens = expected(wanted)
    async with running() as client:
        resumed = replace(wanted, choices=(ChoiceState(0, tokens[:12]),))
        assert await collect(client, resumed) == {0: tokens[12:]}


async def test_closing_the_stream_aborts_in_the_engine(running):
    async with running() as client:
        stream = outputs_of(client, request("a", max_tokens=LONG, n=3))
        await anext(stream)
        await until(lambda: client.stats.num_running == 3)
        await stream.aclose()
        await until(lambda: client.stats.num_running == 0)
        assert await collect(client, request("a")) == {0: expected(request("a"))}


async def test_cancelling_the_consumer_aborts_in_the_engine(running):
    async with running() as client:
        consumer = asyncio.create_task(collect(client, request("a", max_tokens=LONG)))
        await until(lambda: client.stats.num_running == 1)
        consumer.cancel()
        await asyncio.wait([consumer])
        await until(lambda: client.stats.num_running == 0)


async def test_an_aborted_choice_ends_alone(running):
    wanted = request("a", max_tokens=200, n=2)
    async with running() as client:
        outputs = []
        async for output in outputs_of(client, wanted):
            outputs.append(output)
            if output.choice == 0 and len(tokens_of(outputs)[0]) == 7:
                client.abort_choice("a", 0)
        client.abort_choice("a", 0)
        client.abort_choice("unknown", 0)
    tokens = tokens_of(outputs)
    assert 7 <= len(tokens[0]) < 200  # some more may have been on their way
    assert tokens == {0: expected(wanted)[: len(tokens[0])], 1: expected(wanted, 1)}


async def test_aborting_the_last_choice_ends_the_stream(running):
    async with running() as client:
        async for output in outputs_of(client, request("a", max_tokens=LONG)):
            client.abort_choice("a", output.choice)
        await until(lambda: client.stats.num_running == 0)


async def test_a_slow_consumer_holds_up_nobody(running):
    slow = request("slow", max_tokens=40)
    async with running() as client:
        stream = outputs_of(client, slow)
        first = await anext(stream)
        assert await collect(client, request("quick", max_tokens=60)) == {0: expected(request("quick", max_tokens=60))}
        await until(lambda: client.stats.num_running == 0)
        assert tokens_of([first, *[output async for output in stream]]) == {0: expected(slow)}


async def test_a_full_queue_refuses_and_has_room_again(running):
    room = MAX_NUM_SEQS + MAX_WAITING
    async with running() as client:
        stream = outputs_of(client, request("many", max_tokens=LONG, n=room - 1))
        await anext(stream)
        with pytest.raises(QueueFullError, match=f"{room - 1} choices"):
            await collect(client, request("two", n=2))
        assert await collect(client, request("one")) == {0: expected(request("one"))}
        await stream.aclose()
        assert set(await collect(client, request("all", n=room, max_tokens=1))) == set(range(room))


async def test_each_beam_of_a_search_takes_a_place(running):
    room = MAX_NUM_SEQS + MAX_WAITING
    async with running() as client:
        stream = outputs_of(client, request("many", max_tokens=LONG, n=room - 3))
        await anext(stream)
        with pytest.raises(QueueFullError, match="4 more"):
            await collect(client, replace(request("search"), beam_search=BeamSearch(4)))
        await stream.aclose()


@pytest.mark.parametrize("other", ["ann", "bob"])
async def test_what_one_client_holds_keeps_no_other_out(running, other):
    """Two clients each have half of the places guaranteed; a client that has more waits."""
    room = MAX_NUM_SEQS + MAX_WAITING
    async with running() as client:
        stream = outputs_of(client, replace(request("many", max_tokens=LONG, n=room), client="ann"))
        await anext(stream)
        with pytest.raises(QueueFullError):
            await collect(client, replace(request("one more"), client="ann"))
        half = replace(request("half", n=room // 2), client=other)
        if other == "ann":
            with pytest.raises(QueueFullError):
                await collect(client, half)
            return
        taken = asyncio.create_task(collect(client, half))
        await until(lambda: client.stats.num_running + client.stats.num_waiting == room + room // 2)
        with pytest.raises(QueueFullError, match=f"holds {room // 2} of them, and its share is {room // 2}"):
            await collect(client, replace(request("too much"), client="bob"))
        await stream.aclose()
        assert set(await taken) == set(range(room // 2)), "nothing that was taken is lost"


async def test_a_request_that_never_fits_fails_alone(running):
    async with running() as client:
        other = asyncio.create_task(collect(client, request("other")))
        with pytest.raises(RequestFailedError, match="does not fit"):
            await collect(client, request("large", REJECT))
        assert await other == {0: expected(request("other"))}
        assert client.num_restarts == 0


async def test_a_live_id_is_not_taken_twice(running):
    async with running() as client:
        stream = outputs_of(client, request("a", max_tokens=LONG))
        await anext(stream)
        with pytest.raises(ValueError, match="in use"):
            await collect(client, request("a"))
        assert (await anext(stream)).request_id == "a"
        await stream.aclose()


async def test_states_and_info_from_start_to_stop(make):
    client: EngineClient = make(loads=("slowly",))
    assert client.state is EngineState.STARTING
    await client.start()
    assert client.state is EngineState.STARTING
    with pytest.raises(EngineUnavailableError, match="loading"):
        _ = client.info
    with pytest.raises(EngineUnavailableError, match="loading"):
        await collect(client, request("early"))
    await client.wait_ready()
    assert client.state is EngineState.READY
    assert (client.info.vocab_size, client.info.max_num_seqs) == (VOCAB, MAX_NUM_SEQS)
    await client.stop()
    assert client.state is EngineState.DRAINING
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        await collect(client, request("late"))
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        await client.wait_ready()


async def test_a_model_that_cannot_be_served_is_one_clear_line(make, caplog):
    client = make(loads=("refuse",))
    await client.start()
    with pytest.raises(EngineUnavailableError, match="the model needs 80 GiB, 16 GiB are free"):
        await client.wait_ready()
    assert client.state is EngineState.FAILED
    with pytest.raises(EngineUnavailableError, match="80 GiB"):
        await collect(client, request("a"))
    with pytest.raises(EngineUnavailableError, match="80 GiB"):
        _ = client.info
    assert "Traceback" not in caplog.text
    await client.stop()
    assert client.state is EngineState.FAILED


async def test_an_unexpected_error_while_loading_fails_the_start(make):
    client = make(loads=("raise",))
    await client.start()
    with pytest.raises(EngineUnavailableError, match="did not start"):
        await client.wait_ready()
    await client.stop()


async def test_drain_lets_running_requests_finish_and_takes_no_new_ones(running):
    wanted = request("a", max_tokens=60)
    async with running() as client:
        consumer = asyncio.create_task(collect(client, wanted))
        await until(lambda: client.stats.num_running == 1)
        drain = asyncio.create_task(client.drain(30.0))
        await asyncio.sleep(0)
        assert client.state is EngineState.DRAINING
        with pytest.raises(EngineUnavailableError):
            await collect(client, request("late"))
        await drain
        assert await consumer == {0: expected(wanted)}


async def test_drain_recovers_from_a_crash(running):
    wanted = request("a", max_tokens=60)
    async with running() as client:
        poison = asyncio.create_task(collect(client, request("poison", RAISE, max_tokens=60)))
        consumer = asyncio.create_task(collect(client, wanted))
        await until(lambda: client.stats.num_running == 2 or client.num_restarts)  # it may have crashed meanwhile
        await client.drain(30.0)
        with pytest.raises(RequestFailedError):
            await poison
        assert await consumer == {0: expected(wanted)}


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_drain_fails_what_does_not_finish_in_time(running, grace_s):
    async with running() as client:
        consumer = asyncio.create_task(collect(client, request("a", max_tokens=LONG)))
        await until(lambda: client.stats.num_running == 1)
        await client.drain(grace_s)
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await consumer


async def test_drain_without_requests_returns_at_once(running, caplog):
    async with running() as client:
        await client.drain(0.0)
    assert "did not finish" not in caplog.text


async def test_stop_fails_running_requests_and_may_be_repeated(running):
    async with running() as client:
        consumer = asyncio.create_task(collect(client, request("a", max_tokens=LONG)))
        await until(lambda: client.stats.num_running == 1)
        await asyncio.gather(client.stop(), client.stop())
        with pytest.raises(EngineUnavailableError):
            await consumer
        await client.stop()


async def test_stop_before_start_and_before_ready(make):
    never_started = make()
    await never_started.stop()
    client = make(loads=("slowly",))
    await client.start()
    waiting = asyncio.create_task(client.wait_ready())
    await asyncio.sleep(0)
    await client.stop()
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        await waiting


async def test_a_poison_alone_is_failed_and_the_engine_goes_on(running):
    async with running() as client:
        with pytest.raises(RequestFailedError, match="crashed repeatedly"):
            await collect(client, request("poison", RAISE))
        assert await collect(client, request("next")) == {0: expected(request("next"))}
        assert client.num_restarts == 2
        assert client.state is EngineState.READY


async def test_a_poison_in_a_crowd_fails_alone(running):
    crowd = [request(f"r{i}", i, max_tokens=12, n=1 + i % 2, seed=i) for i in range(8)]
    async with running() as client:
        poison = asyncio.create_task(collect(client, request("poison", RAISE)))
        streams = [asyncio.create_task(collect(client, r)) for r in crowd]
        assert await asyncio.gather(*streams) == [{c.index: expected(r, c.index) for c in r.choices} for r in crowd]
        with pytest.raises(RequestFailedError):
            await poison


async def test_two_poisons_in_a_crowd_both_fail_and_leave_the_others(running):
    crowd = [request(f"r{i}", i, max_tokens=12) for i in range(4)]
    async with running() as client:
        mixed = [crowd[0], request("p1", RAISE), *crowd[1:3], request("p2", RAISE), crowd[3]]
        results = await asyncio.gather(*(collect(client, r) for r in mixed), return_exceptions=True)
    assert [type(r) for r in results if isinstance(r, Exception)] == [RequestFailedError] * 2
    assert [r for r in results if isinstance(r, dict)] == [{0: expected(r)} for r in crowd]


async def test_requests_that_come_during_a_restart_wait_for_it(running):
    async with running(loads=("", "slowly", "slowly")) as client:
        poison = asyncio.create_task(collect(client, request("poison", RAISE)))
        await until(lambda: client.state is EngineState.RESTARTING)
        assert client.info.vocab_size == VOCAB
        late = asyncio.create_task(collect(client, request("late")))
        leaves = outputs_of(client, request("leaves", max_tokens=LONG))
        leaving = asyncio.create_task(anext(leaves))
        await asyncio.sleep(0.01)
        assert client.state is EngineState.RESTARTING
        leaving.cancel()
        await asyncio.wait([leaving])
        await client.wait_ready()
        assert client.state is EngineState.READY
        assert await late == {0: expected(request("late"))}
        with pytest.raises(RequestFailedError):
            await poison


async def test_nothing_runs_in_an_engine_that_has_ended(running):
    async with running(loads=("", "slowly")) as client:
        streams = [asyncio.create_task(collect(client, request("poison", RAISE, max_tokens=60, n=2)))]
        lines = replace(request("lines", max_tokens=60, n=3), tier=BACKGROUND)
        streams.append(asyncio.create_task(collect(client, lines)))
        await until(lambda: client.state is EngineState.RESTARTING)
        assert (client.num_held, client.num_background_held) == (5, 3)
        assert client.stats == EngineStats(
            steps=client.stats.steps, steps_done=client.stats.steps, step_s=client.stats.step_s
        )
        assert client.stats.steps > 0
        await client.wait_ready()
        assert (client.num_held, client.num_background_held) == (0, 0)
        await asyncio.gather(*streams, return_exceptions=True)


async def test_what_is_not_taken_is_refused_at_once(running):
    async with running() as client:
        room = MAX_NUM_SEQS + MAX_WAITING
        with pytest.raises(QueueFullError):
            client.submit(request("large", n=room + 1), lambda: None, Recorded())
        assert await collect(client, request("fits")) == {0: expected(request("fits"))}


async def test_a_restart_that_fails_at_first_is_tried_again(running):
    async with running(loads=("", "raise", "refuse", "")) as client:
        stream = asyncio.create_task(collect(client, request("poison", RAISE)))
        with pytest.raises(RequestFailedError):
            await stream
        assert client.num_restarts == 4
        assert await collect(client, request("next")) == {0: expected(request("next"))}


async def test_restarts_that_keep_failing_fail_everything(running):
    async with running(loads=("", "refuse", "raise", "refuse")) as client:
        streams = [asyncio.create_task(collect(client, request(f"r{i}", RAISE, max_tokens=LONG))) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineUnavailableError, match=r"failed 3 times in a row .*80 GiB"):
                await stream
        assert client.state is EngineState.FAILED
        with pytest.raises(EngineUnavailableError, match="failed 3 times"):
            await collect(client, request("late"))


class CountedBackoff:
    """Remembers what it is asked; waits for nothing and never gives up."""

    def __init__(self, steady_s: float = 60.0) -> None:
        self.failures: list[int] = []
        self._rule = Backoff(steady_s=steady_s)

    def stayed_up(self, steps: int, ready_s: float) -> bool:
        return self._rule.stayed_up(steps, ready_s)

    def delay(self, failures: int) -> float:
        self.failures.append(failures)
        return 0.0


def counting(backoff: CountedBackoff) -> EngineLimits:
    return EngineLimits(max_waiting=MAX_WAITING, engine_timeout_s=60.0, backoff=backoff)


async def test_an_engine_that_dies_whenever_it_is_ready_is_given_up(make):
    client = make(loads=("die",) * 10)
    await client.start()
    await until(lambda: client.state is EngineState.FAILED or client.num_restarts > 3)
    assert client.num_restarts == 2
    with pytest.raises(
        EngineUnavailableError, match=r"failed 3 times in a row before its first step\. Last"
    ) as refused:
        await client.wait_ready()
    assert refused.value.told == "It has failed. The server's log says why.", "clients learn of no process"
    await client.stop()


async def test_an_engine_that_was_ready_for_long_has_stayed_up(make):
    backoff = CountedBackoff(steady_s=0.0)
    client = make(loads=("die",) * 4, limits=counting(backoff))
    await client.start()
    await until(lambda: client.num_restarts == 4)
    assert backoff.failures == [0] * 4
    await client.stop()


async def test_an_engine_that_has_done_a_step_has_stayed_up(make):
    backoff = CountedBackoff()
    client = make(loads=("die", "die"), limits=counting(backoff))
    await client.start()
    await until(lambda: client.num_restarts == 2)
    with pytest.raises(RequestFailedError):
        await collect(client, request("poison", RAISE))
    assert backoff.failures == [1, 2, 0, 0]
    await client.stop()


async def test_requests_that_kill_it_in_its_first_step_do_not_end_the_server(running):
    deadly = replace(request("poison", RAISE), choices=(ChoiceState(0, (1, 2, 3)),))
    async with running() as client:
        for number in range(4):
            with pytest.raises(RequestFailedError):
                await collect(client, replace(deadly, request_id=f"poison{number}"))
        assert await collect(client, request("next")) == {0: expected(request("next"))}
        assert client.num_restarts == 8


async def test_an_idle_client_is_not_taken_for_silent(running, monkeypatch):
    limits = EngineLimits(max_waiting=MAX_WAITING, engine_timeout_s=0.2)
    ticks, sleep = [], asyncio.sleep

    async def counted(seconds: float) -> None:
        ticks.extend([seconds] * (seconds == limits.engine_timeout_s / WATCHDOG_TICKS))
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", counted)
    async with running(limits=limits) as client:
        await until(lambda: len(ticks) > 3 * WATCHDOG_TICKS)
        assert client.state is EngineState.READY
        assert client.num_restarts == 0


async def test_background_work_takes_no_place_in_the_queue_and_is_not_waited_for(running):
    wanted = request("a", max_tokens=60)
    async with running() as client:
        behind = [
            asyncio.create_task(collect(client, replace(request(f"b{index}", max_tokens=LONG), tier=BACKGROUND)))
            for index in range(MAX_NUM_SEQS + MAX_WAITING + 1)
        ]
        await until(lambda: client.stats.num_running > 0)
        consumer = asyncio.create_task(collect(client, wanted))
        await until(lambda: client.stats.num_running + client.stats.num_waiting > len(behind))
        await client.drain(30.0)
        assert await consumer == {0: expected(wanted)}
        for one in await asyncio.gather(*behind, return_exceptions=True):
            assert isinstance(one, EngineUnavailableError)
