"""The rules for messages received one by one, row against row: slow, and in no columns."""

from __future__ import annotations

from itertools import combinations, pairwise

from dledger.jepsen_like.checkers import pop
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

Key = tuple[str, str, int, int]


def _key(op: Operation) -> Key:
    return op.group, op.topic, op.queue, op.off


def anomalies(operations: list[Operation], *, clock_error_ns: int = 0) -> set[tuple[str, str]]:
    """Return the name of each anomaly with group, topic and queue."""
    ok = [op for op in operations if op.outcome == Outcome.OK]
    received = [op for op in ok if op.f == F.RECEIVE and op.off != NOTHING]
    found: set[tuple[str, str]] = set()

    def note(name: str, op: Operation) -> None:
        found.add((name, f"{op.group}@{op.topic}/{op.queue}"))

    changes = [op for op in operations if op.f == F.CHANGE_TIME and op.outcome != Outcome.FAIL]
    changes.sort(key=lambda op: op.call_ns)
    attempt_of: dict[tuple[Key, int], Operation] = {}
    changes_of: dict[int, list[Operation]] = {}
    for op in sorted(received, key=lambda op: (_key(op), op.cnt, op.call_ns)):
        attempt_of[_key(op), op.txn] = op
    for change in changes:
        delivery = attempt_of.get((_key(change), change.txn))
        if delivery is None:
            continue
        changes_of.setdefault(delivery.op_id, []).append(change)
        if change.outcome == Outcome.OK:
            attempt_of[_key(change), change.min_off] = delivery
    of_message: dict[Key, list[Operation]] = {}
    for op in received:
        of_message.setdefault(_key(op), []).append(op)
    ends: dict[int, int] = {}
    for rows in of_message.values():
        before: Operation | None = None
        for op in sorted(rows, key=lambda op: (op.cnt, op.call_ns)):
            begins = [op.call_ns]
            if before is not None and before.cnt < op.cnt:
                begins.append(ends[before.op_id])
            end = max(begins) + op.status * pop.MS_NS
            for change in changes_of.get(op.op_id, ()):
                moved = change.call_ns + change.status * pop.MS_NS
                end = moved if change.outcome == Outcome.OK else min(end, moved)
            ends[op.op_id] = end
            before = op
    for one in changes:
        for op in ok:
            is_of_it = op.f in (F.ACK, F.CHANGE_TIME) and (_key(op), op.txn) == (_key(one), one.txn)
            if one.outcome == Outcome.OK and is_of_it and one.ret_ns < op.call_ns:
                note(pop.OLD_RECEIPT, op)
    for rows in of_message.values():
        rows.sort(key=lambda op: (op.cnt, op.call_ns))
        for one, other in pairwise(rows):
            if one.cnt == other.cnt:
                note(pop.TWICE, one)
            elif other.ret_ns < ends[one.op_id] - clock_error_ns:
                note(pop.EARLY, one)
            if one.value != other.value:
                note(pop.OTHER, one)
        for one, other in combinations(rows, 2):
            for first, later in ((one, other), (other, one)):
                if first.ret_ns < later.call_ns and first.cnt > later.cnt:
                    note(pop.WENT_BACK, one)
    for op in ok:
        if op.f not in (F.ACK, F.CHANGE_TIME):
            continue
        own = attempt_of.get((_key(op), op.txn))
        for row in of_message.get(_key(op), ()):
            if op.f == F.ACK and op.ret_ns < row.call_ns:
                note(pop.AGAIN, op)
            if own is not None and row.cnt > own.cnt and row.ret_ns < op.call_ns:
                note(pop.OLD_RECEIPT, op)
    for key, rows in of_message.items():
        if not key[0].endswith(pop.IN_ORDER_SUFFIX):
            continue
        behind = [each[3] for each in of_message if each[:3] == key[:3] and each[3] > key[3]]
        if not behind:
            continue
        first = min(of_message[(*key[:3], min(behind))], key=lambda op: op.call_ns)
        acks = [
            op.call_ns
            for op in operations
            if op.f == F.ACK and op.outcome != Outcome.FAIL and _key(op) == key
        ]
        is_acked = any(at <= first.ret_ns for at in acks)
        is_out = any(
            row.ret_ns < first.call_ns and first.ret_ns < ends[row.op_id] - clock_error_ns
            for row in rows
        )
        is_before = first.ret_ns < min(row.call_ns for row in rows)
        if is_before or (is_out and not is_acked):
            note(pop.OUT_OF_ORDER, first)
    for head in ok:
        if head.f == F.RECEIVE and head.off == NOTHING:
            for off in range(head.min_off, head.max_off):
                if (head.group, head.topic, head.queue, off) not in of_message:
                    note(pop.LOST, head)
    return found
