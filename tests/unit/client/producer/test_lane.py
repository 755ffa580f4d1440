"""Sequences are given out, held back and repeated in order."""

from __future__ import annotations

import trio
import trio.testing

from client.producer.lane import ProducerSession
from remoting.protocol.producer_stamp import OPEN_SEQUENCES_MAX, ProducerStamp

ID = b"0123456789abcdef"


async def test_a_stamp_tells_the_lowest_sequence_still_open() -> None:
    session = ProducerSession(ID, 7)
    first, second = session.begin(), session.begin()
    assert session.stamp(second) == ProducerStamp(ID, 7, 1, 0)
    session.settle(first)
    assert session.stamp(second) == ProducerStamp(ID, 7, 1, 1)
    session.settle(second)
    assert session.first_open == 2


async def test_nothing_new_leaves_while_one_is_repeated() -> None:
    session = ProducerSession(ID, 7)
    first = session.begin()
    session.hold(first)
    left: list[int] = []

    async def send() -> None:
        await session.room()
        left.append(session.begin())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        assert left == []
        session.settle(first)
    assert left == [1]


async def test_of_two_repetitions_the_earlier_goes_first() -> None:
    session = ProducerSession(ID, 7)
    sequences = [session.begin(), session.begin(), session.begin()]
    went: list[int] = []

    async def repeat(sequence: int) -> None:
        session.hold(sequence)
        await session.turn(sequence)
        went.append(sequence)
        await trio.testing.wait_all_tasks_blocked()
        session.settle(sequence)

    async with trio.open_nursery() as nursery:
        for sequence in (2, 0, 1):
            nursery.start_soon(repeat, sequences[sequence])
    assert went == [0, 1, 2]


async def test_so_many_sequences_are_open_and_no_more() -> None:
    session = ProducerSession(ID, 7)
    for _ in range(OPEN_SEQUENCES_MAX):
        await session.room()
        session.begin()
    with trio.move_on_after(0) as waited:
        await session.room()
    assert waited.cancelled_caught
    session.settle(5)  # not the lowest
    with trio.move_on_after(0) as waited:
        await session.room()
    assert waited.cancelled_caught
    session.settle(0)
    await session.room()
    assert session.begin() == OPEN_SEQUENCES_MAX
