"""Frames on a stream, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from server.engine.messages import FrameReader, framed


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_come_back_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]):
    stream = b"".join(map(framed, payloads))
    reader, got, at = FrameReader(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        got += reader.feed(stream[at : at + size])
        at += size
    assert got == payloads
