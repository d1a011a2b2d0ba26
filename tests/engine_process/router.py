"""A router as others write them: follows servers over ZeroMQ and finds prompts in what they hold, by keys of its own.

It reads plain lists, in the order of the fields that vLLM's have, and shares no code with the server.
"""

from hashlib import sha256

import msgspec
import zmq

from tests.waiting import until

END = b"\xff" * 8


def own_key(parent, tokens):
    """A hash that differs from the server's, because routers hash by themselves."""
    return sha256(f"{parent} {tokens}".encode()).hexdigest()


class Index:
    """The prefixes that one server holds."""

    def __init__(self):
        self.held = set()  # hashes of the server
        self.key_of = {}  # the same -> key, where a prompt leads there
        self.num_cleared = 0

    def apply(self, batch):
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        for tag, *fields in events:
            getattr(self, tag)(*fields)

    def BlockStored(self, hashes, parent, tokens, size, lora_id, medium, lora_name):  # noqa: N802
        assert (lora_id, medium, lora_name, len(tokens)) == (None, "GPU", None, size * len(hashes))
        assert self.held.isdisjoint(hashes)
        self.held.update(hashes)
        key = None if parent is None else self.key_of.get(parent)
        if parent is not None and key is None:
            return  # as in llm-d
        for index, block in enumerate(hashes):
            assert 0 < block < 2**64
            key = self.key_of[block] = own_key(key, tokens[index * size : (index + 1) * size])

    def BlockRemoved(self, hashes, medium):  # noqa: N802
        assert medium == "GPU"
        for block in hashes:
            self.held.remove(block)
            self.key_of.pop(block, None)

    def AllBlocksCleared(self):  # noqa: N802
        self.num_cleared += 1
        self.held.clear()
        self.key_of.clear()

    def num_found(self, prompt, size):
        """Blocks of a prompt's beginning."""
        known, key, found = set(self.key_of.values()), None, 0
        for start in range(0, len(prompt) - size + 1, size):
            key = own_key(key, list(prompt[start : start + size]))
            if key not in known:
                break
            found += 1
        return found


class Router:
    """Follows one publisher. What it did not get it asks for, where it knows whom."""

    def __init__(self, endpoint, replay=None, topic="", **options):
        self.context = zmq.Context()
        self.index = Index()
        self.topic = topic.encode()
        self.expected = 0
        """Number of the next batch."""
        self.numbers = []
        """Numbers of all messages, in order of arrival."""
        self.late = self.context.socket(zmq.DEALER)
        self.can_ask = replay is not None
        if replay is not None:
            self.late.connect(replay)
        self.socket = self.context.socket(zmq.SUB)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)

    def read(self):
        """Take in what is there; returns whether there was anything."""
        before = len(self.numbers)
        while self.socket.poll(0):
            topic, number, batch = self.socket.recv_multipart()
            assert topic == self.topic
            assert len(number) == 8
            self.numbers.append(int.from_bytes(number, "big"))
            if self.numbers[-1] > self.expected and self.can_ask:
                self.ask(self.expected)
            self.expected = max(self.expected, self.numbers[-1])  # what is lost is lost
            self._take(self.numbers[-1], batch)
        return len(self.numbers) > before

    def ask(self, first):
        """Apply what is sent again; returns the numbers."""
        self.late.send_multipart((b"", first.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self.late.poll(20_000), "no answer"
            delimiter, number, batch = self.late.recv_multipart()
            assert delimiter == b""
            if number == END:
                assert batch == b""
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            self._take(numbers[-1], batch)

    def _take(self, number, batch):
        if number == self.expected:
            self.expected += 1
            self.index.apply(batch)

    def close(self):
        self.context.destroy(linger=0)


async def in_step(router, publisher):
    """Returns when the router has got all that was published."""

    def has_all():
        router.read()
        return router.expected == publisher._num_batches

    await until(has_all)
