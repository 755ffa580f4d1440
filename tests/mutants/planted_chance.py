"""Whether a planted bug acts at a call; a tree with a bug in it has this file at its root.

The draw depends on the number of the bug and on the time alone: in simulated time the same plan
draws the same, alone or behind others, in every interpreter.
"""

import zlib

import trio


def acts(number: int, chance: float) -> bool:
    """Return true with probability *chance*; outside of trio, where no time passes, always."""
    try:
        now_s = trio.current_time()
    except RuntimeError:
        return True
    return zlib.crc32(f"{number} {now_s!r}".encode()) < chance * (1 << 32)
