from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import trio

from remoting import garbage
from remoting.garbage import FULL_INTERVAL_S, GarbageCollection


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = trio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.set()
        await trio.sleep_forever()


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> Node:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return first


def watched(node: Node) -> Callable[[], bool]:
    """Return a function that keeps no reference, as an assertion of a value would."""
    reference = weakref.ref(node)
    return lambda: reference() is None


@pytest.fixture
def collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[GarbageCollection]:
    monkeypatch.setattr(garbage, "OBJECTS_MIN", 1)
    gc.collect()
    collection = GarbageCollection(Clock())  # type: ignore[arg-type]  # two methods will do
    with collection.in_charge():
        yield collection
    gc.collect()


def survivors(collections: int) -> None:
    """Let so many collections of young objects pass."""
    for _ in range(collections):
        gc.collect(1)


def test_garbage_leaves_frozen_objects_alone_until_they_have_doubled(
    collection: GarbageCollection,
) -> None:
    old = cycle()
    is_gone = watched(old)
    survivors(30)
    collection.look()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    del old
    survivors(5)
    collection.look()
    assert not is_gone(), "it was frozen, and is not looked at"

    gc.disable()  # they come slowly: not as many of them between two looks
    kept = [[number] for number in range(2 * frozen)]
    gc.enable()
    survivors(5)
    collection.look()
    assert not is_gone(), "they have doubled, but the last full look was just now"
    collection._clock.now += FULL_INTERVAL_S  # type: ignore[attr-defined]  # the clock above
    survivors(5)
    collection.look()
    assert is_gone()
    assert len(kept) == 2 * frozen


def test_garbage_among_new_objects_is_collected(collection: GarbageCollection) -> None:
    new = cycle()
    is_gone = watched(new)
    survivors(4)
    collection.look()
    del new
    assert gc.get_freeze_count() == 0, "too few to look at"
    survivors(1)
    collection.look()
    assert is_gone()


async def test_garbage_collection_looks_every_second(collection: GarbageCollection) -> None:
    new = cycle()
    is_gone = watched(new)
    del new
    survivors(5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collection.run)
        await collection._clock.sleeps.wait()  # type: ignore[attr-defined]  # the clock above
        nursery.cancel_scope.cancel()
    assert is_gone()
    assert gc.get_freeze_count() > 0


def test_garbage_collection_gives_the_interpreter_its_part_back() -> None:
    before = gc.get_threshold()
    with GarbageCollection(Clock()).in_charge():  # type: ignore[arg-type]  # see above
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > before[2]
        gc.freeze()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
