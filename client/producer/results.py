"""What a send gives back: one result, those of a batch, or a future."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, overload

import trio

from client.core.message_ext import SendResult, SendStatus
from client.producer.state import SendSlot, SlotState

_STATUS: Final = {status.value: status for status in SendStatus}


class SendFuture:
    """The result of a send that is under way."""

    __slots__ = ("_slot",)

    def __init__(self, slot: SendSlot) -> None:
        self._slot = slot

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._slot.settled

    async def result(self) -> SendResult:
        """Wait for the end of the send. May be called again, by one task at a time.

        Raises:
            ClientError: See `client.producer.producer.Producer.send`.
            trio.BusyResourceError: Another task is waiting.
        Cancellation: The send goes on; call again to get its result.
        """
        slot = self._slot
        if slot.task is not None:
            raise trio.BusyResourceError("another task waits for this result")
        if slot.settled:
            await trio.lowlevel.checkpoint()
        else:
            slot.task = trio.lowlevel.current_task()

            def stop_waiting(_: object) -> trio.lowlevel.Abort:
                slot.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(stop_waiting)
        return result_of_one(slot)


class BatchSendResult(Sequence[SendResult]):
    """Results of a batch in the order of its messages; each is made when it is looked at.

    Attributes:
        message_queue: The queue all messages of the batch are in.
        queue_offset: Of the first message; the others follow without a gap.
    """

    __slots__ = ("_slot", "message_queue", "queue_offset")

    def __init__(self, slot: SendSlot) -> None:
        self._slot = slot
        self.message_queue = slot.queue
        self.queue_offset = slot.base_offset

    def __len__(self) -> int:
        return self._slot.count

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        slot = self._slot
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(slot.count))]
        if index < 0:
            index += slot.count
        if not 0 <= index < slot.count:
            raise IndexError("no such message in the batch")
        offset_ids = slot.offset_message_id
        phy_offset = slot.phy_offset
        if phy_offset >= 0:
            sizes = slot.sizes
            phy_offset += sum(
                int.from_bytes(sizes[at : at + 4], "big") for at in range(0, index * 4, 4)
            )
        return SendResult(
            SendStatus(slot.status),
            slot.message_ids[index],
            slot.queue,
            slot.base_offset + index,
            phy_offset,
            slot.store_host,
            None if offset_ids is None else _nth(offset_ids, index),
        )


def _nth(joined: str, index: int) -> str:
    ids = joined.split(",")
    return ids[index] if index < len(ids) else ""


def result_of_one(slot: SendSlot) -> SendResult:
    """Return where the message of a slot that is settled is stored.

    Raises:
        ClientError: What became of it instead.
    """
    if slot.state is not SlotState.STORED:
        assert slot.error is not None
        raise slot.error
    message_id = slot.message_ids
    return SendResult(
        _STATUS[slot.status],
        message_id if isinstance(message_id, str) else message_id[0],
        slot.queue,
        slot.base_offset,
        slot.phy_offset,
        slot.store_host,
        slot.offset_message_id,
        slot.recall_handle,
    )


def result_of(slot: SendSlot) -> SendResult | BatchSendResult:
    """Return where what a settled slot holds is stored, one message or a batch.

    Raises:
        ClientError: As `result_of_one`.
    """
    return result_of_one(slot) if isinstance(slot.message_ids, str) else BatchSendResult(slot)
