"""``dledger-proxy``: RocketMQ's gRPC protocol in front of brokers that speak remoting.

A stateless daemon, any number of them: what outlives a request is in the log of a broker group.
It needs the extra ``proxy``.

Decision: docs/internals/decisions/0018-proxy.md.
"""
