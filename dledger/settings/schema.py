"""Which settings a daemon has, and how they are read from files and options.

A daemon lists its settings once, as fields of dataclasses, one for each TOML table::

    @dataclass(kw_only=True, slots=True)
    class ServerTable:
        listen_port: int = setting(10911, "Port for clients.", "listenPort", ge=0)

Files, command lines, requests for settings and the documentation are read off these fields. A part
of the daemon gets its table and reads a field whenever it needs it: a change while the daemon runs
is an assignment in `Config.change`, and no part has a copy.

Sources are read one after the other: a later one wins. Each value keeps its source. Everything that
cannot be taken is collected, one line for each setting, which names the source, the line of a file
and the key. `Config` is the base of all daemons' configurations.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, ParamSpec, Self, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from dledger.commitlog.errors import ConfigError
from dledger.remoting.addresses import found_address
from dledger.remoting.properties import comment_hint, inline_comment, parse_properties

_SIZE: Final = re.compile(r"([0-9]{1,18})\s*([KMG])i?B", re.IGNORECASE)
_WHOLE: Final = re.compile("-?[0-9]{1,19}")
_SHIFT: Final = {"K": 10, "M": 20, "G": 30}
_EXPECTED: Final = re.compile(r"^Expected `(\w+)((?: [^`]*)?`.*)$", re.DOTALL)
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}


T = TypeVar("T")


def setting(
    default: T,
    about: str,
    *keys: str,
    live: str = "",
    parse: Callable[[object], object] | None = None,
    show: Callable[[Any], str] | None = None,
    within: tuple[int, int] | None = None,
    **limits: Any,
) -> T:
    """Return the field of a table that is a setting.

    Args:
        keys: RocketMQ's names of it.
        live: From when a change counts that is made while the daemon runs; empty: it needs a start.
        parse: Makes a value from text or from what TOML gives; raises ValueError.
        show: Makes text from a value that *parse* reads back.
        within: Least and largest value.
        limits: Of msgspec's `Meta`: ``ge``, ``le``, ``min_length`` and so on.
    """
    if within is not None:
        limits["ge"], limits["le"] = within
    declared = {"about": about, "keys": keys, "live": live, "parse_raw": parse, "show_value": show}
    found: T = field(default=default, metadata={**declared, "limits": Meta(**limits)})
    return found


class Setting(Struct, frozen=True, kw_only=True):
    """One setting, as files and documentation see it."""

    path: str
    type: Any
    default: Any
    about: str
    keys: tuple[str, ...]
    live: str
    parse_raw: Callable[[object], object] | None
    show_value: Callable[[Any], str] | None

    @property
    def table(self) -> str:
        """Name of the TOML table."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Name inside the table."""
        return self.path.partition(".")[2]

    def parse(self, raw: object) -> Any:
        """Return *raw* as a value of this setting, checked against its type and limits.

        Args:
            raw: Text from anywhere, or what TOML gave. ``"8 MiB"`` is a number too.
        Raises:
            ValueError: It is not one; names what is expected.
        """
        if self.parse_raw is not None:
            raw = self.parse_raw(raw)
        elif isinstance(raw, str) and isinstance(self.default, int):
            match = _SIZE.fullmatch(raw.strip())
            if match is not None:
                raw = int(match[1]) << _SHIFT[match[2].upper()]
        elif isinstance(raw, float):
            raise ValueError("expected a whole number")
        if type(self.default) is int and isinstance(raw, str) and not _WHOLE.fullmatch(raw):
            raise ValueError("expected a whole number")
        try:
            return msgspec.convert(raw, self.type, strict=not isinstance(raw, str))
        except msgspec.ValidationError as error:
            raise ValueError(_in_words(str(error), raw)) from None

    def show(self, value: Any) -> str:
        """Return a value as ``-p`` and the documentation print it; `parse` reads it back."""
        if self.show_value is not None:
            return self.show_value(value)
        if isinstance(value, tuple):
            return ";".join(str(part) for part in value)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)

    @property
    def default_text(self) -> str:
        """The default as text."""
        return self.show(self.default)


class Schema:
    """All settings of a daemon, read off the tables of its configuration."""

    def __init__(self, config: type[Config]) -> None:
        hints = get_type_hints(config)
        self.tables: dict[str, type[Any]] = {
            name: kind
            for name, kind in hints.items()
            if isinstance(kind, type) and is_dataclass(kind)
        }
        self.settings = {
            found.path: found
            for name, kind in self.tables.items()
            for found in _settings(name, kind)
        }
        self.keys = {key: found.path for found in self.settings.values() for key in found.keys}


def _settings(table: str, kind: type[Any]) -> Iterator[Setting]:
    hints = get_type_hints(kind)
    for column in fields(kind):
        declared = dict(column.metadata)
        yield Setting(
            path=f"{table}.{column.name}",
            type=Annotated[hints[column.name], declared.pop("limits")],
            default=column.default,
            **declared,
        )


def split_list(value: object) -> list[object]:
    """Return the parts of ``a;b`` or ``a,b``, or of a list.

    Raises ValueError: neither text nor a list.
    """
    if isinstance(value, str):
        return [part for part in re.split(r"[;,]", value) if part.strip()]
    if isinstance(value, Sequence):
        return list(value)
    raise ValueError("expected text or a list")


def parse_host(value: object) -> object:
    """Return a host without the brackets that RocketMQ puts around an IPv6 address."""
    return value.strip("[]") if isinstance(value, str) else value


def parse_addresses(value: object) -> tuple[str, ...]:
    """Return addresses from ``host:port;host:port`` or a list.

    Raises ValueError: one of them is not ``host:port``; names it.
    """
    addresses: list[str] = []
    for part in split_list(value):
        address = str(part).strip()
        found = found_address(address)
        if found is None or not found[1]:
            raise ValueError(f"{address!r} is not host:port or [IPv6]:port")
        addresses.append(address)
    return tuple(addresses)


def parse_address(value: object) -> str:
    """Return ``host:port``, or nothing. Raises ValueError: it is neither, or more than one."""
    addresses = parse_addresses(value)
    if len(addresses) > 1:
        raise ValueError(f"{value!r} is more than one address")
    return "".join(addresses)


def parse_words(value: object) -> object:
    """Return a command as it is written. Raises ValueError: no shell could split it into words."""
    shlex.split(str(value))
    return value


def _in_words(reason: str, raw: object) -> str:
    """Return msgspec's reason for people: kinds of values in words."""
    found = _EXPECTED.match(reason)
    if found is None:
        return reason.replace("`", "").replace("Expected", "expected", 1)
    kind, rest = _KINDS.get(found[1], found[1]), found[2].replace("`", "")
    # Settings come as text: that it is text is not what is wrong with one.
    return f"expected {kind}" + ("" if isinstance(raw, str) and rest == ", got str" else rest)


# --------------------------------------------------------------------------- from sources to values


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
        """Read a file. Raises ConfigError: it is not there or not text."""
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


class SettingsReader:
    """The settings so far.

    Attributes:
        sources: Path → where the value comes from.
        mistakes: What cannot be taken, one line for each setting.
        other_keys: Keys of properties files that are no settings, and mean something to `take`.
    """

    other_keys: ClassVar[Collection[str]] = ()

    def __init__(self, schema: Schema, *, ignored: Mapping[str, str]) -> None:
        """Begin with the defaults; *ignored*: RocketMQ's keys that change nothing here → why."""
        self.schema = schema
        self.values: dict[str, Any] = {
            path: found.default for path, found in schema.settings.items()
        }
        self.sources = dict.fromkeys(schema.settings, DEFAULT_SOURCE)
        self.places: dict[str, Place] = {}
        self.mistakes: list[str] = []
        self.comments: dict[str, None] = {}
        self._ignored = ignored
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

    def take(self, place: Place, key: str, raw: str) -> None:
        """Take one of `other_keys`. Raises ConfigError: it asks for what there is not."""

    def substitute(self, path: str, place: Place, key: str, raw: object) -> object:
        """Return what stands for a raw value; may warn."""
        return raw

    def read_options(self, options: Mapping[str, object]) -> None:
        """Read ``table.name`` → text or value of a command line."""
        for path, raw in options.items():
            self.collect(self._set_option, path, raw)

    def set(self, path: str, raw: object, place: Place, key: str) -> None:
        """Give a setting another value.

        Raises ConfigError: it cannot have that value; names the place and the key.
        """
        raw = self.substitute(path, place, key, raw)
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

    def tables(self) -> dict[str, Any]:
        """Return name → table with the values so far."""
        return {
            name: kind(**{each.name: self.values[f"{name}.{each.name}"] for each in fields(kind)})
            for name, kind in self.schema.tables.items()
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
        elif key in self.other_keys:
            self.take(place, key, raw)
        elif key in self._ignored:
            self.ignore(place.source, key)
        else:
            raise _unknown(place, key, [*self.schema.keys, *self._ignored, *self.other_keys])


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


# ---------------------------------------------------------------------------------- the values


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a daemon; a field of the subclass for each table.

    Attributes:
        ignored: RocketMQ's keys that change nothing here → why.
        home_path: Path of the setting in which ``~`` may stand; empty: none.
    """

    ignored: ClassVar[Mapping[str, str]] = {}
    home_path: ClassVar[str] = ""

    sources: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    @cache
    def schema(cls) -> Schema:
        """Return all settings that there are."""
        return Schema(cls)

    @classmethod
    def load(
        cls,
        files: Iterable[ConfigFile] = (),
        *,
        options: Mapping[str, object] | None = None,
        home: str = "",
    ) -> Self:
        """Return the settings that defaults, files and options amount to.

        Args:
            files: In the order of their weight; all TOML files weigh less than the others.
            options: ``table.name`` to text or value, from the command line.
            home: What ``~`` at the begin of a path stands for; empty leaves it.
        Raises:
            ConfigError: Unknown settings, bad values, or settings that contradict each other: one
                line for each, which names the source, the line of a file, and the key.
        """
        reader = SettingsReader(cls.schema(), ignored=cls.ignored)
        reader.read_files(files)
        reader.read_options(options or {})
        refuse(reader.mistakes)
        if cls.home_path:
            reader.expand_home(cls.home_path, home)
        return cls.of(reader)

    @classmethod
    def of(cls, reader: SettingsReader, hints: str = "") -> Self:
        """Return what *reader* has read.

        Raises ConfigError: its mistakes, or settings that contradict each other, with *hints*.
        """
        config = cls(**reader.tables(), sources=reader.sources, warnings=reader.warnings)
        found = (f"{line}{hints}" for line in config.contradictions(reader.places))
        refuse([*reader.mistakes, *found])
        return config

    def get(self, path: str) -> Any:
        """Return the value of ``table.name``."""
        table, _, name = path.partition(".")
        return getattr(getattr(self, table), name)

    def shown(self, path: str) -> str:
        """Return the value of ``table.name`` as text."""
        return self.schema().settings[path].show(self.get(path))

    def settings(self) -> list[tuple[str, str, str]]:
        """Return ``(path, value, source)`` of every setting."""
        return [
            (path, self.shown(path), self.sources.get(path, DEFAULT_SOURCE))
            for path in self.schema().settings
        ]

    def changed_settings(self) -> list[tuple[str, str, str]]:
        """Return ``(path, value, source)`` of every setting that has not its default value."""
        known = self.schema().settings
        return [found for found in self.settings() if self.get(found[0]) != known[found[0]].default]

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each setting that contradicts others, and why."""
        yield from ()

    def contradictions(self, places: Mapping[str, Place]) -> Iterator[str]:
        """Yield settings that contradict each other; each line names the one to change."""
        for path, why in self.conflicts():
            place = places.get(path) or self.sources.get(path, DEFAULT_SOURCE)
            yield f"{place}: {path} = {self.shown(path)}: {why}"

    def copied(self) -> Self:
        """Return a configuration with tables of its own."""
        tables = {name: replace(getattr(self, name)) for name in self.schema().tables}
        return replace(self, sources=dict(self.sources), **tables)

    def change(self, values: Mapping[str, Any], source: str) -> None:
        """Give settings other values, for all that have these tables; `with_values` checks them."""
        for path, value in values.items():
            table, _, name = path.partition(".")
            setattr(getattr(self, table), name, value)
            self.sources[path] = source

    def with_values(self, values: Mapping[str, Any], source: str) -> Self:
        """Return the configuration with other values, checked as a whole.

        Raises ConfigError: they contradict the others, or each other.
        """
        config = self.copied()
        config.change(values, source)
        refuse(config.contradictions({}))
        return config

    def changes(
        self,
        texts: Mapping[str, str],
        *,
        path_of: Callable[[str], str],
        daemon: str,
        never: Collection[str] = (),
    ) -> tuple[dict[str, Any], list[str]]:
        """Return path → value of the settings that get another value, for a daemon that runs.

        Also a sentence for each key that is accepted and changes nothing, as in a file; *never*:
        keys of these that no request may name.

        Raises ConfigError: names the key that is no setting, cannot be changed while the daemon
        runs, or not to that value.
        """
        values: dict[str, Any] = {}
        notes: list[str] = []
        for key, text in texts.items():
            if key in self.ignored and key not in never:
                notes.append(f"{key} is accepted and changes nothing: {self.ignored[key]}")
                continue
            found = self.schema().settings[path_of(key)]
            try:
                value = found.parse(text)
            except ValueError as error:
                raise ConfigError(f"{key} = {text!r}: {error}") from None
            if value == self.get(found.path):
                continue
            if not found.live:
                raise ConfigError(
                    f"{key} cannot change while the {daemon} runs: set it in the configuration and"
                    " restart"
                )
            values[found.path] = value
        return values, notes


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
