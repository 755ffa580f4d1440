"""The settings of a daemon as values: the base of both daemons' configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from msgspec import structs

from commitlog.errors import ConfigError
from remoting.settings.reader import DEFAULT_SOURCE, Place
from remoting.settings.schema import Schema


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a daemon; a field of the subclass for each table.

    Attributes:
        sources: Path → where the value comes from.
        warnings: What the operator should know, each sentence once.
    """

    schema: ClassVar[Schema]

    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def get(self, path: str) -> Any:
        """Return the value of ``table.name``."""
        table, _, name = path.partition(".")
        return getattr(getattr(self, table), name)

    def shown(self, path: str) -> str:
        """Return the value of ``table.name`` as text."""
        return self.schema.show(path, self.get(path))

    def settings(self) -> list[tuple[str, str, str]]:
        """Return ``(path, value, source)`` of every setting."""
        return [
            (path, self.shown(path), self.sources.get(path, DEFAULT_SOURCE))
            for path in self.schema.settings
        ]

    def changed_settings(self) -> list[tuple[str, str, str]]:
        """Return ``(path, value, source)`` of every setting that has not its default value."""
        known = self.schema.settings
        return [found for found in self.settings() if self.get(found[0]) != known[found[0]].default]

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each setting that contradicts others, and why."""
        yield from ()

    def contradictions(self, places: Mapping[str, Place]) -> Iterator[str]:
        """Yield settings that contradict each other; each line names the one to change.

        Args:
            places: Where settings stand in files; others are named by their source.
        """
        for path, why in self.conflicts():
            place = places.get(path) or self.sources.get(path, DEFAULT_SOURCE)
            yield f"{place}: {path} = {self.shown(path)}: {why}"

    def with_values(self, values: Mapping[str, Any], source: str) -> Self:
        """Return the configuration with other values, checked as a whole.

        Args:
            values: ``table.name`` to value.
        Raises:
            ConfigError: They contradict the others, or each other.
        """
        tables: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            table, _, name = path.partition(".")
            tables.setdefault(table, {})[name] = value
        changed = {
            table: structs.replace(getattr(self, table), **fields)
            for table, fields in tables.items()
        }
        config = replace(self, sources={**self.sources, **dict.fromkeys(values, source)}, **changed)
        refuse(config.contradictions({}))
        return config

    def changes(
        self,
        texts: Mapping[str, str],
        *,
        path_of: Callable[[str], str],
        daemon: str,
    ) -> dict[str, Any]:
        """Return path → value of the settings that get another value, for a daemon that runs.

        Args:
            texts: Key → text.
            path_of: Returns the path of a key, or raises ConfigError.
            daemon: What to call it in errors.
        Raises:
            ConfigError: Names the key that is no setting, cannot be changed while the daemon
                runs, or not to that value.
        """
        values: dict[str, Any] = {}
        for key, text in texts.items():
            found = self.schema.settings[path_of(key)]
            try:
                value = found.parse(text)
            except ValueError as error:
                raise ConfigError(f"{key} = {text!r}: {error}") from None
            if value == self.get(found.path):
                continue
            if not found.is_live:
                raise ConfigError(
                    f"{key} cannot change while the {daemon} runs: set it in the configuration and"
                    " restart"
                )
            values[found.path] = value
        return values


def refuse(mistakes: Iterable[str]) -> None:
    """Raise a ConfigError of *mistakes*, one line each, if there are any."""
    found = list(mistakes)
    if found:
        raise ConfigError(*found)


def settings_text(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return ``name = value  # source`` of each setting, one a line."""
    table = list(rows)
    left = max(len(name) for name, _, _ in table)
    middle = min(48, max(len(value) for _, value, _ in table))
    return "".join(
        f"{name:<{left}} = {value:<{middle}}  # {source}\n" for name, value, source in table
    )
