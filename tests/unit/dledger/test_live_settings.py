"""Settings of a running broker: what takes effect, and what is refused by name."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.processors.admin import (
    CHANGE_BYTES_MAX,
    READ_BY_TOOLS,
    BrokerConfigProcessor,
    LiveSettings,
    path_of,
)
from dledger.processors.wiring import BrokerProcessors
from dledger.remoting.errors import BadRequestError
from dledger.remoting.properties import read_properties
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.outcome import answer_error
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD, GIVES_UP_FIELD, decode_given_up
from dledger.services.retention import RetentionService
from dledger.settings.config import SETTINGS, BrokerConfig, load_config
from dledger.state.tables import QueueBounds
from dledger.testing.doubles import EPOCH_MS, ManualClock
from tests.harness.broker import Broker
from tests.harness.configs import another_value
from tests.harness.fake_group import FakeGroup
from tests.harness.pulls import pull

SEGMENT_BYTES = 64 << 10

EXPORTED = (
    *("brokerClusterName", "brokerId", "brokerName", "brokerRole", "fileReservedTime"),
    *("filterServerNums", "flushDiskType", "maxMessageSize", "messageDelayLevel"),
    *("msgTraceTopicName", "slaveReadEnable", "traceOn", "traceTopicEnable", "useTLS"),
    *("autoCreateTopicEnable", "autoCreateSubscriptionGroup"),
)
"""What `mqadmin exportConfigs` copies."""


OPTIONS = {
    "store.clean_file_forcibly_enable": "true",
    "store.mapped_file_size_commit_log": str(SEGMENT_BYTES),
    "store.max_message_size": "20000",
}


def live_settings(
    broker: Broker, options: Mapping[str, object] = OPTIONS, leads: bool = True
) -> LiveSettings:
    """Return the settings of a broker, whose parts have the tables."""
    config = load_config(options=options)
    broker.settings.broker, broker.settings.store = config.broker, config.store
    broker.processors = BrokerProcessors(broker.group, broker.settings, broker.seams)
    group = broker.group
    retention = RetentionService(
        group,
        lambda: group.log,
        config.store,
        clock=broker.clock,
        saved_index=lambda: 0,
        disk_ratio=lambda: 0.5,
    )
    return LiveSettings(config, group, retention, broker.clock)


@pytest.fixture
def broker(group: FakeGroup) -> Broker:
    return Broker(group)


@pytest.fixture
def live(broker: Broker) -> LiveSettings:
    return live_settings(broker)


LIVE = [path for path, setting in SETTINGS.items() if setting.live]


@pytest.mark.parametrize("path", LIVE)
def test_live_settings_change_the_table_of_the_parts(broker: Broker, path: str) -> None:
    live = live_settings(broker, {})
    table, _, name = path.partition(".")
    of_parts = getattr(live.config, table)
    text, value = another_value(SETTINGS[path])
    live.update({(*SETTINGS[path].keys, path)[0]: text}, is_confirmed=True)
    assert getattr(of_parts, name) == value
    assert live.config.sources[path] == "changed while it runs"


def test_live_settings_are_read_at_each_use(live: LiveSettings, broker: Broker) -> None:
    parts = broker.processors
    assert parts.topics.to_create("New", "TBW102", 4) is not None
    live.update({"autoCreateTopicEnable": "false", "diskSpaceWarningLevelRatio": "70"})
    assert parts.topics.to_create("New", "TBW102", 4) is None
    assert parts.space.warning_ratio == 0.7


def test_live_settings_reach_the_processors(live: LiveSettings, broker: Broker) -> None:
    broker.make_topic("T")
    live.update({"brokerPermission": "2"})
    assert pull(broker).code == 16
    live.update({"brokerPermission": "6"})
    assert pull(broker).code != 16


def test_live_settings_name_no_file_address_or_member(live: LiveSettings) -> None:
    for path in SETTINGS:
        named = path.endswith(("_file", "_dir", "_host", "_port", "_addr", "_ip1", "peers"))
        assert not (named and path in LIVE), path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"listenPort": "1"}, "listenPort cannot change while the broker runs"),
        ({"storePathRootDir": "/etc"}, "storePathRootDir cannot change"),
        ({"raft.secret_file": "/etc/passwd"}, "raft.secret_file cannot change"),
        ({"aclEnable": "true"}, "aclEnable cannot change"),
        ({"namesrvAddr": "1.2.3.4:9876"}, "namesrvAddr cannot change"),
        ({"rocketmqHome": "-c $@|sh . echo"}, "rocketmqHome changes nothing here"),
        ({"filterServerNums": "1"}, "filterServerNums changes nothing here"),
        ({"brokerConfigPath": "/etc/passwd"}, "brokerConfigPath changes nothing here"),
        ({"authenticationEnabled": "false"}, "authenticationEnabled: use aclEnable"),
        ({"nonsense": "1"}, "there is no setting nonsense"),
        ({"brokerPermission": "99"}, "brokerPermission = '99': expected"),
        ({"brokerPermission": "x"}, "brokerPermission = 'x'"),
        ({"maxMessageSize": "64 MiB"}, "store.max_message_size"),
        ({"raft.max_pending_bytes": "64 KiB"}, "raft.max_pending_bytes"),
    ],
)
def test_live_settings_refusal_names_the_key(
    live: LiveSettings, changes: dict[str, str], words: str
) -> None:
    before = (live.config.copied(), live.version)
    with pytest.raises(SettingRefusedError) as raised:
        live.update({"shortPollingTimeMills": "5", **changes})
    assert words in str(raised.value)
    assert (live.config, live.version) == before
    answered = answer_error(request(25), raised.value)
    assert (answered.code, answered.ext["outcome"]) == (1, "not_stored")


def test_live_settings_accept_a_key_that_changes_nothing(live: LiveSettings) -> None:
    notes = live.update({"sendMessageThreadPoolNums": "16", "shortPollingTimeMills": "5"})
    assert notes == [
        "sendMessageThreadPoolNums is accepted and changes nothing:"
        " there are no thread pools to size"
    ]
    assert live.config.broker.short_polling_time_ms == 5
    assert live.version.counter == 1
    live.update({"putThreadPoolQueueCapacity": "1"})
    assert live.version.counter == 1, "nothing has changed"


def test_live_settings_text_has_what_export_configs_reads(
    live: LiveSettings, broker: Broker
) -> None:
    """Java's Properties refuse null: one missing key ends the command."""
    for broker_id in ("0", "1"):
        if broker_id == "1":
            broker.group.step_down()
        found = read_properties(live.text())
        assert set(EXPORTED) - found.keys() == set()
        assert found["brokerId"] == broker_id
        assert found["useTLS"] == "false"


def test_live_settings_accept_the_present_value(live: LiveSettings) -> None:
    live.update({"listenPort": "10911", "brokerPermission": "6"})
    assert live.version.counter == 0


def test_live_settings_refuse_topics_without_a_template(broker: Broker) -> None:
    broker.group.state.builtin_topics = {}
    live = live_settings(broker, {"broker.auto_create_topic_enable": "false"})
    with pytest.raises(SettingRefusedError, match=r"autoCreateTopicEnable.*restart"):
        live.update({"autoCreateTopicEnable": "true"})


def test_live_settings_version_grows_with_each_change(
    live: LiveSettings, clock: ManualClock
) -> None:
    assert (live.version.counter, live.version.timestamp) == (0, EPOCH_MS)
    clock.now_s += 3.0
    live.update({"brokerPermission": "4", "shortPollingTimeMills": "5"})
    assert (live.version.counter, live.version.timestamp) == (1, EPOCH_MS + 3000)


def test_live_settings_log_both_values(live: LiveSettings) -> None:
    with structlog.testing.capture_logs() as lines:
        live.update({"brokerPermission": "4"}, asked_by="root at 10.0.0.1")
    assert lines == [
        {
            "event": "setting_changed",
            "log_level": "info",
            "setting": "broker.broker_permission",
            "value": "4",
            "before": "6",
            "asked_by": "root at 10.0.0.1",
        }
    ]


def fill(broker: Broker, messages: int) -> None:
    for _ in range(messages):
        broker.group.put("T", 0, bytes(SEGMENT_BYTES // 4))


SHORTER = [
    {"store.keep_bytes": "1"},
    {"fileReservedTime": "1"},
    {"diskSpaceCleanForciblyRatio": "80"},
    {"brokerPermission": "4", "store.keep_bytes": "1"},
]


@pytest.mark.parametrize("changes", SHORTER)
def test_live_settings_want_shorter_retention_confirmed(
    live: LiveSettings, broker: Broker, changes: dict[str, str]
) -> None:
    fill(broker, 20)
    before = (live.config.copied(), live.version)
    with pytest.raises(ConfirmationNeededError, match="nothing was changed; `dledger config set"):
        live.update(changes, asked_by="10.0.0.9")
    assert (live.config, live.version) == before
    with structlog.testing.capture_logs() as lines:
        live.update(changes, asked_by="root at 10.0.0.9", is_confirmed=True)
    assert live.config.store != before[0].store
    assert lines[0]["event"] == "retention_shortened"
    assert {line["asked_by"] for line in lines} == {"root at 10.0.0.9"}
    assert set(live._retention.asked_by.values()) == {"root at 10.0.0.9"}


def test_live_settings_want_forced_removal_confirmed(broker: Broker) -> None:
    live = live_settings(broker, {"store.mapped_file_size_commit_log": str(SEGMENT_BYTES)})
    with pytest.raises(ConfirmationNeededError, match="clean_file_forcibly_enable = true"):
        live.update({"cleanFileForciblyEnable": "true"})
    assert not live.config.store.clean_file_forcibly_enable


@pytest.mark.parametrize(
    "changes",
    [
        {"cleanFileForciblyEnable": "false"},
        {"fileReservedTime": "100"},
        {"deleteWhen": "05"},
        {"diskMaxUsedSpaceRatio": "50"},
        {"diskSpaceCleanForciblyRatio": "90"},
    ],
)
def test_live_settings_take_longer_retention_at_once(
    live: LiveSettings, changes: dict[str, str]
) -> None:
    live.update(changes)
    live.update({"store.keep_bytes": "4000"}, is_confirmed=True)
    live.update({"store.keep_bytes": "5000"})
    live.update({"store.keep_bytes": "0"})


def test_live_settings_count_only_what_is_kept_now(live: LiveSettings, broker: Broker) -> None:
    fill(broker, 20)
    broker.group.put("U", 0, b"newest")
    queues = broker.group.state.queues
    lost = []
    for kept_from in (0, 3):
        queues["T", 0] = QueueBounds(kept_from, queues["T", 0].max_offset)
        with pytest.raises(ConfirmationNeededError) as raised:
            live.update({"store.keep_bytes": "1"})
        lost.append(raised.value.lost.messages["T"])
    assert lost[0] > 3
    assert lost[1] == lost[0] - 3


def test_live_settings_count_what_would_go(live: LiveSettings, broker: Broker) -> None:
    fill(broker, 20)
    broker.group.put("U", 0, b"newest")
    with pytest.raises(ConfirmationNeededError) as raised:
        live.update({"store.keep_bytes": "1"})
    lost = raised.value.lost
    state, queue = broker.group.state, broker.group.queues.queue("T", 0)
    positions = [int(unit["phy_offset"]) for unit in queue.read(0, state.max_offset("T", 0))]
    gone = [at for at in positions if at < lost.size_bytes]
    assert gone
    assert lost.messages == {"T": len(gone)}
    assert lost.segments == 5
    assert "keep_bytes = 1 (now 0) gives up" in str(raised.value)
    answered = answer_error(request(25), raised.value)
    assert (answered.code, answered.ext["outcome"]) == (1, "not_stored")
    assert decode_given_up(answered.ext[GIVES_UP_FIELD]) == lost


def test_live_settings_text_has_every_setting(live: LiveSettings) -> None:
    reported = read_properties(live.text())
    assert {"brokerId", "useTLS", *READ_BY_TOOLS} <= reported.keys()
    for key in ("brokerId", "useTLS", *READ_BY_TOOLS):
        reported.pop(key)
    assert len(reported) == len(SETTINGS)
    assert reported["brokerPermission"] == "6"
    assert reported["longPollingEnable"] == "true"
    assert reported["deleteWhen"] == "04"
    assert reported["raft.election_timeout_ms"] == "800"
    assert {path_of(key) for key in reported} == set(SETTINGS)


# ------------------------------------------------------------------------------ requests


@pytest.fixture
def processor(live: LiveSettings) -> BrokerConfigProcessor:
    return BrokerConfigProcessor(live)


CONNECTION: Any = SimpleNamespace(peer_address=("10.0.0.1", 1), attributes={})


def updating(body: bytes) -> RemotingCommand:
    return request(25, {"AccessKey": "admin-1"}, body)


def test_live_settings_answer_has_the_version(processor: BrokerConfigProcessor) -> None:
    answered = processor.get(CONNECTION, request(26))
    assert answered.code == 0
    assert json.loads(answered.ext["version"])["counter"] == 0
    assert read_properties(bytes(answered.body).decode())["brokerName"] == "DEFAULT_BROKER"


def test_live_settings_request_holds_properties(
    processor: BrokerConfigProcessor, live: LiveSettings
) -> None:
    answered = processor.update(
        CONNECTION, updating(b"brokerPermission=4\nshortPollingTimeMills = 9\n")
    )
    assert answered.code == 0
    assert json.loads(answered.ext["version"])["counter"] == 1
    assert (live.config.broker.broker_permission, live.config.broker.short_polling_time_ms) == (
        4,
        9,
    )


def test_live_settings_request_must_be_confirmed(
    processor: BrokerConfigProcessor, live: LiveSettings
) -> None:
    command = updating(b"store.keep_bytes=1")
    with structlog.testing.capture_logs() as lines, pytest.raises(ConfirmationNeededError):
        processor.update(CONNECTION, command)
    assert [(line["event"], line["access_key"]) for line in lines] == [
        ("setting_refused", "admin-1")
    ]
    assert live.config.store.keep_bytes == 0
    command.ext[CONFIRMED_FIELD] = "true"
    assert processor.update(CONNECTION, command).code == 0
    assert live.config.store.keep_bytes == 1
    # The account in the request was not checked here.
    assert live._retention.asked_by == {"size": "10.0.0.1"}


@pytest.mark.parametrize(
    "body", [b"", b"\n# nothing\n", b"\xff=1", b"a=\\u12", b"=1", b"x" * (CHANGE_BYTES_MAX + 1)]
)
def test_live_settings_request_without_changes_is_refused(
    processor: BrokerConfigProcessor, body: bytes
) -> None:
    with pytest.raises((BadRequestError, SettingRefusedError)):
        processor.update(CONNECTION, updating(body))


def test_live_settings_log_a_refused_change(processor: BrokerConfigProcessor) -> None:
    with structlog.testing.capture_logs() as lines, pytest.raises(SettingRefusedError):
        processor.update(CONNECTION, updating(b"storePathRootDir=/etc"))
    (line,) = lines
    assert (line["event"], line["peer"], line["access_key"]) == (
        "setting_refused",
        "10.0.0.1",
        "admin-1",
    )
    assert "storePathRootDir" in line["error"]


def test_live_settings_check_a_change_as_a_whole() -> None:
    config: BrokerConfig = load_config()
    changed = config.with_values(
        {"raft.max_entry_bytes": 6 << 20, "store.max_message_size": 5 << 20}, "test"
    )
    assert changed.store.max_message_size == 5 << 20
    assert config.store.max_message_size == 4 << 20
