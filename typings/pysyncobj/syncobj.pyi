from collections.abc import Callable, Iterable
from typing import Any

from .config import SyncObjConf
from .journal import Journal
from .node import Node
from .transport import Transport

createJournal: Callable[[Any], Journal]
monotonicTime: Callable[[], float]
random: Any

class SyncObj:
    _poller: Any
    def __init__(
        self,
        selfNode: Node,
        otherNodes: Iterable[Node],
        conf: SyncObjConf | None = ...,
        consumers: None = ...,
        nodeClass: type = ...,
        transport: Transport | None = ...,
    ) -> None: ...
    def doTick(self, timeToWait: float = ...) -> None: ...
    def destroy(self) -> None: ...
    def _isLeader(self) -> bool: ...
    def _getLeader(self) -> Node | None: ...
    def _getTerm(self) -> int: ...
    @property
    def raftCommitIndex(self) -> int: ...
    def _onTick(self, timeToWait: float = ...) -> None: ...
    def _SyncObj__onMessageReceived(self, node: Node | None, message: dict[str, Any]) -> None: ...
