"""Requests of one peer: what is admitted, what is given back, how long silence may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting.connection_limits import ConnectionLimits, Silence
from dledger.remoting.handling import OpenRequests
from dledger.remoting.processor import Limiter
from dledger.remoting.protocol.command import RemotingCommand, request

LIMITS = ConnectionLimits(max_in_flight=3, max_in_flight_bytes=100)


def asked(size_bytes: int) -> RemotingCommand:
    return request(10, body=b"x" * size_bytes)


def test_larger_request_than_the_limit_is_admitted_alone() -> None:
    held, limiter = OpenRequests(LIMITS), Limiter("send", 10)
    large, small = asked(1_000), asked(1)
    assert held.admit(large, limiter, 1.0) is None
    assert held.admit(small, limiter, 2.0) == "[OVERLOAD]too many requests of this connection"
    assert (len(held), held.size_bytes, limiter.in_use) == (1, 1_000, 1)
    finished = held.finish(large)
    assert finished is not None
    assert (finished.asked, finished.size_bytes, finished.arrived_s) == (large, 1_000, 1.0)
    assert held.finish(large) is None
    assert (len(held), held.size_bytes, limiter.in_use) == (0, 0, 0)
    assert held.admit(small, limiter, 3.0) is None


def test_full_limiter_is_named_and_nothing_is_held() -> None:
    held, limiter = OpenRequests(LIMITS), Limiter("send", 1)
    assert limiter.try_acquire()
    assert held.admit(asked(5), limiter, 0.0) == "[OVERLOAD]1 requests of kind send are open"
    assert (len(held), held.size_bytes, limiter.in_use) == (0, 0, 1)


@given(st.lists(st.one_of(st.integers(0, 60), st.sampled_from(["finish", "end_all"])), max_size=30))
def test_requests_hold_what_is_open_and_no_more(steps: list[int | str]) -> None:
    held, limiter = OpenRequests(LIMITS), Limiter("send", 5)
    model: list[RemotingCommand] = []
    for step in steps:
        if step == "end_all":
            held.end_all()
            model.clear()
        elif step == "finish":
            if model:
                assert held.finish(model.pop(0)) is not None
        elif isinstance(step, int):
            command, used = asked(step), sum(len(bytes(each.body)) for each in model)
            fits = not model or (len(model) < 3 and used + step <= 100)
            assert (held.admit(command, limiter, 0.0) is None) == fits
            if fits:
                model.append(command)
        assert len(held) == limiter.in_use == len(model)
        assert held.size_bytes == sum(len(bytes(each.body)) for each in model)


@pytest.mark.parametrize(
    ("received_s", "sent_s", "ends_s"), [(5.0, 0.0, 125.0), (5.0, 7.0, 127.0), (9.0, 7.0, 129.0)]
)
def test_silence_between_frames_counts_both_ways(
    received_s: float, sent_s: float, ends_s: float
) -> None:
    silence = Silence(ConnectionLimits())
    silence.last_received_s = received_s
    assert (silence.ends_s(sent_s), silence.reason) == (ends_s, "idle")


def test_frame_must_be_whole_in_time_however_slowly_it_comes() -> None:
    silence = Silence(ConnectionLimits(frame_timeout_s=60.0))
    silence.note_frames(10.0, has_whole=False, has_part=True)
    silence.last_received_s = 40.0
    silence.note_frames(40.0, has_whole=False, has_part=True)
    assert (silence.ends_s(45.0), silence.reason) == (70.0, "half a frame and then silence")
    silence.note_frames(50.0, has_whole=True, has_part=True)
    assert silence.ends_s(0.0) == 110.0
    silence.read_again(80.0)
    assert silence.ends_s(0.0) == 140.0
    silence.note_frames(90.0, has_whole=True, has_part=False)
    silence.read_again(95.0)
    assert not silence.is_in_frame
    assert silence.ends_s(0.0) == 160.0
