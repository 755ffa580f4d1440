"""What clients read when a run is over, and when what they gave back is due."""

from types import SimpleNamespace
from typing import Any

import pytest

from dledger.client.core.errors import ClientError
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.workloads.consumers import retry_delay_ms
from dledger.jepsen_like.workloads.through import MESSAGES, read_queue
from dledger.processors.send_back import retry_level

QUEUE = MessageQueue("T", "g", 0)


class Consumer:
    """Pulls of one queue; each answer has at most *most* messages."""

    def __init__(self, begin: int, end: int, most: int = MESSAGES) -> None:
        self.begin, self.end, self.most = begin, end, most

    async def min_offset(self, queue: MessageQueue) -> int:
        return self.begin

    async def max_offset(self, queue: MessageQueue) -> int:
        return self.end

    async def pull(self, queue: MessageQueue, offset: int, **_: Any) -> Any:
        after = min(self.end, offset + self.most)
        return SimpleNamespace(messages=list(range(offset, after)), next_begin_offset=after)


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (3, 3), (3, 35), (3, 36), (0, 100)])
async def test_whole_queue_is_read_to_its_last_message(begin: int, end: int) -> None:
    found: list[Any] = []
    consumer: Any = Consumer(begin, end)
    assert await read_queue(consumer, QUEUE, found.append) == begin
    assert found == list(range(begin, end))


async def test_pull_that_gets_no_further_ends_the_read() -> None:
    found: list[Any] = []
    consumer: Any = Consumer(2, 9, most=0)
    with pytest.raises(ClientError, match="stands at 2 of 9"):
        await read_queue(consumer, QUEUE, found.append)
    assert found == []


@pytest.mark.parametrize("levels", [2, 4, 18])
def test_retry_is_due_after_the_delay_of_its_level(levels: int) -> None:
    levels_ms = [1_000 * 2**level for level in range(levels)]
    for tries in range(20):
        level = retry_level(0, tries, levels)
        assert retry_delay_ms(tries, levels_ms) == levels_ms[level - 1]
