"""Requests about quotas: CHANGE_QUOTA (51114) and LIST_QUOTAS (51115).

The leader decides on the applied table and what it has in flight; each member answers its own
figures.

Spec: docs/reference/own-requests.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from dledger.broker_errors import TableFullError
from dledger.group_api import BrokerGroup
from dledger.processors.answers import (
    RefusedError,
    asked_by,
    nothing_to_change,
    propose_change,
    require_leader,
)
from dledger.processors.handles import Limit, handles
from dledger.remoting.access.accounts import ADMIN
from dledger.remoting.access.audit import Subject
from dledger.remoting.connection import Connection
from dledger.remoting.processor import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.quota_bodies import DELETE, PUT, QuotaHeader, QuotaInfo, QuotaList
from dledger.services.pending_configs import PendingConfigs
from dledger.services.quota_buckets import QuotaBuckets
from dledger.state.quotas import KINDS, QuotaConfig, QuotasChange

QUOTAS_MAX: Final = 10_000
"""Quotas in one broker group, as many as accounts; each is in memory and in every snapshot."""

LIMIT_MAX: Final = 1 << 53
"""Of one limit: numbers up to it are whole in every language's JSON."""

NAME_CHARACTERS_MAX: Final = 255
"""Of an account's or client's name."""


def subject_of(command: RemotingCommand) -> Subject:
    """Return what a change is about, for the audit line. Pure.

    Raises:
        BadRequestError: It cannot be read.
    """
    header = QuotaHeader.decode(command.ext)
    limits = {
        name: str(value)
        for name, value in _config(header).to_state().items()
        if name not in ("kind", "name")
    }
    return {"op": header.op, header.kind: header.name or "(default)", **limits}


class QuotasProcessor:
    """Answers requests about quotas; changes go through the log."""

    def __init__(self, group: BrokerGroup, buckets: QuotaBuckets) -> None:
        self._group = group
        self._buckets = buckets
        self._pending: PendingConfigs[QuotaConfig] = PendingConfigs(group, self._applied)

    def _applied(self, key: str) -> QuotaConfig | None:
        return self._group.state.quotas.get(key)

    @handles(
        RequestCode.CHANGE_QUOTA, limit=Limit.ADMIN, rule=ADMIN, local=True, subject=subject_of
    )
    def change(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51114 when the quota is as asked for; one that is there already, at once."""
        header = QuotaHeader.decode(command.ext)
        require_leader(self._group)
        wanted = _checked(header)
        current = self._pending.resolve(wanted.key)
        if header.op == DELETE:
            if current is None and not len(self._pending):
                return nothing_to_change(self._group, connection, command)
            change = QuotasChange(delete=(wanted.key,), asked_by=asked_by(connection))
            propose_change(
                connection,
                command,
                self._group,
                change,
                lambda: [self._pending.delete(wanted.key)],
            )
            return DEFERRED
        if wanted == current and not len(self._pending):
            return nothing_to_change(self._group, connection, command)
        if current is None:
            self._check_room()
        change = QuotasChange(put=(wanted,), asked_by=asked_by(connection))
        propose_change(
            connection,
            command,
            self._group,
            change,
            lambda: [self._pending.put(wanted.key, wanted)],
        )
        return DEFERRED

    @handles(RequestCode.LIST_QUOTAS, limit=Limit.ADMIN, rule=ADMIN, shows=True)
    def list(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 51115: all quotas, with the figures of this member."""
        rows = [self._info(quota) for _, quota in sorted(self._group.state.quotas.items())]
        return response_to(command, 0, None, None, QuotaList(quotas=rows).encode())

    def _info(self, quota: QuotaConfig) -> QuotaInfo:
        figures, connections = self._buckets.figures, self._buckets.connections
        found = [figures[key] for key in self._counted_under(quota, figures)]
        return QuotaInfo(
            **quota.to_state(),
            throttled_ms=round(sum(each.throttled_s for each in found) * 1000),
            refused=sum(each.refused for each in found),
            open_connections=sum(
                connections[key] for key in self._counted_under(quota, connections)
            ),
        )

    def _counted_under(self, quota: QuotaConfig, counted: Mapping[str, object]) -> Iterator[str]:
        """Yield the keys that a quota counts for: of a default those without a quota of their own.

        Figures without a name, of which there are too many, are of no quota.
        """
        if quota.name:
            yield from [quota.key] if quota.key in counted else []
            return
        quotas = self._group.state.quotas
        for key in counted:
            if key.startswith(quota.key) and (key == quota.key or key not in quotas):
                yield key

    def _check_room(self) -> None:
        there = len(self._group.state.quotas) + len(self._pending)
        if there >= QUOTAS_MAX:
            raise TableFullError(
                f"{there} quotas are there, at most {QUOTAS_MAX}; nothing was stored; delete"
                " quotas that are not used"
            )


def _config(header: QuotaHeader) -> QuotaConfig:
    return QuotaConfig(
        header.kind,
        header.name or "",
        header.sent_messages_per_s,
        header.sent_bytes_per_s,
        header.received_messages_per_s,
        header.received_bytes_per_s,
        header.connections,
    )


def _checked(header: QuotaHeader) -> QuotaConfig:
    """Return what a change is about.

    Raises:
        RefusedError: It cannot be; nothing was changed.
    """
    quota = _config(header)
    problem = None
    if header.op not in (PUT, DELETE):
        problem = f"op {header.op[:32]!r} is not {PUT} or {DELETE}"
    elif quota.kind not in KINDS:
        problem = f"kind {quota.kind[:32]!r} is not one of {', '.join(KINDS)}"
    elif len(quota.name) > NAME_CHARACTERS_MAX or not quota.name.isprintable():
        problem = f"a name has up to {NAME_CHARACTERS_MAX} printable characters"
    elif quota.name != quota.name.strip():
        problem = "a name has no space at its ends"
    else:
        limits = quota.to_state()
        del limits["kind"], limits["name"]
        for name, value in limits.items():
            if not 1 <= value <= LIMIT_MAX:
                problem = f"{name} is {value}; a limit is 1 to {LIMIT_MAX}, none is left out"
    if problem is not None:
        raise RefusedError(Condition.BAD_REQUEST, f"{problem}; nothing was changed")
    return quota
