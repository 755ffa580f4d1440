"""State records are joined into batches."""

from dledger.commitlog.record import decode_record
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.state_record import DelayProgressChange, TopicsChange, decode_change, state_batch
from dledger.state.topics import DELAY_PROGRESS_QUEUE, TOPICS_QUEUE


def test_state_batch_is_one_record_per_change() -> None:
    batch = state_batch(DelayProgressChange(1, 0, 1), TopicsChange(delete=("T",)))
    assert [(run.topic, run.queue_id, run.count) for run in batch.runs] == [
        (STATE_TOPIC, DELAY_PROGRESS_QUEUE, 1),
        (STATE_TOPIC, TOPICS_QUEUE, 1),
    ]
    record = decode_record(batch.records)
    assert (record.topic, record.queue_id) == (STATE_TOPIC, DELAY_PROGRESS_QUEUE)
    assert decode_change(DELAY_PROGRESS_QUEUE, record.body) == DelayProgressChange(1, 0, 1)
