"""Changes a function of the running product by editing its source text.

The text to be replaced must stand in the function exactly once; when the product has moved on, the
edit fails loudly instead of planting nothing.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from importlib import import_module
from types import FunctionType
from typing import Any

from commitlog.errors import InvariantBroken

_texts: dict[FunctionType, str] = {}
"""Source of the functions changed so far; `inspect` finds only what stands in files."""


class StaleMutantError(InvariantBroken):
    """The product's text is no longer what a planted bug was made for."""


def locate(target: str) -> tuple[Any, str, Any]:
    """Return owner, name and raw attribute of ``module:Class.function`` or ``module:function``."""
    module_name, _, path = target.partition(":")
    owner: Any = import_module(module_name)
    *outer, name = path.split(".")
    try:
        for part in outer:
            owner = getattr(owner, part)
        raw = vars(owner)[name]
    except (AttributeError, KeyError):
        raise StaleMutantError(f"{target} is not there any more") from None
    return owner, name, raw


def function_of(raw: Any) -> FunctionType:
    """Return the function inside a method, property or static method."""
    if isinstance(raw, property):
        raw = raw.fget
    inner: FunctionType = inspect.unwrap(getattr(raw, "__func__", raw))
    return inner


def check(target: str, old: str) -> None:
    """See that an edit would find its text.

    Raises:
        StaleMutantError: It would not, or more than once.
    """
    _edited(target, inspect.getsource(function_of(locate(target)[2])), old, "")


def _edited(target: str, source: str, old: str, new: str) -> str:
    """Return *source* with the edit; lines of *old* and *new* may be indented as they like."""
    source = textwrap.dedent(source)
    pattern = r"\n[ ]*".join(re.escape(line.strip()) for line in old.split("\n"))
    found = list(re.finditer(rf"(?m)^(?P<indent>[ ]*)(?P<before>.*?){pattern}", source))
    if len(found) != 1:
        raise StaleMutantError(f"{target} has {old!r} {len(found)} times")
    match = found[0]
    lines = f"\n{match['indent']}".join(new.split("\n"))
    begin = match.end("before")
    return source[:begin] + lines + source[match.end() :]


def rewrite(target: str, old: str, new: str) -> None:
    """Replace *old* by *new* in the function *target* and put the changed one in its place.

    Raises:
        StaleMutantError: The text is not there exactly once; nothing was changed.
    """
    owner, name, raw = locate(target)
    function = function_of(raw)
    # A second edit of one function goes on from the first.
    before = _texts.get(function) or inspect.getsource(function)
    source = text = _edited(target, before, old, new)
    is_method = inspect.isclass(owner)
    if is_method:  # inside a class, so that private names are what they were
        source = f"class {owner.__name__}:\n" + textwrap.indent(source, "    ")
    code = compile(
        source,
        f"<mutated {target}>",
        "exec",
        flags=annotations.compiler_flag,
        dont_inherit=True,
    )
    scope: dict[str, Any] = {}
    exec(code, function.__globals__, scope)  # that is what a planted bug is
    changed = vars(scope[owner.__name__])[name] if is_method else scope[name]
    _texts[function_of(changed)] = text
    setattr(owner, name, changed)
    if not is_method:
        _replace_imported(function, changed)


def _replace_imported(old: FunctionType, new: Any) -> None:
    """A function of a module may have been imported by name elsewhere already."""
    import sys

    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not names or not getattr(module, "__name__", "").startswith(
            ("dledger", "commitlog", "client", "remoting", "namesrv")
        ):
            continue
        for name in [name for name, value in names.items() if value is old]:
            names[name] = new
