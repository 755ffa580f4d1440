"""Requests to a NameServer: decode, ask or change the tables, encode.

Every handler is synchronous: nothing can come between a question and its answer, and a route is
served whether or not brokers are registering.

Spec: docs/internals/protocol/remoting.md, section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from dledger.commitlog.errors import ConfigError
from dledger.namesrv.errors import RegistrationRefusedError, SettingLockedError
from dledger.namesrv.name_server import ORDER_TOPIC_CONFIG, NameServer, route_dialect
from dledger.namesrv.registration import (
    PROOF_CHARS_MAX,
    SHOWN_CHARACTERS,
    BrokerLiveInfo,
    RegisterResult,
    Registration,
    decode_register_body,
)
from dledger.remoting.access.accounts import ADMIN, SIGNED, Rule
from dledger.remoting.access.audit import Subject, fields_of
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError
from dledger.remoting.properties import read_properties
from dledger.remoting.protocol.bodies import (
    Body,
    BrokerMemberGroupBody,
    DataVersion,
    KVTable,
    TopicList,
    TopicRouteData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import (
    GROUP_IDENTITIES_FIELD,
    REFUSED_BROKERS_FIELD,
    AddWritePermResponseHeader,
    BrokerHeader,
    BrokerHeartbeatHeader,
    BrokerMemberGroupHeader,
    BrokerNameHeader,
    DeleteTopicInNamesrvHeader,
    GetKvConfigResponseHeader,
    GetRouteInfoHeader,
    KvConfigHeader,
    KvNamespaceHeader,
    PutKvConfigHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerHeader,
    RegisterBrokerResponseHeader,
    TopicHeader,
    TopicsByClusterHeader,
    WipeWritePermResponseHeader,
)
from dledger.remoting.seams import Clock

NO_ROUTE_REMARK: Final = (
    "No topic route info in name server for the topic: {topic}\n"
    "See http://rocketmq.apache.org/docs/faq/ for further details."
)

LEFT_OUT_SHOWN: Final = 8
"""Topics that an answer names; a table of bad ones must not fill a frame."""

_CONNECTION_NUMBER: Final = "namesrv.connection_number"

SyncHandler = Callable[[Connection, RemotingCommand], RemotingCommand]

_log = structlog.get_logger()


SUBJECT_FIELDS: Final = ("topic", "clusterName", "brokerName", "namespace", "key")
"""Fields of administrative requests that name what they are about."""


def subject_of(command: RemotingCommand) -> Subject:
    """Return what an administrative request is about, for the audit line; never a value. Pure.

    Raises BadRequestError: its body cannot be read.
    """
    if command.code == RequestCode.UPDATE_NAMESRV_CONFIG:
        return {"settings": ",".join(read_properties(_text_body(command)))}
    return fields_of(command, SUBJECT_FIELDS)


class Served(NamedTuple):
    """How a request is answered, what it must be allowed, and whether it is an administrative act.

    An act changes the routes of everybody, and gets an audit line: without access control it comes
    from the NameServer's own machine, unless `server.open_admin` is on.
    """

    answer: Callable[[Any, Connection, RemotingCommand], RemotingCommand]
    rule: Rule
    is_act: bool


SERVED: Final[dict[RequestCode, Served]] = {}
"""RocketMQ's NameServers check nothing. With access control here, a client that asks for routes
signs, and one that changes what all clients are sent is an administrator: brokers register with
such an account, for with that right one may send clients anywhere. What brokers send by themselves
is no act: registrations, that of a single topic (REGISTER_TOPIC_IN_NAMESRV) among them, and
heartbeats; the route table decides about these."""

HandlerT = TypeVar("HandlerT", bound=Callable[..., RemotingCommand])


def serves(
    code: RequestCode, rule: Rule, *, is_act: bool = False
) -> Callable[[HandlerT], HandlerT]:
    """Declare that a method of `NameServerProcessor` answers requests with *code*."""

    def declare(method: HandlerT) -> HandlerT:
        SERVED[code] = Served(method, rule, is_act)
        return method

    return declare


class NameServerProcessor:
    """Answers every request code a NameServer has."""

    def __init__(self, name_server: NameServer, clock: Clock) -> None:
        self._name_server = name_server
        self._clock = clock
        self._started_ms = self._now_ms()
        self._connections: dict[int, Connection] = {}
        self._last_connection_number = 0

    def handlers(self) -> dict[RequestCode, SyncHandler]:
        """Return the handler of each request code."""
        return {code: partial(served.answer, self) for code, served in SERVED.items()}

    def scan(self) -> None:
        """Remove silent brokers and close connections that served no other broker."""
        routes = self._name_server.routes
        gone = routes.scan(self._now_ms())
        _log_removed(gone, "expired")
        routes.refused.expire(self._now_ms())
        used = {info.connection for info in routes.broker_live_table.values()}
        for number in {info.connection for info in gone} - used:
            connection = self._connections.get(number) if number is not None else None
            if connection is not None:
                connection.close("its broker expired")

    # Routes

    @serves(RequestCode.GET_ROUTEINFO_BY_TOPIC, SIGNED)
    def get_route_info(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_ROUTEINFO_BY_TOPIC: the encoded route, or 17."""
        header = GetRouteInfoHeader.decode(asked.ext)
        if not self._is_ready():
            return response_to(asked, ResponseCode.SYSTEM_ERROR, "name server not ready")
        dialect = route_dialect(
            asked.version, accept_standard_json_only=header.accept_standard_json_only is True
        )
        body = self._name_server.route_cache.body(header.topic, dialect)
        if body is None:
            remark = NO_ROUTE_REMARK.format(topic=header.topic)
            return response_to(asked, ResponseCode.TOPIC_NOT_EXIST, remark)
        ext = None
        if header.group_identities is True:
            stated = self._name_server.routes.stated_identities(header.topic)
            if stated:
                ext = {GROUP_IDENTITIES_FIELD: msgspec.json.encode(stated).decode()}
        return response_to(asked, ext=ext, body=body)

    @serves(RequestCode.GET_BROKER_CLUSTER_INFO, SIGNED)
    def get_broker_cluster_info(
        self, _connection: Connection, asked: RemotingCommand
    ) -> RemotingCommand:
        """GET_BROKER_CLUSTER_INFO: every broker and cluster, and the refused ones."""
        routes = self._name_server.routes
        refused = msgspec.json.encode(routes.refused.reasons()).decode()
        ext = {REFUSED_BROKERS_FIELD: refused} if routes.refused else None
        return response_to(asked, ext=ext, body=routes.cluster_info().encode())

    @serves(RequestCode.GET_BROKER_MEMBER_GROUP, SIGNED)
    def get_broker_member_group(
        self, _connection: Connection, asked: RemotingCommand
    ) -> RemotingCommand:
        """GET_BROKER_MEMBER_GROUP: the addresses of one broker name."""
        header = BrokerMemberGroupHeader.decode(asked.ext)
        group = self._name_server.routes.member_group(header.cluster_name, header.broker_name)
        return _answer_body(asked, BrokerMemberGroupBody(broker_member_group=group))

    # Brokers

    @serves(RequestCode.REGISTER_BROKER, ADMIN)
    def register_broker(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """REGISTER_BROKER: enter or refresh a broker; a follower learns its leader's addresses."""
        header = RegisterBrokerHeader.decode(asked.ext)
        body = decode_register_body(
            asked.body, compressed=header.compressed is True, crc=header.body_crc32 or 0
        )
        wrapper = body.topic_config_serialize_wrapper
        result = self._registered(
            Registration(
                cluster_name=header.cluster_name,
                broker_name=header.broker_name,
                broker_addr=header.broker_addr,
                broker_id=header.broker_id,
                topics=wrapper.topic_config_table,
                data_version=wrapper.data_version,
                ha_server_addr=header.ha_server_addr,
                heartbeat_timeout_ms=header.heartbeat_timeout_millis,
                enable_acting_master=header.enable_acting_master,
                filter_servers=body.filter_server_list,
                connection=self._number_of(connection),
                identity=header.group_identity or "",
                proof=(header.membership_proof or "")[:PROOF_CHARS_MAX],
                since=None
                if header.topics_since is None
                else DataVersion.of_text(header.topics_since),
                removed_topics=body.removed_topics or (),
            )
        )
        if result.moved or result.superseded:
            _log.info(
                "broker_superseded" if result.superseded else "broker_registered",
                cluster=header.cluster_name,
                broker_name=header.broker_name,
                broker_addr=header.broker_addr,
                broker_id=header.broker_id,
                state_version=wrapper.data_version.state_version,
            )
        left_out = _shown_topics(result.left_out)
        response = RegisterBrokerResponseHeader(
            ha_server_addr=result.ha_server_addr or None,
            master_addr=result.master_addr or None,
            kept_by=result.kept_by or None,
            topics_left_out=left_out or None,
            # Not to brokers of RocketMQ: they get what RocketMQ's NameServer answers.
            takes_differences=True if header.group_identity else None,
            needs_all=result.needs_all or None,
        )
        return response_to(asked, ext=response.encode(), body=self._order_topics())

    def _registered(self, registration: Registration) -> RegisterResult:
        routes, now_ms = self._name_server.routes, self._now_ms()
        name, addr = registration.broker_name, registration.broker_addr
        try:
            result = routes.register_broker(registration, now_ms)
        except RegistrationRefusedError as error:
            if routes.refused.note(name, addr, str(error), now_ms):
                _log.warning(
                    "registration_refused",
                    cluster=registration.cluster_name[:SHOWN_CHARACTERS],
                    broker_name=name[:SHOWN_CHARACTERS],
                    broker_addr=addr[:SHOWN_CHARACTERS],
                    group_identity=registration.identity[:SHOWN_CHARACTERS],
                    reason=str(error)[: 4 * SHOWN_CHARACTERS],
                )
            raise
        if result.superseded:
            kept = f"its id is held by {result.kept_by}"
            routes.refused.note(name, addr, kept, now_ms)
        elif result.left_out:
            topics = _shown_topics(result.left_out)
            if routes.refused.note(name, addr, f"topics are left out: {topics}", now_ms):
                _log.warning("topics_left_out", broker_name=name, topics=topics)
        else:
            routes.refused.forget(name, addr)
        return result

    @serves(RequestCode.UNREGISTER_BROKER, ADMIN)
    def unregister_broker(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """UNREGISTER_BROKER: remove a broker that stops."""
        header = BrokerHeader.decode(asked.ext)
        if not self._name_server.routes.unregister_broker(
            header.cluster_name,
            header.broker_name,
            header.broker_addr,
            identity=header.group_identity or "",
            connection=self._number_if_any(connection),
        ):
            return response_to(asked, remark="it is not registered")
        _log.info(
            "broker_removed",
            reason="unregistered",
            cluster=header.cluster_name,
            broker_name=header.broker_name,
            broker_addr=header.broker_addr,
        )
        return response_to(asked)

    @serves(RequestCode.BROKER_HEARTBEAT, ADMIN)
    def broker_heartbeat(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """BROKER_HEARTBEAT: liveness only."""
        header = BrokerHeartbeatHeader.decode(asked.ext)
        self._name_server.routes.heartbeat(
            header.cluster_name,
            header.broker_addr,
            self._now_ms(),
            connection=self._number_if_any(connection),
        )
        return response_to(asked)

    @serves(RequestCode.QUERY_DATA_VERSION, ADMIN)
    def query_data_version(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """QUERY_DATA_VERSION: must the broker register, or is its topic table known?"""
        header = BrokerHeader.decode(asked.ext)
        version = DataVersion.decode(asked.body) if asked.body else DataVersion()
        changed, stored = self._name_server.routes.query_data_version(
            header.cluster_name,
            header.broker_addr,
            version,
            self._now_ms(),
            identity=header.group_identity or "",
            connection=self._number_if_any(connection),
        )
        return response_to(
            asked,
            ext=QueryDataVersionResponseHeader(changed=changed).encode(),
            body=stored.encode() if stored is not None else b"",
        )

    # Topics

    @serves(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, SIGNED)
    def get_all_topics(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_ALL_TOPIC_LIST_FROM_NAMESERVER."""
        if not self._name_server.config.namesrv.enable_all_topic_list:
            return response_to(asked, ResponseCode.SYSTEM_ERROR, "disable")
        return _answer_topics(asked, self._name_server.routes.all_topics())

    @serves(RequestCode.GET_TOPICS_BY_CLUSTER, SIGNED)
    def get_topics_by_cluster(
        self, _connection: Connection, asked: RemotingCommand
    ) -> RemotingCommand:
        """GET_TOPICS_BY_CLUSTER."""
        header = TopicsByClusterHeader.decode(asked.ext)
        return _answer_topics(asked, self._name_server.routes.topics_of_cluster(header.cluster))

    @serves(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, SIGNED)
    def get_system_topics(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_SYSTEM_TOPIC_LIST_FROM_NS: names of clusters and brokers, and some address."""
        names, addr = self._name_server.routes.system_topics()
        return _answer_body(asked, TopicList(topic_list=names, broker_addr=addr or None))

    @serves(RequestCode.GET_UNIT_TOPIC_LIST, SIGNED)
    def get_unit_topics(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_UNIT_TOPIC_LIST."""
        return _answer_topics(asked, self._name_server.routes.unit_topics(unit=True, unit_sub=None))

    @serves(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, SIGNED)
    def get_unit_sub_topics(
        self, _connection: Connection, asked: RemotingCommand
    ) -> RemotingCommand:
        """GET_HAS_UNIT_SUB_TOPIC_LIST."""
        return _answer_topics(asked, self._name_server.routes.unit_topics(unit=None, unit_sub=True))

    @serves(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, SIGNED)
    def get_unit_sub_ununit_topics(
        self, _connection: Connection, asked: RemotingCommand
    ) -> RemotingCommand:
        """GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST."""
        return _answer_topics(
            asked, self._name_server.routes.unit_topics(unit=False, unit_sub=True)
        )

    @serves(RequestCode.DELETE_TOPIC_IN_NAMESRV, ADMIN, is_act=True)
    def delete_topic(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """DELETE_TOPIC_IN_NAMESRV: take a topic out of the route."""
        header = DeleteTopicInNamesrvHeader.decode(asked.ext)
        self._name_server.routes.delete_topic(header.topic, header.cluster_name or None)
        _log.info("topic_deleted", topic=header.topic, cluster=header.cluster_name)
        return response_to(asked)

    @serves(RequestCode.REGISTER_TOPIC_IN_NAMESRV, ADMIN)
    def register_topic(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """REGISTER_TOPIC_IN_NAMESRV: enter a topic on registered brokers."""
        header = TopicHeader.decode(asked.ext)
        route = TopicRouteData.decode(asked.body) if asked.body else TopicRouteData()
        number = self._number_if_any(connection)
        entered = self._name_server.routes.register_topic(
            header.topic, route.queue_datas, connection=number
        )
        _log.info("topic_registered" if entered else "topic_not_registered", topic=header.topic)
        return response_to(asked)

    @serves(RequestCode.WIPE_WRITE_PERM_OF_BROKER, ADMIN, is_act=True)
    def wipe_write_perm(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """WIPE_WRITE_PERM_OF_BROKER: producers leave the broker."""
        name = BrokerNameHeader.decode(asked.ext).broker_name
        count = self._name_server.routes.wipe_write_perm(name)
        _log.info("write_perm_wiped", broker_name=name, topics=count)
        return response_to(asked, ext=WipeWritePermResponseHeader(wipe_topic_count=count).encode())

    @serves(RequestCode.ADD_WRITE_PERM_OF_BROKER, ADMIN, is_act=True)
    def add_write_perm(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """ADD_WRITE_PERM_OF_BROKER: producers may come back."""
        name = BrokerNameHeader.decode(asked.ext).broker_name
        count = self._name_server.routes.add_write_perm(name)
        _log.info("write_perm_added", broker_name=name, topics=count)
        return response_to(asked, ext=AddWritePermResponseHeader(add_topic_count=count).encode())

    # Key-value configuration

    @serves(RequestCode.PUT_KV_CONFIG, ADMIN, is_act=True)
    def put_kv_config(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """PUT_KV_CONFIG: durable when answered."""
        header = PutKvConfigHeader.decode(asked.ext)
        self._name_server.put_kv(header.namespace, header.key, header.value)
        _log.info("kv_config_put", namespace=header.namespace, key=header.key)
        return response_to(asked)

    @serves(RequestCode.GET_KV_CONFIG, SIGNED)
    def get_kv_config(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_KV_CONFIG: the value, or 22."""
        header = KvConfigHeader.decode(asked.ext)
        value = self._name_server.kv_config.get(header.namespace, header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return response_to(asked, ResponseCode.QUERY_NOT_FOUND, remark)
        return response_to(asked, ext=GetKvConfigResponseHeader(value=value).encode())

    @serves(RequestCode.DELETE_KV_CONFIG, ADMIN, is_act=True)
    def delete_kv_config(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """DELETE_KV_CONFIG: durable when answered; missing is fine."""
        header = KvConfigHeader.decode(asked.ext)
        self._name_server.delete_kv(header.namespace, header.key)
        _log.info("kv_config_deleted", namespace=header.namespace, key=header.key)
        return response_to(asked)

    @serves(RequestCode.GET_KVLIST_BY_NAMESPACE, SIGNED)
    def get_kv_list(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_KVLIST_BY_NAMESPACE: all of a namespace, or 22."""
        header = KvNamespaceHeader.decode(asked.ext)
        table = self._name_server.kv_config.table(header.namespace)
        if table is None:
            remark = f"No config item, Namespace: {header.namespace}"
            return response_to(asked, ResponseCode.QUERY_NOT_FOUND, remark)
        return _answer_body(asked, KVTable(table=dict(table)))

    # Settings

    @serves(RequestCode.UPDATE_NAMESRV_CONFIG, ADMIN, is_act=True)
    def update_config(self, connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """UPDATE_NAMESRV_CONFIG: change settings until the next start, all of them or none."""
        changes = read_properties(_text_body(asked))
        try:
            notes = self._name_server.update_settings(changes)
        except (ConfigError, SettingLockedError) as error:
            _log.warning("setting_refused", error=str(error), peer=connection.peer_address[0])
            raise
        _log.info("settings_updated", **changes)
        for note in notes:
            _log.warning("setting_changes_nothing", text=note)
        return response_to(asked, 0, "; ".join(notes) or None)

    @serves(RequestCode.GET_NAMESRV_CONFIG, ADMIN)
    def get_config(self, _connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        """GET_NAMESRV_CONFIG: all settings under RocketMQ's names."""
        return response_to(asked, body=self._name_server.settings_text().encode())

    # Inside

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def _is_ready(self) -> bool:
        config = self._name_server.config.namesrv
        if not config.need_wait_for_service:
            return True
        return self._now_ms() - self._started_ms >= config.wait_seconds_for_service * 1000

    def _order_topics(self) -> bytes:
        if not self._name_server.config.namesrv.return_order_topic_config_to_broker:
            return b""
        table = self._name_server.kv_config.table(ORDER_TOPIC_CONFIG)
        return b"" if table is None else KVTable(table=dict(table)).encode()

    def _number_if_any(self, connection: Connection) -> int | None:
        """Return the number of a connection that a broker registered over, else None."""
        number: int | None = connection.attributes.get(_CONNECTION_NUMBER)
        return number

    def _number_of(self, connection: Connection) -> int:
        connection.note_heartbeat()
        number: int | None = connection.attributes.get(_CONNECTION_NUMBER)
        if number is None:
            self._last_connection_number += 1
            number = self._last_connection_number
            connection.attributes[_CONNECTION_NUMBER] = number
            self._connections[number] = connection
            connection.on_close.append(self._connection_closed)
        return number

    def _connection_closed(self, connection: Connection) -> None:
        number = connection.attributes[_CONNECTION_NUMBER]
        self._connections.pop(number, None)
        _log_removed(self._name_server.routes.disconnect(number), "disconnected")


def _shown_topics(left_out: Sequence[tuple[str, str]]) -> str:
    """Return topics and reasons for a log or an answer: the first ones, and how many there are."""
    shown = [f"{name[:SHOWN_CHARACTERS]!r}: {why}" for name, why in left_out[:LEFT_OUT_SHOWN]]
    more = len(left_out) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def _log_removed(gone: Sequence[BrokerLiveInfo], reason: str) -> None:
    for info in gone:
        _log.info(
            "broker_removed",
            reason=reason,
            cluster=info.key.cluster_name,
            broker_name=info.broker_name,
            broker_addr=info.key.broker_addr,
        )


def _answer_body(asked: RemotingCommand, body: Body) -> RemotingCommand:
    return response_to(asked, body=body.encode())


def _answer_topics(asked: RemotingCommand, topics: list[str]) -> RemotingCommand:
    return _answer_body(asked, TopicList(topic_list=topics))


def _text_body(asked: RemotingCommand) -> str:
    try:
        return bytes(asked.body).decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"body is not UTF-8: {error}") from error
