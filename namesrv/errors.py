"""What a NameServer refuses. Nothing is changed in any table when one of these is raised."""

from __future__ import annotations

from typing import ClassVar

from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.outcome import Condition


class NameServerError(MQError):
    """A request to a NameServer was refused; every table is as it was before."""

    condition: ClassVar[Condition] = Condition.BAD_REQUEST


class RegistrationRefusedError(NameServerError):
    """A broker's registration breaks a rule of the route tables; what was there stays."""


class BadRegisterBodyError(NameServerError):
    """The body of a registration cannot be read: wrong checksum, truncated, not the format."""


class KvConfigFullError(NameServerError):
    """The key-value table would outgrow its limit; the old value stays."""


class SettingLockedError(NameServerError):
    """A setting that no client may change."""

    condition = Condition.NO_PERMISSION
