"""A broker keeps itself known to every NameServer, whatever the others do."""

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dledger.registration import KNOWN_WITHIN_S
from dledger.remoting.errors import ConnectFailedError
from dledger.remoting.protocol.bodies import RegisterBrokerBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import BrokerHeader, RegisterBrokerHeader
from dledger.settings.text import member_numbers
from dledger.state.state_record import TopicsChange, state_batch
from dledger.state.topics import TopicConfig
from dledger.testing.doubles import VirtualClock
from tests.harness.beside import beside
from tests.harness.fake_group import BROKER, CLUSTER, GROUP_IDENTITY, LEADER
from tests.harness.registering import Line, RegisteringBroker


@dataclass
class Call:
    at: float
    address: str
    command: RemotingCommand
    oneway: bool

    @property
    def header(self) -> RegisterBrokerHeader:
        return RegisterBrokerHeader.decode(self.command.ext)

    @property
    def body(self) -> RegisterBrokerBody:
        return RegisterBrokerBody.decode(self.command.body)


@dataclass
class Client:
    """Stands for the remoting client: some NameServers are down, some are slow."""

    down: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    lines: dict[str, Line] = field(default_factory=dict)

    def live(self, address: str) -> Line:
        return self.lines.setdefault(address, Line())

    def break_line(self, address: str) -> None:
        self.lines.pop(address).close("broken")

    async def invoke(
        self, address: str, command: RemotingCommand, timeout_s: float
    ) -> RemotingCommand:
        await self._reach(address, timeout_s)
        self.calls.append(Call(trio.current_time(), address, command, False))
        ext = self.answers.get(address)
        return response_to(command, 1 if address in self.refusing else 0, "no", ext)

    async def invoke_oneway(self, address: str, command: RemotingCommand, timeout_s: float) -> None:
        await self._reach(address, timeout_s)
        self.calls.append(Call(trio.current_time(), address, command, True))

    async def _reach(self, address: str, timeout_s: float) -> None:
        await trio.sleep(timeout_s if address in self.slow else 0.01)
        if address in self.down | self.slow:
            raise ConnectFailedError(f"no connection to {address}")

    def to(self, address: str) -> list[Call]:
        return [call for call in self.calls if call.address == address]


class World(RegisteringBroker):
    def __init__(self, root: Path) -> None:
        self.client = Client()
        self.addresses = ["ns1:9876", "ns2:9876"]
        super().__init__(root, VirtualClock(), self.client, self.addresses)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.group.close()


@pytest.mark.parametrize(
    ("members", "numbers"),
    [
        ("n0 n1 n2", [0, 1, 2]),
        ("alpha beta gamma", [0, 1, 2]),
        ("far n0 n1 n2", [3, 0, 1, 2]),
        ("node-12 near far", [12, 14, 13]),
        ("a1-2 b3", [12, 3]),
    ],
)
def test_member_numbers_are_those_in_the_ids(members: str, numbers: list[int]) -> None:
    found = member_numbers(members.split())
    assert [found[member] for member in members.split()] == numbers


async def test_the_leader_registers_all_topics_as_id_0(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.registration.run)
    await trio.sleep(1)
    assert {call.address for call in world.client.calls} == {"ns1:9876", "ns2:9876"}
    (call,) = world.client.to("ns1:9876")
    assert call.command.code == RequestCode.REGISTER_BROKER
    header = call.header
    assert (header.broker_id, header.broker_addr) == (0, LEADER)
    assert (header.broker_name, header.cluster_name) == (BROKER, CLUSTER)
    assert header.body_crc32 == zlib.crc32(bytes(call.command.body)) & 0x7FFFFFFF
    wrapper = call.body.topic_config_serialize_wrapper
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX"} <= wrapper.topic_config_table.keys()
    assert wrapper.data_version.state_version == 1


async def test_it_registers_again_at_once_when_its_connection_ends(
    world: World, nursery: trio.Nursery
) -> None:
    # The NameServer takes a broker out the moment its connection breaks.
    nursery.start_soon(world.registration.run)
    await trio.sleep(10)
    world.client.break_line("ns1:9876")
    await trio.sleep(1)
    assert [round(call.at - world.client.calls[0].at) for call in world.client.to("ns1:9876")] == [
        0,
        10,
    ]
    assert len(world.client.to("ns2:9876")) == 1


async def test_new_role_is_registered_at_once(world: World, nursery: trio.Nursery) -> None:
    world.group.step_down("elsewhere:1")
    nursery.start_soon(world.registration.run)
    await trio.sleep(5)
    assert world.client.to("ns1:9876")[-1].header.broker_id == 3
    world.group.lead()
    world.registration.role_changed()
    await trio.sleep(0.1)
    reported = world.client.to("ns1:9876")[-1]
    assert (reported.header.broker_id, reported.oneway) == (0, True)
    assert reported.body.topic_config_serialize_wrapper.data_version.state_version == 2
    await trio.sleep(4)
    confirmed = world.client.to("ns1:9876")[-1]
    assert (confirmed.header.broker_id, confirmed.oneway) == (0, False)


async def test_leader_registers_the_address_of_the_leadership(
    world: World, nursery: trio.Nursery
) -> None:
    world.registration._broker.broker.leader_address = "10.0.0.9:9"
    nursery.start_soon(world.registration.run)
    await trio.sleep(1)
    world.group.step_down()
    world.registration.role_changed()
    await trio.sleep(10)
    headers = [each.header for each in world.client.to("ns1:9876")]
    assert (headers[0].broker_id, headers[0].broker_addr) == (0, "10.0.0.9:9")
    assert (headers[-1].broker_id, headers[-1].broker_addr) == (3, LEADER)
    world.group.lead()
    world.registration.role_changed()
    await trio.sleep(1)
    gained, left = world.client.to("ns1:9876")[len(headers) :][:2]
    assert (gained.header.broker_id, gained.header.broker_addr) == (0, "10.0.0.9:9")
    assert left.command.code == RequestCode.UNREGISTER_BROKER
    header = BrokerHeader.decode(left.command.ext)
    assert (header.broker_id, header.broker_addr) == (3, LEADER)


async def test_role_that_changes_back_is_registered_at_once(
    world: World, nursery: trio.Nursery
) -> None:
    leads = world.group.leadership
    nursery.start_soon(world.registration.run)
    await trio.sleep(1)
    world.group.leadership = None
    world.registration.role_changed()
    await trio.sleep(0.005)  # half of the way to a NameServer
    world.group.leadership = leads
    world.registration.role_changed()
    await trio.sleep(0.5)
    for address in world.addresses:
        assert [call.header.broker_id for call in world.client.to(address)][-1] == 0


def waits(world: World) -> list[float]:
    """Return a list that gets the time when the topics of now are known."""
    known: list[float] = []
    world.registration.when_known(lambda: known.append(trio.current_time()))
    return known


async def test_topics_are_known_when_all_have_them(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.registration.run)
    await trio.sleep(5)
    began = trio.current_time()
    world.group.store(TopicsChange(put=(TopicConfig("T", 1, 1),)))
    known = waits(world)
    assert known == []
    await trio.sleep(5)
    calls = [world.client.to(address)[-1] for address in world.addresses]
    for call in calls:
        assert "T" in call.body.topic_config_serialize_wrapper.topic_config_table
    assert known == [max(call.at for call in calls)] == [pytest.approx(began, abs=0.1)]
    assert waits(world) == [trio.current_time()]


@pytest.mark.parametrize("trouble", ["slow", "down", "refusing"])
async def test_name_server_in_trouble_is_not_waited_for_long(
    world: World, nursery: trio.Nursery, trouble: str
) -> None:
    nursery.start_soon(world.registration.run)
    await trio.sleep(5)
    getattr(world.client, trouble).add("ns1:9876")
    began = trio.current_time()
    world.group.store(TopicsChange(put=(TopicConfig("T", 1, 1),)))
    known = waits(world)
    await trio.sleep(30)
    assert known == [pytest.approx(began, abs=KNOWN_WITHIN_S + 0.1)]
    assert waits(world) == [trio.current_time()]


async def test_end_of_registration_ends_waits(world: World) -> None:
    async with beside(world.registration.run):
        await trio.sleep(5)
        change = state_batch(TopicsChange(put=(TopicConfig("T", 1, 1),)))
        world.group.propose(change, lambda _: None)
        world.group.settle()
        known = waits(world)
        assert known == []
    assert known == [trio.current_time()]
    world.group.store(TopicsChange(delete=("T",)))
    assert waits(world) == [trio.current_time()]


async def test_a_name_server_that_is_down_holds_up_no_other(
    world: World, nursery: trio.Nursery
) -> None:
    world.client.down.add("ns1:9876")
    world.client.slow.add("ns3:9876")
    world.addresses.append("ns3:9876")
    nursery.start_soon(world.registration.run)
    await trio.sleep(0.1)
    assert len(world.client.to("ns2:9876")) == 1
    world.group.step_down()
    world.registration.role_changed()
    await trio.sleep(0.1)
    assert world.client.to("ns2:9876")[-1].header.broker_id == 3
    world.client.down.clear()
    await trio.sleep(3.2)
    assert world.client.to("ns1:9876"), "informed soon after it came back"


async def test_a_refused_registration_is_tried_again(world: World, nursery: trio.Nursery) -> None:
    world.client.refusing.add("ns1:9876")
    nursery.start_soon(world.registration.run)
    await trio.sleep(10)
    assert len(world.client.to("ns1:9876")) >= 3


async def test_registrations_carry_the_identity_of_the_group(
    world: World, nursery: trio.Nursery
) -> None:
    world.group.membership_proof = "ab" * 32
    nursery.start_soon(world.registration.run)
    await trio.sleep(1)
    await world.registration.unregister()
    register, unregister = world.client.to("ns1:9876")
    assert register.header.group_identity == GROUP_IDENTITY
    assert register.header.membership_proof == "ab" * 32
    assert BrokerHeader.decode(unregister.command.ext).group_identity == GROUP_IDENTITY


async def test_nothing_is_registered_before_the_group_has_an_identity(
    world: World, nursery: trio.Nursery
) -> None:
    world.group.group_identity = ""
    nursery.start_soon(world.registration.run)
    await trio.sleep(60)
    assert world.client.calls == []
    world.group.group_identity = GROUP_IDENTITY
    await trio.sleep(4)
    assert world.client.to("ns1:9876")


async def test_refused_registration_is_logged_once(
    world: World, nursery: trio.Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    world.client.refusing.add("ns1:9876")
    world.client.answers["ns2:9876"] = {"topicsLeftOut": "'T': perm 99 is not between 0 and 15"}
    nursery.start_soon(world.registration.run)
    await trio.sleep(40)
    assert world.registration.status() == {"registration_refused": {"ns1:9876": "no"}}
    world.client.refusing.clear()
    world.client.answers["ns1:9876"] = {"keptBy": "h9:10911"}
    await trio.sleep(40)
    kept = "h9:10911 is registered in the place of this broker"
    assert world.registration.status() == {"registration_refused": {"ns1:9876": kept}}
    world.client.answers.clear()
    await trio.sleep(40)
    assert world.registration.status() == {"registration_refused": {}}
    out = capsys.readouterr().out
    assert out.count("registration_refused") == 2
    assert out.count("topics_left_out") == 1


async def test_the_list_of_name_servers_may_change(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.registration.run)
    await trio.sleep(1)
    world.addresses[:] = ["ns2:9876", "ns9:9876"]
    await trio.sleep(60)
    assert world.client.to("ns9:9876")
    before = len(world.client.to("ns1:9876"))
    await trio.sleep(60)
    assert len(world.client.to("ns1:9876")) == before


async def test_a_clean_stop_unregisters_everywhere(world: World) -> None:
    world.client.slow.add("ns1:9876")
    began = trio.current_time()
    await world.registration.unregister()
    assert trio.current_time() - began < 1.1
    (call,) = world.client.to("ns2:9876")
    assert call.command.code == RequestCode.UNREGISTER_BROKER
    header = BrokerHeader.decode(call.command.ext)
    assert (header.broker_addr, header.broker_id) == (LEADER, 0)
