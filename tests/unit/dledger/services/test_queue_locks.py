"""What becomes of requests for locks, on applied grants and leases alone."""

from hypothesis import given
from hypothesis import strategies as st

from dledger.services.queue_locks import FORGOTTEN_LEASES, Decision, Leases, LockAsk, decide
from dledger.state.queue_lock import LockGrant, LockKey, LockRelease, QueueLock, apply_queue_locks

K0: LockKey = ("g", "T", 0)
K1: LockKey = ("g", "T", 1)
LEASE_S = 60.0


def lock(client_id: str, *keys: LockKey, at: float = 0.0) -> LockAsk:
    return LockAsk(client_id, keys, at)


def unlock(client_id: str, *keys: LockKey, tokens: tuple[int, ...] = ()) -> LockAsk:
    return LockAsk(client_id, keys, 0.0, is_unlock=True, tokens=tokens)


def decided(
    *asks: LockAsk,
    locks: dict[LockKey, QueueLock] | None = None,
    leases: Leases | None = None,
    now: float = 0.0,
    gone: tuple[LockKey, ...] = (),
    forgotten: tuple[LockKey, ...] = (),
) -> Decision:
    return decide(
        asks,
        locks or {},
        leases or Leases(LEASE_S),
        now,
        may_lock=lambda key: key not in gone,
        forgotten=forgotten,
    )


def test_free_queue_is_granted_to_the_first_request() -> None:
    decision = decided(lock("a", K0, at=5.0), lock("b", K0, K1, at=6.0))
    assert decision.grants == {K0: LockGrant(K0, "a"), K1: LockGrant(K1, "b")}
    assert decision.granted == {K0: 5.0, K1: 6.0}
    assert decision.taken == 2


def test_a_holder_renews_without_a_change() -> None:
    decision = decided(lock("a", K0, at=7.0), locks={K0: QueueLock("a", 3)}, now=8.0)
    assert (decision.change, decision.renewed) == (None, {K0: 7.0})


def test_a_lease_keeps_others_out_until_its_last_moment() -> None:
    leases, locks = Leases(LEASE_S), {K0: QueueLock("a", 3)}
    leases.begin(0.0)
    leases.renew({K0: 10.0})
    assert decided(lock("b", K0), locks=locks, leases=leases, now=69.9).change is None
    decision = decided(lock("b", K0, at=70.0), locks=locks, leases=leases, now=70.0)
    assert decision.grants == {K0: LockGrant(K0, "b", replaces=3)}


def test_new_leader_honours_grants_for_a_lease() -> None:
    leases, locks = Leases(LEASE_S), {K0: QueueLock("a", 3)}
    leases.begin(0.0)
    leases.renew({K0: 10.0})
    leases.begin(100.0)
    assert not decided(lock("b", K0), locks=locks, leases=leases, now=159.9).grants
    assert decided(lock("b", K0), locks=locks, leases=leases, now=160.0).grants


def test_expired_holder_keeps_its_token_without_rivals() -> None:
    decision = decided(lock("a", K0, at=500.0), locks={K0: QueueLock("a", 3)}, now=500.0)
    assert (decision.change, decision.renewed) == (None, {K0: 500.0})


def test_first_renewal_in_a_batch_wins() -> None:
    decision = decided(
        lock("a", K0, at=500.0), lock("b", K0), locks={K0: QueueLock("a", 3)}, now=500.0
    )
    assert decision.change is None


def test_only_the_holder_gives_back_and_only_what_it_means() -> None:
    locks = {K0: QueueLock("a", 3), K1: QueueLock("b", 4)}
    assert decided(unlock("a", K0, K1), locks=locks).releases == {K0: LockRelease(K0, 3)}
    assert decided(unlock("a", K0, tokens=(2,)), locks=locks).change is None
    assert decided(unlock("a", K0, tokens=(3,)), locks=locks).change is not None


def test_what_is_given_back_may_be_granted_by_the_same_entry() -> None:
    decision = decided(unlock("a", K0), lock("b", K0), locks={K0: QueueLock("a", 3)})
    locks = {K0: QueueLock("a", 3)}
    assert decision.change is not None
    apply_queue_locks(locks, decision.change, 9)
    assert locks == {K0: QueueLock("b", 9)}


def test_a_grant_is_not_given_back_by_its_own_entry() -> None:
    decision = decided(lock("a", K0), unlock("a", K0), lock("b", K0))
    assert decision.taken == 1, "the others wait for the next entry"


def test_a_queue_that_is_going_away_is_left_alone() -> None:
    locks = {K0: QueueLock("a", 3)}
    asks = (lock("b", K0), unlock("a", K0))
    assert decided(*asks, locks=locks, now=1e6, gone=(K0,), forgotten=(K0,)).change is None


def test_unrenewed_grants_are_given_back() -> None:
    leases, locks = Leases(LEASE_S), {K0: QueueLock("a", 3), K1: QueueLock("b", 3)}
    leases.renew({K1: 1.0})
    now = FORGOTTEN_LEASES * LEASE_S
    assert leases.forgotten(locks, locks, now) == [K0]
    decision = decided(locks=locks, leases=leases, now=now, forgotten=(K0,))
    assert decision.releases == {K0: LockRelease(K0, 3)}
    wanted = decided(lock("a", K0), locks=locks, leases=leases, now=now, forgotten=(K0,))
    assert wanted.change is None


KEYS = (K0, K1)
ASKS = st.builds(
    lambda client, keys, is_unlock: (unlock if is_unlock else lock)(client, *keys),
    st.sampled_from("abc"),
    st.lists(st.sampled_from(KEYS), unique=True, min_size=1),
    st.booleans(),
)
LOCKS = st.dictionaries(
    st.sampled_from(KEYS), st.builds(QueueLock, st.sampled_from("abc"), st.integers(1, 9))
)


@given(st.lists(ASKS, max_size=8), LOCKS, st.sampled_from((0.0, 30.0, 90.0)))
def test_running_lease_never_changes_hands(
    asks: list[LockAsk], locks: dict[LockKey, QueueLock], now: float
) -> None:
    decision = decided(*asks, locks=locks, now=now)
    assert decision.taken >= min(1, len(asks)), "the first request never waits"
    after = dict(locks)
    if decision.change is not None:
        apply_queue_locks(after, decision.change, 10)
    unlocked = {
        (ask.client_id, key) for ask in asks[: decision.taken] if ask.is_unlock for key in ask.keys
    }
    for key, before in locks.items():
        if now < LEASE_S and (before.client_id, key) not in unlocked:
            assert after[key] == before, "only its holder ends a grant within its lease"
    for key, lock_after in after.items():
        if lock_after != locks.get(key):
            assert lock_after.token == 10
