"""TAG expressions: ``*``, nothing, or ``a || b``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from commitlog.java_hash import tags_code

SUB_ALL = "*"
TAG_EXPRESSION = "TAG"

TagCodes = npt.NDArray[np.int64]


def is_tag_type(expression_type: str | None) -> bool:
    """Tell whether the expression is made of tags; a missing type says so."""
    return not expression_type or expression_type == TAG_EXPRESSION


def parse_tags(expression: str | None) -> TagCodes | None:
    """Return the hashes of the tags in *expression*, or None when it matches everything.

    Raises:
        ValueError: There is a separator but no tag.
    """
    if expression is None or expression in ("", SUB_ALL):
        return None
    tags = [tag.strip() for tag in expression.split("||")]
    tags = [tag for tag in tags if tag]
    if not tags:
        raise ValueError(f"no tag in subscription expression {expression!r}")
    return codes_array(tags_code(tag) for tag in tags)


def codes_array(codes: Iterable[int]) -> TagCodes:
    """Return tag hashes as a pull compares them with consume queue units.

    Java's hashes have 32 bits; whatever a client sends is read as such.
    """
    signed = {((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for code in codes}
    return np.array(sorted(signed), dtype=np.int64)
