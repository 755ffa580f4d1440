"""What a deferred message was answered, and what may become of it after that."""

from dataclasses import dataclass, field

from dledger.commitlog.record import Record
from tests.harness.half_messages import COMMIT, ROLLBACK, Half


@dataclass(eq=False)
class Message:
    """A message that was sent; its body names it.

    Attributes:
        kind: plain, level, timer or half.
        outcome: Of the send; empty without an answer.
        is_vague: Of a recall the outcome is not known.
        was_too_late: A recall was.
        asked: Decisions that were sent.
        decisions: Those that were answered as stored.
        copies: In its topic.
        given_up: Copies in the topic of those without a decision.
        set_aside: Dead letters.
        incarnation: Which topic of its name it waits for; None: it never waited.
    """

    topic: str
    kind: str
    sent_s: float
    delay_ms: int = 0
    due_ms: int = 0
    handle: str = ""
    half: Half | None = None
    outcome: str = ""
    is_recalled: bool = False
    is_vague: bool = False
    was_too_late: bool = False
    asked: set[int] = field(default_factory=set)
    decisions: set[int] = field(default_factory=set)
    copies: list[Record] = field(default_factory=list)
    given_up: int = 0
    set_aside: int = 0
    incarnation: int | None = None

    def arrives(self, record: Record, passed_ms: float, latest_ms: int) -> None:
        """Take in that it is in its topic.

        Args:
            passed_ms: Since it was sent.
            latest_ms: The latest date there was since.
        """
        self.copies.append(record)
        assert len(self.copies) == 1, f"{self} is there twice"
        assert not self.is_recalled, f"{self} comes after its recall"
        has_waited = self.kind == "level" and passed_ms >= self.delay_ms - 1
        assert has_waited or self.due_ms <= latest_ms, f"{self} is early"

    def check(self) -> None:
        """Compare it with what it was answered, when all is over."""
        there = len(self.copies)
        if self.outcome == "not_stored":
            assert not there, f"{self} is refused and there"
        elif self.kind == "half":
            self._check_half(there)
        elif self.is_recalled:
            assert not there, f"{self} is recalled and there"
        elif self.was_too_late or (self.outcome == "stored" and not self.is_vague):
            assert there + self.set_aside == 1, f"{self} is stored and not there"

    def _check_half(self, there: int) -> None:
        assert there + self.given_up <= 1, f"{self} is decided twice"
        assert not there or COMMIT in self.asked, f"{self} is there without a commit"
        if self.half is not None:
            assert there or self.given_up or ROLLBACK in self.asked, f"{self} is nowhere"
        if COMMIT in self.decisions:
            assert there, f"{self} is committed and not there"
        if ROLLBACK in self.decisions:
            assert not there + self.given_up, f"{self} is rolled back and there"
