"""Reads settings from files and options, one source after the other: a later one wins.

Each value keeps its source. Everything that cannot be taken is collected, one line for each
setting, which names the source, the line of a file and the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, ParamSpec

from msgspec import Struct

from commitlog.errors import ConfigError
from remoting.settings.properties import comment_hint, inline_comment, parse_properties
from remoting.settings.schema import Schema

P = ParamSpec("P")

DEFAULT_SOURCE: Final = "default"
COMMAND_LINE_SOURCE: Final = "command line"

_TOML_TABLE: Final = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]")
_TOML_KEY: Final = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file as it was read: its name decides how it is understood."""

    path: str
    text: str

    @property
    def is_toml(self) -> bool:
        """True for TOML, false for RocketMQ's properties."""
        return self.path.lower().endswith(".toml")

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a file.

        Raises:
            ConfigError: It is not there or not text.
        """
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{path}: cannot be read: {reason}") from None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a setting stands: ``file:line``, or the source alone where lines mean nothing."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


OtherKey = Callable[[Place, str, str], None]
"""Handles a key of a properties file that is no setting; raises ConfigError to refuse it."""

Substitute = Callable[[Place, str, object], object]
"""Returns what stands for a raw value; may warn."""


class SettingsReader:
    """The settings so far.

    Attributes:
        values: Path → value.
        sources: Path → where the value comes from.
        places: Where the settings stand that were given.
        mistakes: What cannot be taken, one line for each setting.
        comments: Values that end with what resembles a comment, in sentences.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        ignored: Mapping[str, str],
        other_keys: Mapping[str, OtherKey] | None = None,
        substitutes: Mapping[str, Substitute] | None = None,
    ) -> None:
        """Begin with the defaults.

        Args:
            ignored: RocketMQ's keys that change nothing here → why.
            other_keys: Keys of properties files that are no settings; they precede *ignored*.
            substitutes: Path → what changes a raw value before it is parsed.
        """
        self.schema = schema
        self.values: dict[str, Any] = {
            path: found.default for path, found in schema.settings.items()
        }
        self.sources = dict.fromkeys(schema.settings, DEFAULT_SOURCE)
        self.places: dict[str, Place] = {}
        self.mistakes: list[str] = []
        self.comments: dict[str, None] = {}
        self._ignored = ignored
        self._other_keys = other_keys or {}
        self._substitutes = substitutes or {}
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the operator should know, each sentence once."""
        return tuple(self._warnings)

    def warn(self, text: str) -> None:
        """Keep a warning."""
        self._warnings[text] = None

    def ignore(self, source: str, key: str) -> None:
        """Warn of a key that changes nothing."""
        self.warn(f"{source}: {key} is accepted and changes nothing: {self._ignored[key]}")

    def collect(self, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call *method* for one setting; keep its ConfigError among the mistakes and go on."""
        try:
            method(*args, **kwargs)
        except ConfigError as error:
            self.mistakes.append(str(error))

    def read_files(self, files: Iterable[ConfigFile]) -> None:
        """Read files in the order of their weight; all TOML files weigh less than the others."""
        for file in sorted(files, key=lambda file: not file.is_toml):
            if file.is_toml:
                self._read_toml(file)
            else:
                self._read_properties(file)

    def read_options(self, options: Mapping[str, object]) -> None:
        """Read ``table.name`` → text or value of a command line."""
        for path, raw in options.items():
            self.collect(self._set_option, path, raw)

    def set(self, path: str, raw: object, place: Place, key: str) -> None:
        """Give a setting another value.

        Args:
            key: What it is called at *place*.
        Raises:
            ConfigError: It cannot have that value; names the place and the key.
        """
        substitute = self._substitutes.get(path)
        if substitute is not None:
            raw = substitute(place, key, raw)
        try:
            self.values[path] = self.schema.settings[path].parse(raw)
        except ValueError as error:
            hint = comment_hint(raw) if isinstance(raw, str) else ""
            raise ConfigError(f"{place}: {key} = {raw!r}: {error}{hint}") from None
        self.sources[path] = place.source
        self.places[path] = place

    def derive(self, path: str, value: object, origin: str) -> None:
        """Give a setting the value that follows from the setting *origin*."""
        self.values[path] = value
        self.sources[path] = f"from {origin}"

    def expand_home(self, path: str, home: str) -> None:
        """Replace ``~`` at the begin of a setting by *home*; an empty one leaves it."""
        text = self.values[path]
        if home and (text == "~" or text.startswith("~/")):
            self.values[path] = home + text[1:]

    def tables(self) -> dict[str, Struct]:
        """Return name → table with the values so far."""
        return {
            name: struct(
                **{
                    found.name: self.values[path]
                    for path, found in self.schema.settings.items()
                    if found.table == name
                }
            )
            for name, struct in self.schema.tables.items()
        }

    def _set_option(self, path: str, raw: object) -> None:
        place = Place(COMMAND_LINE_SOURCE)
        if path not in self.schema.settings:
            raise _unknown(place, path, self.schema.settings)
        self.set(path, raw, place, path)

    def _read_toml(self, file: ConfigFile) -> None:
        try:
            document = tomllib.loads(file.text)
        except tomllib.TOMLDecodeError as error:
            self.mistakes.append(f"{file.path}: not TOML: {error}")
            return
        lines = toml_lines(file.text)
        tables = self.schema.tables
        for table, content in document.items():
            place = Place(file.path, lines.get((table, ""), lines.get(("", table), 0)))
            if table not in tables:
                unknown = _unknown(place, f"[{table}]", [f"[{name}]" for name in tables])
                self.mistakes.append(str(unknown))
            elif not isinstance(content, dict):
                self.mistakes.append(f"{place}: {table}: expected a table [{table}]")
            else:
                for name, raw in content.items():
                    place = Place(file.path, lines.get((table, name), 0))
                    self.collect(self._set_toml, place, table, name, raw)

    def _set_toml(self, place: Place, table: str, name: str, raw: object) -> None:
        key = f"{table}.{name}"
        if key in self.schema.settings:
            self.set(key, raw, place, key)
        elif self.schema.keys.get(name, "").startswith(f"{table}."):
            self.set(self.schema.keys[name], raw, place, key)
        else:
            raise _unknown(place, key, self.schema.settings)

    def _read_properties(self, file: ConfigFile) -> None:
        try:
            lines = parse_properties(file.text)
        except ConfigError as error:
            self.mistakes.append(f"{file.path}: {error}")
            return
        for number, key, raw in lines:
            self.collect(self._set_property, Place(file.path, number), key, raw)

    def _set_property(self, place: Place, key: str, raw: str) -> None:
        if not key:
            raise ConfigError(f"{place}: a key is needed before the value '{raw}'")
        if inline_comment(raw):
            self.comments[f"{place.source}: {key} = {raw!r}{comment_hint(raw)}"] = None
        if key in self.schema.keys:
            self.set(self.schema.keys[key], raw, place, key)
        elif key in self._other_keys:
            self._other_keys[key](place, key, raw)
        elif key in self._ignored:
            self.ignore(place.source, key)
        else:
            raise _unknown(place, key, [*self.schema.keys, *self._ignored, *self._other_keys])


def toml_lines(text: str) -> dict[tuple[str, str], int]:
    """Return (table, key) → number of the line it begins on, counted from 1.

    Python's parser gives values without their lines. A table's own line has the key ``""``; what
    stands before the first table has the table ``""``. Inside a text of several lines, what has the
    form of a key counts as one if no other has its name.
    """
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _TOML_TABLE.match(line)) is not None:
            table = header[1]
            found.setdefault((table, ""), number)
        elif (key := _TOML_KEY.match(line)) is not None:
            found.setdefault((table, key[1]), number)
    return found


def _unknown(place: Place, key: str, known: Iterable[str]) -> ConfigError:
    near = get_close_matches(key, list(known), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return ConfigError(f"{place}: unknown setting {key}{hint}")
