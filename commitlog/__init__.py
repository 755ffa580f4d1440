"""The log on disk: records, entries, segments, consume queues, key index, recovery.

Synchronous and pure: no event loop, no sockets, no Raft. All disk access goes through
:mod:`dledger.commitlog.seams`.
"""
