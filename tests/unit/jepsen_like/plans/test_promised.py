"""What a plan lets checkers hold a run to."""

from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.plans.plan import Workload
from dledger.jepsen_like.plans.promised import merge_for

PLAIN = Workload(delayed_per_mille=0, consumers=0)
VERDICTS = (Verdict("queue_log", "valid"), Verdict("delayed", "unknown"))


def test_merge_for_leaves_out_what_no_client_did() -> None:
    assert merge_for(PLAIN, VERDICTS).validity == "valid"
    assert merge_for(None, VERDICTS).validity == "valid"
    assert merge_for(Workload(delayed_per_mille=1), VERDICTS).validity == "unknown"


def test_merge_for_nothing_is_unknown() -> None:
    assert merge_for(PLAIN, ()).validity == "unknown"


def test_merge_for_keeps_violations_of_what_is_left_out() -> None:
    assert merge_for(PLAIN, (Verdict("delayed", "invalid"),)).validity == "invalid"


def test_merge_for_leaves_out_named_checkers() -> None:
    verdicts = (Verdict("queue_log", "valid"), Verdict("polls", "unknown"))
    assert merge_for(PLAIN, verdicts).validity == "unknown"
    assert merge_for(PLAIN, verdicts, left_out=("polls",)).validity == "valid"
