"""Messages that the key index finds."""

from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.record import encode_record
from tests.harness.fake_group import batch_of

ALWAYS = (0, (1 << 63) - 1)


def keyed(first: int, count: int) -> RecordBatch:
    """Return messages with keys ``id<n>``, ``k<n % 7>`` and ``all``, of queue 0 of topic T."""
    records = [
        encode_record(
            topic="T",
            queue_id=0,
            body=b"m%d" % n,
            properties=f"UNIQ_KEY\x01id{n}\x02KEYS\x01k{n % 7} all\x02".encode(),
        )
        for n in range(first, first + count)
    ]
    return batch_of(records, Run("T", 0, count))
