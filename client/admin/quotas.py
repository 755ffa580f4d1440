"""Administration of quotas: what an account or a client may use of each broker.

`dledger.client.admin.admin.Admin` has these as its own methods. Each broker group has quotas of its own, so
a change goes to each.
"""

from __future__ import annotations

from dledger.client.admin.leader_asks import LeaderAsks
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.quota_bodies import DELETE, PUT, QuotaHeader, QuotaInfo, QuotaList


class QuotaAdmin(LeaderAsks):
    """Reads and changes quotas."""

    async def set_quota(
        self,
        *,
        account: str | None = None,
        client: str | None = None,
        sent_messages_per_s: int | None = None,
        sent_bytes_per_s: int | None = None,
        received_messages_per_s: int | None = None,
        received_bytes_per_s: int | None = None,
        connections: int | None = None,
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Set a quota as a whole; each broker counts for itself.

        A limit that is None is none. A quota without limits exempts its account or client from the
        default.

        Args:
            account: Access key; empty: of each account that has no quota of its own.
            client: Id or address of clients without an account; empty: as for `account`.
            sent_messages_per_s: A batch counts by its messages.
            sent_bytes_per_s: Of bodies of sends.
            received_messages_per_s: Of pulls and POP.
            received_bytes_per_s: Of the same.
            connections: Open at one time.
            broker_names: Which groups; None: all the NameServer knows.
        Returns:
            The names of the groups that have it now.
        Raises:
            ValueError: Not exactly one of account and client is named; nothing was changed.
            RequestFailedError: A group refused; those before it in order have the change.
            BrokerUnreachableError: A leader does not answer.
        """
        kind, name = _named(account, client)
        header = QuotaHeader(
            PUT,
            kind,
            name or None,
            sent_messages_per_s,
            sent_bytes_per_s,
            received_messages_per_s,
            received_bytes_per_s,
            connections,
        )
        return await self._change_quota(header, broker_names)

    async def delete_quota(
        self,
        *,
        account: str | None = None,
        client: str | None = None,
        broker_names: tuple[str, ...] | None = None,
    ) -> list[str]:
        """Delete a quota: the default counts from now on; as `set_quota`."""
        kind, name = _named(account, client)
        return await self._change_quota(QuotaHeader(DELETE, kind, name or None), broker_names)

    async def quotas(self) -> dict[str, list[QuotaInfo]]:
        """Return the quotas of each broker group, with what its leader did because of them.

        Raises:
            RequestFailedError: A leader refused.
            BrokerUnreachableError: A leader does not answer.
        """
        found = {}
        for name in await self._leading():
            answer = await self._ask_leader(name, RequestCode.LIST_QUOTAS, {}, "TBW102")
            found[name] = QuotaList.decode(answer.body).quotas
        return found

    async def _change_quota(
        self, header: QuotaHeader, broker_names: tuple[str, ...] | None
    ) -> list[str]:
        what = f"{header.op} quota of {header.kind} {header.name or '(default)'}"
        return await self._change_on_every_leader(
            RequestCode.CHANGE_QUOTA, header.encode(), broker_names, what
        )


def _named(account: str | None, client: str | None) -> tuple[str, str]:
    if (account is None) == (client is None):
        raise ValueError("name an account or a client, one of them; nothing was changed")
    return ("client", client) if client is not None else ("account", account or "")
