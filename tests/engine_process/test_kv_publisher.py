"""Publishing over ZeroMQ: numbers, topics, what is sent again, and subscribers that do not read."""

import socket
from contextlib import ExitStack, closing

import pytest

from scheduler.prefix_cache import AllBlocksCleared, BlockStored
from server.engine.kv_events import encode_batch
from server.engine.kv_publisher import KVPublisher
from tests.engine_process.router import Router, in_step
from tests.waiting import until

LOCAL = "tcp://127.0.0.1:*"


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def stored(index):
    """A block without a parent, of which everything is known by its number."""
    return encode_batch([BlockStored(bytes(24) + (index + 1).to_bytes(8, "big"), None, (index,) * 4)], 0.0)


async def followed(stack, publisher, **options):
    """A router that is known to be connected: it has got a batch."""
    router = stack.enter_context(closing(Router(publisher.endpoint, publisher.replay, **options)))

    def is_there():
        publisher.publish(stored(publisher._num_batches))
        return router.read()

    await until(is_there)
    await in_step(router, publisher)
    return router


async def test_numbers_begin_at_0_and_a_late_router_gets_the_rest(stack):
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, "kv@pod@model", LOCAL)))
    for index in range(5):
        publisher.publish(stored(index))
    router = await followed(stack, publisher, topic="kv@pod@model")
    assert router.numbers[0] > 0  # it came late
    await in_step(router, publisher)
    assert sorted(router.index.key_of) == [index + 1 for index in range(router.expected)]


async def test_a_gap_is_filled_in_order(stack):
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL)))
    router = await followed(stack, publisher)
    router.socket.unsubscribe("")
    for index in range(7):
        publisher.publish(stored(1000 + index))
    missed = list(range(router.expected, publisher._num_batches))
    assert router.ask(router.expected) == missed
    assert len(missed) >= 7
    assert {1001 + index for index in range(7)} <= set(router.index.key_of)
    assert router.ask(publisher._num_batches) == []
    assert router.ask(2**64 - 1) == []


async def test_only_the_backlog_is_sent_again(stack):
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL, backlog=3)))
    for index in range(10):
        publisher.publish(stored(index))
    router = stack.enter_context(closing(Router(publisher.endpoint, publisher.replay)))
    for _ in range(20):
        assert router.ask(0) == [7, 8, 9]


async def test_a_backlog_of_large_batches_is_bounded_in_bytes(stack, monkeypatch):
    monkeypatch.setattr("server.engine.kv_publisher.BACKLOG_BYTES", 250)
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL)))
    for size in (100, 100, 100, 20, 30, 300):
        publisher.publish(bytes(size))
        kept = [len(batch) for _, batch in publisher._batches]
        assert sum(kept) == publisher._num_bytes
        assert sum(kept) <= 250 or len(kept) == 1
    assert kept == [300]


async def test_all_of_a_full_backlog_is_sent_again(stack):
    """More than ZeroMQ would queue for a peer by itself."""
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL)))
    batch = encode_batch([AllBlocksCleared()], 0.0)
    for _ in range(12_000):
        publisher.publish(batch)
    router = stack.enter_context(closing(Router(publisher.endpoint, publisher.replay)))
    router.late.rcvhwm = 1
    assert router.ask(0) == list(range(2_000, 12_000))


async def test_a_request_that_is_none_gets_no_answer_and_the_next_one_does(stack, caplog):
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL)))
    publisher.publish(stored(0))
    router = stack.enter_context(closing(Router(publisher.endpoint, publisher.replay)))
    for frames in ((b"",), (b"", b"1"), (b"x", bytes(8)), (b"", bytes(8), b""), (bytes(8),)):
        router.late.send_multipart(frames)
    assert router.ask(0) == [0]
    assert caplog.text.count("Ignored a replay request") == 5


async def test_a_topic_is_a_prefix_of_what_is_subscribed_to(stack):
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, "kv@pod@model")))
    router = stack.enter_context(closing(Router(publisher.endpoint, topic="other")))
    await followed(stack, publisher, topic="kv@pod@model")
    assert not router.read()


async def test_a_subscriber_that_does_not_read_costs_nothing_beyond_the_backlog(stack):
    publisher = stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL, backlog=10)))
    router = await followed(stack, publisher, rcvhwm=1, rcvbuf=1 << 16)
    num_before, num_batches = len(router.numbers), 2000
    large = encode_batch([AllBlocksCleared()] * 2000, 0.0)  # 68 MB in all, more than the kernel holds
    for _ in range(num_batches):
        publisher.publish(large)
    assert len(publisher._batches) == 10
    last = publisher._num_batches

    def is_back():
        publisher.publish(stored(publisher._num_batches))
        return router.read() and router.numbers[-1] >= last

    await until(is_back)
    assert sum(number < last for number in router.numbers[num_before:]) < num_batches / 2
    assert router.expected == router.numbers[-1] + 1
    assert router.numbers[-1] + 1 in router.index.key_of


async def test_closing_waits_for_nobody(stack):
    publisher = KVPublisher(LOCAL, replay=LOCAL, backlog=10_000)
    router = await followed(stack, publisher, rcvhwm=1)
    for _ in range(1000):
        publisher.publish(bytes(1 << 14))
    router.late.send_multipart((b"", bytes(8)))
    publisher.close()
    with closing(KVPublisher(publisher.endpoint)):
        pass  # the port is free again


def test_an_address_that_is_taken(stack):
    taken = stack.enter_context(closing(KVPublisher(LOCAL)))
    message = f"cannot publish KV events on {taken.endpoint}: Address already in use"
    with pytest.raises(OSError, match=message):
        KVPublisher(taken.endpoint)
    with pytest.raises(OSError, match=message):
        KVPublisher(LOCAL, replay=taken.endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://192.0.2.1:*", "Cannot assign requested address"),
        ("tcp://nobody.invalid:5557", "no network interface here has this address"),
        ("ipc:///nowhere/kv", "No such file or directory"),
    ],
)
def test_where_nobody_can_listen(endpoint, reason):
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the message is what counts)
        KVPublisher(endpoint)
    assert str(caught.value) == f"cannot publish KV events on {endpoint}: {reason}"


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc://{folder}/kv",
        "tcp://*:0",
        pytest.param("tcp://[::1]:*", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
async def test_other_addresses(stack, endpoint, tmp_path):
    publisher = stack.enter_context(closing(KVPublisher(endpoint.format(folder=tmp_path))))
    assert not publisher.endpoint.endswith((":0", ":*"))
    router = await followed(stack, publisher, ipv6="[" in endpoint)
    assert router.numbers
