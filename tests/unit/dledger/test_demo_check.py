"""The demo's checker, each anomaly planted in a run that is otherwise good."""

from __future__ import annotations

import pytest

from dledger.cli.demo_check import Found, Sent, Verdict, body_of, check, key_in


def good_run() -> tuple[list[Sent], list[Found]]:
    """Two queues, ten messages each, sent one after the other."""
    sent = [Sent(f"p0-{n}", n * 100, n * 100 + 50, "stored", n % 2, n // 2) for n in range(20)]
    return sent, [Found(row.queue_id, row.queue_offset, row.key) for row in sent]


def test_a_good_run_keeps_everything() -> None:
    sent, found = good_run()
    verdict = check(sent, found, logs={"n0": found, "n1": found}, kills_us=[1_000])
    assert verdict == Verdict(
        acknowledged=20,
        lost=0,
        misplaced=0,
        duplicated=0,
        reordered=0,
        resurrected=0,
        changed=0,
        gaps=0,
        not_stored=0,
        unknown=0,
        delivered=20,
        failover_ms=0.05,
        replicas_equal=True,
    )
    assert verdict.kept


def test_an_acknowledged_message_nobody_can_read_is_lost() -> None:
    sent, found = good_run()
    verdict = check(sent, found[:-1])
    assert (verdict.lost, verdict.lost_keys, verdict.kept) == (1, ("p0-19",), False)


def test_an_acknowledged_message_missing_in_one_log_is_lost() -> None:
    sent, found = good_run()
    verdict = check(sent, found, logs={"n0": found, "n1": found[:7] + found[8:]})
    assert (verdict.lost, verdict.lost_keys, verdict.kept) == (1, ("p0-7",), False)


def test_a_missing_message_of_unknown_outcome_is_not_lost() -> None:
    sent, found = good_run()
    verdict = check([*sent, Sent("p0-20", 2_000, 2_500, "unknown")], found)
    assert (verdict.lost, verdict.unknown, verdict.kept) == (0, 1, True)


def test_a_retry_that_stored_twice_is_a_duplicate_and_loses_nothing() -> None:
    sent, found = good_run()
    verdict = check(sent, [*found, Found(0, 10, "p0-3")])
    assert (verdict.duplicated, verdict.lost, verdict.kept) == (1, 0, True)


def test_swapped_messages_are_reordered() -> None:
    sent, _ = good_run()
    first, second = sent[2], sent[4]
    sent[2] = Sent(first.key, first.began_us, first.ended_us, "stored", 0, second.queue_offset)
    sent[4] = Sent(second.key, second.began_us, second.ended_us, "stored", 0, first.queue_offset)
    found = [Found(row.queue_id, row.queue_offset, row.key) for row in sent]
    verdict = check(sent, found)
    assert (verdict.reordered, verdict.lost, verdict.kept) == (1, 0, False)


def test_overlapping_sends_may_be_stored_in_any_order() -> None:
    sent = [Sent("p0-0", 0, 100, "stored", 0, 1), Sent("p0-1", 50, 90, "stored", 0, 0)]
    found = [Found(0, 1, "p0-0"), Found(0, 0, "p0-1")]
    assert check(sent, found).reordered == 0


def test_a_message_found_elsewhere_than_acknowledged_is_misplaced() -> None:
    sent, found = good_run()
    found[19] = Found(1, 10, "p0-19")
    verdict = check(sent, found)
    assert (verdict.misplaced, verdict.gaps, verdict.lost) == (1, 1, 0)
    assert not verdict.kept


def test_a_message_told_not_stored_must_not_appear() -> None:
    sent, found = good_run()
    sent[5] = Sent("p0-5", 500, 550, "not_stored")
    verdict = check(sent, found)
    assert (verdict.resurrected, verdict.not_stored, verdict.kept) == (1, 1, False)


def test_a_place_that_held_another_message_earlier_has_changed() -> None:
    sent, found = good_run()
    verdict = check(sent, found, seen_earlier=[Found(0, 3, "p9-9"), found[0]])
    assert (verdict.changed, verdict.kept) == (1, False)


def test_a_message_seen_earlier_and_gone_has_changed() -> None:
    sent, found = good_run()
    assert check(sent, found, seen_earlier=[Found(0, 10, "p0-99")]).changed == 1


def test_a_body_that_is_not_its_keys_has_changed() -> None:
    sent, found = good_run()
    found[4] = Found(0, 2, "")
    verdict = check(sent, found)
    assert (verdict.changed, verdict.lost) == (1, 1)


def test_unequal_replicas_fail_the_run() -> None:
    sent, found = good_run()
    assert not check(sent, found, replicas_equal=False).kept


def test_failover_counts_to_the_first_acknowledgement_of_a_send_begun_after_the_kill() -> None:
    sent = [
        Sent("a", 0, 1_500, "stored", 0, 0),  # begun before the kill: may be the old leader's
        Sent("b", 1_200, 901_000, "stored", 0, 1),
        Sent("c", 1_300, 801_000, "stored", 0, 2),
    ]
    found = [Found(0, n, key) for n, key in enumerate("abc")]
    assert check(sent, found, kills_us=[1_000]).failover_ms == 800.0


def test_no_acknowledgement_after_the_kill_is_an_endless_failover() -> None:
    sent, found = good_run()
    assert check(sent, found, kills_us=[99_999]).failover_ms == float("inf")


@pytest.mark.parametrize("size", [1, 8, 40, 256, 4096])
def test_a_body_gives_its_key_back_and_shows_a_changed_byte(size: int) -> None:
    body = body_of("p3-17", size)
    assert len(body) == max(size, 6)
    assert key_in(body) == "p3-17"
    flipped = bytes([body[0] ^ 1]) + body[1:]
    assert key_in(flipped) is None or len(body) == 6
    assert key_in(b"\xff" + body) is None
