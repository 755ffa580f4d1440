"""The error of a fault that could not be injected or healed."""

from __future__ import annotations

from commitlog.errors import MQError


class FaultError(MQError):
    """A fault could not be injected or healed; the message says what stands as it was left.

    It says nothing about the cluster under test: the run proves nothing from here on.
    """
