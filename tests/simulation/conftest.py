"""No test of simulated clusters waits for the disk of this machine."""

from tests.harness.quick_flushes import quick_flushes

__all__ = ["quick_flushes"]
