"""RocketMQ's ``plain_acl.yml`` and ``tools.yml``: YAML in which every scalar is text.

``12345678`` stays the text it is, for a secret key is no number. Anchors, aliases, tags, several
documents, a key that occurs twice and deep nesting are refused with their line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

import yaml

from commitlog.errors import ConfigError

Node: TypeAlias = "str | list[Node] | dict[str, Node] | None"

DEPTH_MAX: Final = 8
"""Mappings and lists inside each other; the files have three."""

_NOTHING: Final = ("", "~", "null")
_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_BARE_ADDRESS: Final = re.compile(r"^([ -]*(?:[A-Za-z]+:)? *)(\*[.*:]*)(?= *(?:#|$))", re.MULTILINE)
"""RocketMQ's patterns of addresses may begin with what YAML has for an alias."""


def parse_plain_yaml(text: str) -> Node:
    """Return what *text* holds; an empty document is None.

    Raises:
        ConfigError: It is no YAML, or more of it than is read here; names the line and shows
            nothing of its text, which may be a secret.
    """
    text = _BARE_ADDRESS.sub(r"\1'\2'", text.removeprefix("\ufeff"))
    try:
        return _document(yaml.parse(text, Loader=_LOADER))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"line {line} has characters that are not text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if error.context_mark is not None and (mark is None or mark.index >= len(text)):
            mark = error.context_mark
        raise ConfigError(f"line {1 if mark is None else mark.line + 1} is not YAML") from None


def _document(events: Iterable[yaml.Event]) -> Node:
    root: list[Node] = []
    inner: list[list[Node] | dict[str, Node]] = [root]
    keys: list[str | None] = [None]
    documents = 0
    for event in events:
        node: Node
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _error(event, "begins a second document")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            inner.pop()
            keys.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if isinstance(event, yaml.AliasEvent) or event.anchor or event.tag:
            raise _error(event, "has an anchor, an alias or a tag")
        if isinstance(event, yaml.ScalarEvent):
            node = None if event.implicit[0] and event.value in _NOTHING else event.value
        else:
            node = {} if isinstance(event, yaml.MappingStartEvent) else []
        if isinstance(node, str) and len(inner) == 1:
            raise _error(event, "is not 'key: value'")
        parent, key = inner[-1], keys[-1]
        if isinstance(parent, list):
            parent.append(node)
        elif key is not None:
            parent[key], keys[-1] = node, None
        elif not isinstance(node, str):
            raise _error(event, "has a key that is no text")
        elif node in parent:
            raise _error(event, f"has the key {node} a second time")
        else:
            keys[-1] = node
        if isinstance(node, list | dict):
            if len(inner) > DEPTH_MAX:
                raise _error(event, f"stands deeper than {DEPTH_MAX} levels")
            inner.append(node)
            keys.append(None)
    return root[0] if root else None


def _error(event: yaml.Event, why: str) -> ConfigError:
    return ConfigError(f"line {event.start_mark.line + 1} {why}")
