"""OpenTelemetry for sends and consumptions; needs the extra ``otel``.

Not part of `import dledger`, whose names are there in a plain install.
"""

from dledger.client.telemetry import OpenTelemetryHook, trace_context_of

__all__ = ["OpenTelemetryHook", "trace_context_of"]
