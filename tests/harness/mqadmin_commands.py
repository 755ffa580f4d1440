"""Commands of RocketMQ's `mqadmin` as a team types them, and the page of what they do."""

import re
from collections.abc import Mapping

from tests.harness.shipped_files import ROOT

CLUSTER = "-c DefaultCluster"

COMMANDS: Mapping[str, str] = {
    # Topics.
    "updateTopic": f"{CLUSTER} -t Made -r 4 -w 4",
    "updateTopicList": "-b {leader} -f {topics_file}",
    "topicList": "",
    "topicRoute": "-t Orders",
    "topicClusterList": "-t Orders",
    "topicStatus": "-t Orders",
    "updateTopicPerm": f"{CLUSTER} -t Made -p 4",
    "updateOrderConf": "-m put -t Orders -v broker-a:4",
    "allocateMQ": "-t Orders -i 127.0.0.1",
    "statsAll": "-t Orders",
    "updateStaticTopic": "-t Static -qn 4 -c DefaultCluster",
    "remappingStaticTopic": "-t Orders -c DefaultCluster",
    # Consumer groups and producers.
    "updateSubGroup": f"{CLUSTER} -g made",
    "updateSubGroupList": "-b {leader} -f {groups_file}",
    "getConsumerConfig": "-g made",
    "setConsumeMode": "-b {leader} -t Orders -g workers -m PULL -q 0",
    "consumerProgress": "-g workers",
    "consumerConnection": "-g workers",
    "consumerStatus": "-g workers",
    "producer": "-b {leader}",
    "producerConnection": "-g senders -t Orders",
    "resetOffsetByTime": "-g idle -t Orders -s 0",
    "skipAccumulatedMessage": "-g idle -t Orders",
    "cloneGroupOffset": "-s workers -d clones -t Orders -o true",
    "brokerConsumeStats": "-b {leader}",
    # Messages.
    "sendMessage": "-t Orders -p one",
    "sendMsgStatus": "-b broker-a -s 64 -c 2",
    "consumeMessage": "-t Orders -g readers -c 1",
    "checkMsgSendRT": "-t Orders -a 2 -s 64",
    "clusterRT": "-a 2 -s 64 -c DefaultCluster -i 1",
    "printMsg": "-t Orders -b {before} -e {after}",
    "printMsgByQueue": "-t Orders -a broker-a -i 0 -p true",
    "queryMsgById": "-i {message_id} -t Orders",
    "queryMsgByKey": "-t Orders -k order-1",
    "queryMsgByUniqueKey": "-t Orders -i {unique_key}",
    "queryMsgByOffset": "-t Orders -b broker-a -i 0 -o 0",
    "queryMsgTraceById": "-i {unique_key}",
    "queryCq": "-t Orders -q 0 -i 0 -b {leader}",
    "dumpCompactionLog": "-f {empty_file}",
    "exportPopRecord": f"{CLUSTER} -d true",
    # Brokers, cluster and NameServers.
    "clusterList": "",
    "brokerStatus": "-b {leader}",
    "getBrokerConfig": "-b {leader}",
    "updateBrokerConfig": "-b {leader} -k maxMessageSize -v 4194304",
    "getNamesrvConfig": "",
    "updateNamesrvConfig": "-k returnOrderTopicConfigToBroker -v true",
    "updateKvConfig": "-s mine -k name -v value",
    "deleteKvConfig": "-s mine -k name",
    "wipeWritePerm": "-b broker-a",
    "addWritePerm": "-b broker-a",
    "cleanExpiredCQ": "-b {leader}",
    "cleanUnusedTopic": "-b {leader}",
    "deleteExpiredCommitLog": "-b {leader}",
    "exportConfigs": f"{CLUSTER} -f {{folder}}",
    "exportMetadata": f"{CLUSTER} -f {{folder}}",
    "exportMetrics": f"{CLUSTER} -f {{folder}}",
    "exportMetadataInRocksDB": "-p {no_file} -t topics",
    "rocksDBConfigToJson": f"{CLUSTER} -t topics",
    "checkRocksdbCqWriteProgress": f"{CLUSTER} -t Orders",
    "startMonitoring": "",
    "haStatus": "-b {leader}",
    "getSyncStateSet": "-a {leader} -b broker-a",
    "getBrokerEpoch": "-b broker-a",
    "resetMasterFlushOffset": "-b {leader} -o 0",
    "addBroker": "-c {leader} -b {no_file}",
    "removeBroker": "-c {leader} -b DefaultCluster:broker-a:0",
    "switchTimerEngine": "-b {leader} -e R",
    "getColdDataFlowCtrInfo": "-b {leader}",
    "updateColdDataFlowCtrGroupConfig": "-b {leader} -g workers -v 1024",
    "removeColdDataFlowCtrGroupConfig": "-b {leader} -g workers",
    "setCommitLogReadAheadMode": "-b {leader} -m 0",
    "getControllerMetaData": "-a {leader}",
    "getControllerConfig": "-a {leader}",
    "updateControllerConfig": "-a {leader} -k enableElectUncleanMaster -v true",
    "electMaster": "-a {leader} -b 1 -bn broker-a -c DefaultCluster",
    "cleanBrokerMetadata": f"-a {{leader}} -bn broker-a {CLUSTER}",
    # Lite topics.
    "getBrokerLiteInfo": "-b {leader}",
    "getParentTopicInfo": "-p Orders",
    "getLiteTopicInfo": "-p Orders -l child",
    "getLiteClientInfo": "-p Orders -g workers -c client",
    "getLiteGroupInfo": "-p Orders -g workers -l child",
    "triggerLiteDispatch": "-p Orders -g workers",
    # At last.
    "deleteSubGroup": "-b {leader} -g made",
    "deleteTopic": f"{CLUSTER} -t Made",
}
"""Words of each command, the address of the NameServer apart, in the order in which they run."""

OLDER: Mapping[str, str] = {"queryMsgById": "-i {message_id}"}
"""Words of commands of 4.9.7 that differ."""

SHOWS: Mapping[str, str] = {
    "topicList": "Orders",
    "topicRoute": "broker-a",
    "topicClusterList": "DefaultCluster",
    "topicStatus": "broker-a",
    "statsAll": "Orders",
    "consumerProgress": "Orders",
    "consumerConnection": "Orders",
    "consumerStatus": "#ClientId",
    "producer": "senders",
    "producerConnection": "127.0.0.1",
    "brokerConsumeStats": "workers",
    "sendMessage": "SEND_OK",
    "sendMsgStatus": "SEND_OK",
    "printMsg": "order-1",
    "printMsgByQueue": "Orders",
    "queryMsgById": "order-1",
    "queryMsgByKey": "  0",
    "queryMsgByUniqueKey": "order-1",
    "queryMsgByOffset": "Orders",
    "queryMsgTraceById": "#Type",
    "queryCq": "tagsCode=65",
    "clusterList": "DefaultCluster",
    "brokerStatus": "msgPutTotalTodayNow",
    "getBrokerConfig": "brokerClusterName",
    "getNamesrvConfig": "listenPort",
    "getConsumerConfig": "made",
    "cloneGroupOffset": "clone group offset success",
}
"""What the output of commands that work has in it."""

ACCOUNTS = frozenset(
    {
        *("updateAclConfig", "deleteAclConfig", "clusterAclConfigVersion", "updateGlobalWhiteAddr"),
        *("getAclConfig", "createUser", "updateUser", "deleteUser", "getUser", "listUser"),
        *("copyUser", "createAcl", "updateAcl", "deleteAcl", "getAcl", "listAcl", "copyAcl"),
    }
)
"""About accounts: from-mqadmin.md has what takes their place."""

ENDLESS = frozenset({"startMonitoring", "clusterRT"})
"""They go on until they are interrupted."""

PAGE = ROOT / "docs" / "operate" / "mqadmin-commands.md"
WORKS, NOT_THERE = "works", "—"

LOCAL = {"exportMetadataInRocksDB": "RocksDB path is invalid"}
"""What commands that ask no broker print where there is nothing to read."""

_SWALLOWED = re.compile(r"^\[?broker-a\]?\s+error\.?\s*$", re.MULTILINE)
_REASON = re.compile(r"CODE: \d+\s+DESC: (.*)")
_THROWN = re.compile(r"^(?:Caused by: )?[\w.$]+(?:Exception|Error)\b(?:: (.*))?", re.MULTILINE)
_ADDRESS = re.compile(r"\b\d+\.\d+\.\d+\.\d+:\d+\b|/\S+/")
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", re.MULTILINE)


def _shown(reason: str) -> str:
    return _ADDRESS.sub("ADDRESS", reason).replace("|", "/")


def outcome(command: str, printed: str, *, ended: bool) -> str:
    """Return `WORKS`, or the reason that a command shows why it does not; empty: it shows none.

    Args:
        ended: It came to an end by itself.
    """
    thrown = _THROWN.findall(printed)
    reason = _REASON.search(printed)
    if reason is not None and thrown:
        return _shown(reason[1].split(" For more information")[0].strip())
    if _SWALLOWED.search(printed):
        return "the tool shows *error* and no reason"
    if command in LOCAL and LOCAL[command] in printed:
        return f"the tool itself: {LOCAL[command]}"
    if command in ENDLESS and not ended:
        return WORKS
    if thrown:
        return _shown(f"the tool itself: {thrown[-1]}") if thrown[-1] else ""
    return WORKS if ended else ""


def stated() -> dict[str, tuple[str, ...]]:
    """Return what the page states of each command, for each version."""
    return {command: outcomes for command, *outcomes in _ROW.findall(PAGE.read_text())}


def written(outcomes: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page with the outcomes of versions, by command, in its table."""
    rows = []
    for command in COMMANDS:
        cells = [found.get(command, NOT_THERE) for found in outcomes.values()]
        rows.append(f"| {' | '.join([f'`{command}`', *cells])} |")
    before, _, rest = PAGE.read_text().partition("<!-- table -->")
    head = "| command | " + " | ".join(outcomes) + " |\n|---|" + "---|" * len(outcomes)
    _, _, behind = rest.partition("<!-- end of table -->")
    table = "\n".join([head, *rows])
    return f"{before}<!-- table -->\n\n{table}\n\n<!-- end of table -->{behind}"
