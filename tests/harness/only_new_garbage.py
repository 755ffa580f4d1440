"""Collections of garbage that do not look at the thousands of tests, which stay to the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let `gc.collect` look, until the end of the block, only at what is made in it.

    What was frozen by then stays so: see tests/conftest.py.
    """
    gc.collect()
    gc.freeze()
    yield
