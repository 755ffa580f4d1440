"""A broker name belongs to the group whose identity is registered under it."""

from dataclasses import replace

import pytest

from dledger.namesrv.config import NamesrvTable
from dledger.namesrv.errors import RegistrationRefusedError
from dledger.namesrv.registration import HEARTBEAT_TIMEOUT_MS_MAX, BrokerKey, Registration
from dledger.namesrv.route_table import RouteInfoManager
from dledger.raft.identity import GroupSecret
from dledger.remoting.protocol.bodies import QueueData
from tests.harness.registrations import CLUSTER, A, B, C, addrs_of, registration, topics, version

OURS, OTHER = "0f" * 16, "e1" * 16
THIEF = "10.6.6.6:10911"


def group_of_three() -> RouteInfoManager:
    """Three members with an identity, A leads in term 5; each over a connection of its own."""
    table = RouteInfoManager()
    for number, (addr, broker_id) in enumerate([(A, 0), (B, 2), (C, 3)], 1):
        table.register_broker(
            registration(
                addr, broker_id, identity=OURS, data_version=version(state=5), connection=number
            ),
            0,
        )
    return table


def test_other_group_enters_no_topic() -> None:
    table = group_of_three()
    nothing = QueueData(broker_name="broker-a", read_queue_nums=0, write_queue_nums=0)
    for connection in (9, None):
        with pytest.raises(RegistrationRefusedError, match="which alone enters its topics"):
            table.register_topic("T1", [nothing], connection=connection)
    assert table.topic_queue_table["T1"]["broker-a"].write_queue_nums == 4
    assert table.register_topic("T3", [QueueData(broker_name="broker-a")], connection=2)
    assert "T3" in table.all_topics()


def test_member_unregisters_itself() -> None:
    table = group_of_three()
    assert table.unregister_broker(CLUSTER, "broker-a", A, identity=OURS, connection=77)
    assert table.unregister_broker(CLUSTER, "broker-a", B, connection=2)
    assert addrs_of(table, "T1") == {3: C}


def test_address_of_a_group_keeps_its_name() -> None:
    table = group_of_three()
    with pytest.raises(RegistrationRefusedError, match="under the name broker-a"):
        table.register_broker(registration(A, 0, "evil", connection=9), 1)
    assert addrs_of(table, "T1") == {0: A, 2: B, 3: C}
    assert "evil" not in table.broker_addr_table


def test_heartbeat_of_another_extends_no_entry() -> None:
    table = group_of_three()
    assert not table.heartbeat(CLUSTER, A, 119_000, connection=9)
    same = table.broker_live_table[BrokerKey(CLUSTER, B)].data_version
    table.query_data_version(CLUSTER, B, same, 119_000, identity=OTHER, connection=9)
    assert table.heartbeat(CLUSTER, C, 119_000, connection=3)
    table.scan(120_001)
    assert addrs_of(table, "T1") == {3: C}


def test_silent_broker_is_forgotten_after_ten_minutes() -> None:
    table = RouteInfoManager()
    table.register_broker(registration(timeout_ms=10**12), 0)
    assert not table.scan(HEARTBEAT_TIMEOUT_MS_MAX)
    assert table.scan(HEARTBEAT_TIMEOUT_MS_MAX + 1)
    assert table.broker_addr_table == {}


def test_an_identity_that_no_group_has_is_refused() -> None:
    table = RouteInfoManager()
    with pytest.raises(RegistrationRefusedError, match="32 hexadecimal digits"):
        table.register_broker(registration(identity="x" * 1_000_000), 0)
    assert table.broker_addr_table == {}


PROOF = "ab" * 32


def proved_group() -> RouteInfoManager:
    """As `group_of_three`, with a secret in common."""
    table = RouteInfoManager()
    for number, (addr, broker_id) in enumerate([(A, 0), (B, 2), (C, 3)], 1):
        table.register_broker(
            registration(
                addr,
                broker_id,
                identity=OURS,
                proof=PROOF,
                data_version=version(state=5),
                connection=number,
            ),
            0,
        )
    return table


def copycat(proof: str = "", addr: str = THIEF) -> Registration:
    return registration(
        addr, 0, identity=OURS, proof=proof, data_version=version(state=2**62), connection=9
    )


@pytest.mark.parametrize("proof", ["", "cd" * 32, "\u20ac"])
@pytest.mark.parametrize("addr", [THIEF, B])
def test_copied_identity_without_proof_is_refused(proof: str, addr: str) -> None:
    table = proved_group()
    with pytest.raises(RegistrationRefusedError, match=r"knows the secret of that group"):
        table.register_broker(copycat(proof, addr), 1)
    with pytest.raises(RegistrationRefusedError, match="alone may unregister it"):
        table.unregister_broker(CLUSTER, "broker-a", A, identity=OURS, connection=9)
    assert addrs_of(table, "T1") == {0: A, 2: B, 3: C}


NEAR = "127.0.0.1:10921"


def claims(
    table: RouteInfoManager, address: str = THIEF, identity: str = OTHER, name: str = "thief"
) -> dict[str, str]:
    """Register another group with the topics of the first; return what it is kept out of."""
    result = table.register_broker(registration(address, 0, name, identity=identity), 1)
    return dict(result.left_out)


@pytest.mark.parametrize("identity", [OTHER, ""])
def test_topic_of_a_group_is_served_by_no_stranger(identity: str) -> None:
    """A thief would answer sends, and alone have what it took."""
    table = group_of_three()
    before = table.all_topics()
    assert claims(table, identity=identity).keys() == {"T1", "T2"}
    assert "the group of broker-a serves it" in claims(table, identity=identity)["T1"]
    assert table.topic_queue_table["T1"].keys() == {"broker-a"}
    assert table.all_topics() == before
    with pytest.raises(RegistrationRefusedError, match="serves it"):
        table.register_topic("T1", [QueueData(broker_name="thief")], connection=1)
    own = registration(
        THIEF, 0, "thief", identity=identity, table=topics("X1", "X2"), data_version=version(2)
    )
    table.register_broker(own, 2)
    assert table.route("X1") is not None


def test_topic_whose_group_left_is_free() -> None:
    table = group_of_three()
    assert claims(table)
    since = table.broker_live_table[BrokerKey(CLUSTER, THIEF)].data_version
    more = registration(THIEF, 0, "thief", identity=OTHER, table={})
    assert table.register_broker(replace(more, since=since), 2).needs_all
    assert table.query_data_version(CLUSTER, THIEF, since, 2)[0]
    for connection in (1, 2, 3):
        table.disconnect(connection)
    assert claims(table) == {}
    assert not table.kept_out
    assert table.route("T1") is not None


def test_groups_of_one_machine_and_of_rocketmq_share_topics() -> None:
    table = RouteInfoManager()
    table.register_broker(registration("127.0.0.1:10911", 0, identity=OURS), 0)
    assert claims(table, NEAR) == {}
    assert claims(table, name="far").keys() == {"T1", "T2"}
    table = RouteInfoManager()
    table.register_broker(registration(A, 0), 0)
    assert claims(table) == {}
    table = RouteInfoManager(NamesrvTable(open_topics=True))
    table.register_broker(registration(A, 0, identity=OURS), 0)
    assert claims(table) == {}


def test_name_server_with_a_secret_asks_for_its_proof() -> None:
    secret = GroupSecret(b"a secret of all groups")
    table = RouteInfoManager()
    table.secret = secret
    for identity, proof in ((OURS, ""), (OURS, secret.membership_proof(OTHER)), ("", "")):
        with pytest.raises(RegistrationRefusedError, match="group"):
            table.register_broker(registration(A, 0, identity=identity, proof=proof), 0)
    assert table.all_topics() == []
    for address, name, identity in ((A, "broker-a", OURS), (THIEF, "broker-b", OTHER)):
        proof = secret.membership_proof(identity)
        table.register_broker(registration(address, 0, name, identity=identity, proof=proof), 0)
    assert table.topic_queue_table["T1"].keys() == {"broker-a", "broker-b"}
