"""Copies the messages of one queue, from where the target ends.

Each append names the offset that it expects. So a copy that was interrupted, repeated, or is made
by two mirrors at a time stores each message once and in its place: what is refused names the
target's end, and the copy goes on from there. Before a step appends behind what stands at the
target, it compares the newest message there with the source's: a topic that was made again at
either side, or that a producer sends to at the target, is not continued. Where both sides end at
the same offset, that is compared once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from typing_extensions import Buffer

from dledger.client.admin.copies import offsets_of, without_store
from dledger.client.core.errors import (
    OffsetIllegalError,
    OffsetNotExpectedError,
    RequestTimedOutError,
)
from dledger.client.core.route import MessageQueue
from dledger.mirror.plan import (
    Begin,
    Bounds,
    Copy,
    Level,
    Step,
    Stopped,
    differs_at,
    follows,
    judge,
    missing_at,
)

CHUNK_BYTES: Final = 1 << 20
"""Bytes of one queue on their way: one chunk is read and appended before the next is read. It is
above what a majority takes in one round, and below what would keep other producers waiting."""

CHUNK_MESSAGES: Final = 1024
"""And at most this many: the target checks and seals them in one go, some milliseconds."""

QUEUES_AT_ONCE: Final = 16
"""Queues copied at a time. Each has one chunk on its way: that many chunks are in memory, and a
target of one group flushes them together."""

STEP_CHUNKS: Final = 128
"""Chunks of one step: a queue that is far behind does not keep what is new in others from them."""

REFUSALS_MAX: Final = 8
"""Appends refused in a row before the queue waits for the next round: another mirror is at it, or
what a former leader appended is being decided."""

COMPARED: Final = 1
"""Messages that are compared before a step appends behind what stands at the target."""

DIGEST_BYTES: Final = 16

NO_BOUNDS: Final = Bounds(0, 0)

NOT_COMPARED: Final = -1


class Source(Protocol):
    """What a copy asks of the cluster that is read; `client.admin.copies.ClusterCopies` is one."""

    async def bounds(self, queue: MessageQueue) -> tuple[int, int]:
        """Return first offset and end of a queue."""

    async def read(
        self, queue: MessageQueue, offset: int, max_bytes: int, max_messages: int = ...
    ) -> list[memoryview]:
        """Return stored records from *offset* on."""


class Target(Source, Protocol):
    """What a copy asks of the cluster that is written."""

    async def append(self, queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> int:
        """Append records at *offset*, or raise an `OffsetNotExpectedError`."""

    async def begin(self, queue: MessageQueue, offset: int) -> None:
        """Let a queue begin at *offset*."""


@dataclass(slots=True)
class QueueCopy:
    """One queue of a mirror, kept from round to round: what is in it only saves questions.

    Attributes:
        source, target: The queue here and there.
        bounds: Of the source, as it was seen last.
        end: One past the last message at the target, as far as is known.
        stopped: Why nothing is copied; empty: it is.
        copied_messages, copied_bytes: Stored by this process.
        refused: Appends that another process, or an earlier attempt, came before.
    """

    source: MessageQueue
    target: MessageQueue
    bounds: Bounds = NO_BOUNDS
    end: int = 0
    stopped: str = ""
    copied_messages: int = 0
    copied_bytes: int = 0
    refused: int = 0
    _compared: int = NOT_COMPARED
    """End of the target before which stands the source's message, as this process has found."""

    @property
    def lag(self) -> int:
        """Messages of the source that the target does not have."""
        return max(0, self.bounds.end - max(self.end, self.bounds.begin))

    @property
    def is_copy(self) -> bool:
        """Whether the target is known to end with the source's message: offsets mean the same."""
        return not self.stopped and self._compared == self.end

    async def step(
        self, source: Source, target: Target, seen: tuple[Bounds, Bounds] | None = None
    ) -> Step:
        """Copy up to the end that the source has now, or `STEP_CHUNKS`; return what was found.

        Args:
            seen: Bounds at source and target, perhaps a little old; None: they are asked for.
        Raises:
            ClientError: A cluster does not answer, or refuses; what was stored stays, and the next
                step goes on behind it.
        Cancellation: As after an error.
        """
        found = None
        if seen is not None:
            self.bounds, self.end = seen[0], seen[1].end
            found = judge(*seen)
        if found is None or isinstance(found, Stopped):
            # What stops a queue is asked of leaders that are known to lead still.
            there = Bounds(*await target.bounds(self.target))
            seen = Bounds(*await source.bounds(self.source)), there
            found = judge(*seen)
        assert seen is not None
        self.bounds, self.end = seen[0], seen[1].end
        if isinstance(found, Begin | Copy):
            found = await self._copy(source, target, found, seen[1].begin)
        elif isinstance(found, Level) and self._compared != self.end:
            found = await self._compare(source, target, self.end, seen[1].begin) or found
        self.stopped = found.why if isinstance(found, Stopped) else ""
        return found

    async def _copy(
        self, source: Source, target: Target, step: Begin | Copy, target_begin: int
    ) -> Step:
        position, refusals, chunks = step.first, 0, 0
        self._compared = NOT_COMPARED
        if isinstance(step, Copy):
            wrong = await self._compare(source, target, position, target_begin)
            if wrong is not None:
                return wrong
        while position < step.end or isinstance(step, Begin):
            if chunks >= STEP_CHUNKS:
                return Copy(position, step.end)
            chunks += 1
            try:
                records = await self._read(source, position, step.end)
            except OffsetIllegalError:
                return step  # retention was here; the next round sees where the queue begins
            if not records and position < step.end:
                return missing_at(position)
            try:
                if isinstance(step, Begin):
                    await target.begin(self.target, position)
                    step, self.end = Copy(position, step.end), position
                    self._compared = position
                    continue
                position = self._stored(
                    await target.append(self.target, position, records), records
                )
            except (OffsetNotExpectedError, RequestTimedOutError) as error:
                if isinstance(error, OffsetNotExpectedError):
                    self.refused += 1
                refusals += 1
                if refusals >= REFUSALS_MAX:
                    raise
                there = Bounds(*await target.bounds(self.target))
                self.end = there.end
                step = Copy(there.end, step.end)
                wrong = await self._compare(source, target, there.end, there.begin)
                if wrong is not None:
                    return wrong
                if there.end > position:
                    refusals = 0
                position = there.end
        return Level()

    def _stored(self, position: int, records: Sequence[memoryview]) -> int:
        self.copied_messages += len(records)
        self.copied_bytes += sum(record.nbytes for record in records)
        self.end = self._compared = position
        return position

    async def _read(self, source: Source, position: int, end: int) -> list[memoryview]:
        """Return records that follow each other from *position* on, none at *end* or behind it."""
        if position >= end:
            return []
        records = await source.read(self.source, position, CHUNK_BYTES, CHUNK_MESSAGES)
        count = min(follows(position, offsets_of(records)), end - position)
        return records[:count]

    async def _compare(
        self, source: Source, target: Target, end: int, target_begin: int
    ) -> Stopped | None:
        """Compare the last message before *end*, where both have it; note what is the same."""
        offset = end - 1
        if offset >= max(target_begin, self.bounds.begin):
            try:
                wrong = await self._compare_at(source, target, offset)
            except OffsetIllegalError as error:
                if error.min_offset <= offset:
                    return None  # what was seen of a queue that was made again: nothing is known
                wrong = None  # retention: there is nothing to compare with
            if wrong is not None:
                return wrong
        self._compared = end
        return None

    async def _compare_at(self, source: Source, target: Target, offset: int) -> Stopped | None:
        here = await source.read(self.source, offset, 1, COMPARED)
        there = await target.read(self.target, offset, 1, COMPARED)
        if not there:
            return missing_at(offset, "target")
        if not here:
            return missing_at(offset)
        return None if without_store(here[0]) == without_store(there[0]) else differs_at(offset)
