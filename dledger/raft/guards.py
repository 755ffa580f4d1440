"""The registry of guards: what we correct in the consensus library, one switch each.

Every field is one row of the table in docs/internals/consensus.md. A guard is on unless a test
builds a node with it off; no setting, flag or environment variable reaches these switches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def _guard(closes: str) -> bool:
    on: bool = field(default=True, metadata={"closes": closes})
    return on


@dataclass(frozen=True, slots=True)
class Guards:
    """Which corrections are in force. Product code always uses the default: all of them."""

    durable_before_promise: bool = _guard("ack or vote lost by power failure")
    envelope: bool = _guard("stale ack raises match index in a later term")
    idempotent_append: bool = _guard("duplicate or late append cuts acknowledged entries")
    next_index_never_back: bool = _guard("pipelined entries are sent again and again")
    one_vote_per_voter: bool = _guard(
        "double count; a returning node deposes a healthy leader, or never comes back"
    )
    commit_restored_clamped: bool = _guard(
        "commits its own entries while alone; replays everything at start"
    )
    leader_gives_up: bool = _guard("two leaders for 30 s")
    never_forwarded: bool = _guard("remote code execution, double append")
    no_pickle: bool = _guard("code execution, hang on a corrupt length")
    lazy_ranges: bool = _guard("a lagging follower costs O(n²)")
    entry_size_capped: bool = _guard("corrupt multi-part transmission")
    no_library_dump: bool = _guard("corrupt dump = empty leader; fork with threads")


ALL_ON = Guards()


def names() -> tuple[str, ...]:
    """Return the guards' names in the order of the table."""
    return tuple(guard.name for guard in fields(Guards))


def closes(name: str) -> str:
    """Return the defect that the guard *name* closes."""
    return next(str(guard.metadata["closes"]) for guard in fields(Guards) if guard.name == name)
