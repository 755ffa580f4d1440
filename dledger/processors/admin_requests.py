"""The requests of tools that need no processor's room of its own, by code.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Callable

from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.broker_stats import BrokerStatsProcessor
from dledger.processors.clean_up import CleanUpProcessor
from dledger.processors.client_table import ClientTable
from dledger.processors.clone_offsets import CloneOffsetsProcessor
from dledger.processors.producer_list import ProducerListProcessor
from dledger.processors.reset_offsets import ResetOffsetsProcessor
from dledger.processors.slave_sync import SlaveSyncProcessor
from dledger.services.broker_stats import BrokerStats
from dledger.services.offset_commits import OffsetCommits
from remoting.connection import Connection
from remoting.processor import Handler
from remoting.protocol.codes import RequestCode
from remoting.seams import Clock


def admin_handlers(
    group: BrokerGroup,
    clients: ClientTable[Connection],
    offsets: OffsetCommits,
    stats: BrokerStats,
    settings: BrokerSettings,
    *,
    clock: Clock,
    expire_soon: Callable[[str], None],
) -> dict[RequestCode, Handler]:
    """Return their handlers."""
    clean_up = CleanUpProcessor(group, expire_soon)
    tables = SlaveSyncProcessor(group)
    return {
        RequestCode.GET_ALL_CONSUMER_OFFSET: tables.consumer_offsets,
        RequestCode.GET_ALL_DELAY_OFFSET: tables.delay_offsets,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: clean_up.nothing_to_clean,
        RequestCode.CLEAN_UNUSED_TOPIC: clean_up.nothing_to_clean,
        RequestCode.DELETE_EXPIRED_COMMITLOG: clean_up.delete_expired,
        RequestCode.CLONE_GROUP_OFFSET: CloneOffsetsProcessor(group, clients, offsets).handle,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: ResetOffsetsProcessor(
            group, clients, offsets, settings
        ).handle,
        RequestCode.VIEW_BROKER_STATS_DATA: BrokerStatsProcessor(stats, clock=clock).handle,
        RequestCode.GET_ALL_PRODUCER_INFO: ProducerListProcessor(clients, clock=clock).handle,
    }
