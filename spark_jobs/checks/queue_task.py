"""What a task does with the facts it has gathered: a whole queue, or one chunk of one."""

from __future__ import annotations

import numpy as np

from spark_jobs.checks.home import echo_of, home_of
from spark_jobs.checks.queue_chunk import Answer, Ask, chunk_of, look_again
from spark_jobs.checks.queue_cut import ChunkReport
from spark_jobs.checks.queue_facts import QueueFacts
from spark_jobs.checks.queue_judge import judge_queue
from spark_jobs.checks.source import Queue, QueueReport, Replicas


def report_of(queue: Queue, facts: QueueFacts, replicas: Replicas) -> QueueReport:
    """Judge one queue whose facts are complete; they are used up by it."""
    begins = replicas.begins.get(queue, ())
    facts.settle()
    home = home_of(facts, dict(begins), replicas.chosen, [replica for replica, _ in begins])
    return QueueReport(*queue, judge_queue(facts), home)


def chunk_report_of(
    queue: Queue, facts: QueueFacts, replicas: Replicas, limit: int | None
) -> ChunkReport:
    """Return what one chunk says in pass one. Its facts are used up by it."""
    begins = replicas.begins.get(queue, ())
    facts.open(limit)
    home = home_of(facts, dict(begins), replicas.chosen, [replica for replica, _ in begins])
    home.spare = home.spare_outcome = b""
    return ChunkReport(chunk_of(facts), home)


def answer_of(facts: QueueFacts, replicas: Replicas, ask: Ask, limit: int | None) -> Answer:
    """Return what one chunk answers in pass two. Its facts are used up by it."""
    facts.open(limit)
    answer = look_again(facts, ask)
    if ask.strange:
        among = np.frombuffer(ask.strange, dtype=np.int64)
        answer.echo = echo_of(facts, replicas.chosen, among).tobytes()
    return answer
