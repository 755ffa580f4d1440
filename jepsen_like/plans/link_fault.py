"""What a link does to what it carries: the same words for simulated links and for the proxy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class LinkFault:
    """What a link does to what it carries, one way.

    Attributes:
        delay_s, jitter_s: On top of what a healthy link takes.
        bytes_per_s: 0 means no limit.
        loss: Chance of a frame to be lost. That breaks the connection, unless *silent*.
        silent: A lost frame of members is simply missing.
        duplicate: Chance of a member's frame to arrive a second time, later.
        reorder: Chance of a member's frame to arrive behind later ones.
        hold: Chance of a member's frame to be kept for a later connection.
        corrupt: Chance of a member's frame to arrive with a bit flipped.
        spread_s: How much later doubled, held and overtaken frames may come.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    silent: bool = False
    duplicate: float = 0.0
    reorder: float = 0.0
    hold: float = 0.0
    corrupt: float = 0.0
    spread_s: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether frames need not be looked at."""
        return not (self.loss or self.duplicate or self.reorder or self.hold or self.corrupt)


HEALTHY: Final = LinkFault()
