"""The umbrella command ``dledger`` and the scripts ``dledger-broker`` and ``dledger-namesrv``.

Sub-commands are named here and imported when they are asked for. Those of other packages come in
by the entry-point group ``dledger.commands``, so that nothing imports upwards.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import Final

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter

from commitlog.errors import ConfigError, InvariantBroken, MQError
from dledger.output import CliError, ExitCode, note

RUN = Group.create_ordered("Run")
LOOK = Group.create_ordered("Look and change")
MESSAGES = Group.create_ordered("Messages")
CHECK = Group.create_ordered("Check and measure")

COMMANDS = (
    ("broker", "dledger.cli.broker_command:app", RUN, "Run one broker, a member of its group."),
    ("up", "dledger.cli.up_command:up", RUN, "Run a local cluster until Ctrl-C."),
    ("cluster", "dledger.cli.cluster_command:app", LOOK, "Brokers, their roles and health."),
    ("raft", "dledger.cli.raft_command:app", LOOK, "Terms, indexes and lag of a group."),
    ("topic", "dledger.cli.topic_command:app", LOOK, "List, create, show and delete topics."),
    ("group", "dledger.cli.group_command:app", LOOK, "Consumer groups: members, lag, offsets."),
    ("producer", "dledger.cli.group_command:producer_app", LOOK, "Producers that are connected."),
    ("stats", "dledger.cli.stats_command:stats", LOOK, "Rates, counts and lag."),
    ("debug", "dledger.cli.debug_command:app", CHECK, "Collect what a report needs."),
    ("send", "dledger.cli.message_command:send", MESSAGES, "Send messages."),
    ("consume", "dledger.cli.message_command:consume", MESSAGES, "Print messages of a topic."),
    ("dlq", "dledger.cli.dlq_command:app", MESSAGES, "Look at dead letters, give them back."),
    ("config", "dledger.cli.config_command:app", LOOK, "Settings of running daemons."),
    ("acl", "dledger.cli.acl_command:app", LOOK, "Accounts in an account file."),
    ("msg", "dledger.cli.message_command:msg", MESSAGES, "Look at messages."),
    ("log", "dledger.cli.log_verify:app", CHECK, "Check the data folder of a stopped broker."),
    ("bench", "dledger.cli.bench_command:app", CHECK, "Measure sending, consuming and storing."),
    ("demo", "jepsen_like.chaos.demo:demo", CHECK, "Kill a leader under load and check."),
)

ABOUT = (
    "A message broker in which every broker group is one Raft log. Where daemons check accounts:"
    " dledger --credentials FILE COMMAND, and --tls-ca-file FILE where they talk TLS; see"
    " docs/operate/access.md."
)

OTHER_PACKAGES = "dledger.commands"
ABOUT_OTHERS = {
    "chaos": "Break real clusters, record what clients saw, check it.",
    "sim": "Break simulated clusters in virtual time: play plans, soak, replay.",
    "namesrv": "Run one NameServer.",
    "check": "Judge the history of a run, of any length.",
    "audit": "Compare the data folders of replicas, up to the commit point.",
    "history": "Make histories into tables, and tables for a test.",
}

DISTRIBUTION: Final = "dledger-mq"
_OPTIONAL: Final = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([^'"]+)['"]""")


def build_app() -> App:
    """Return the whole command tree; nothing below the first level is imported yet."""
    app = _app("dledger", ABOUT)
    for name, target, group, about in COMMANDS:
        app.command(target, name=name, help=about, group=group)
    for entry in sorted(entry_points(group=OTHER_PACKAGES)):
        group = RUN if entry.name == "namesrv" else CHECK
        app.command(entry.value, name=entry.name, group=group, help=ABOUT_OTHERS.get(entry.name))
    return app


def _app(name: str, about: str) -> App:
    return App(
        name=name,
        help=about,
        version=lambda: version(DISTRIBUTION),
        backend="trio",
        default_parameter=Parameter(negative=()),
        result_action="return_value",
    )


def run(app: App, tokens: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors become one line on standard error."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        chain = " ".join((app.name[0], *(error.command_chain or ())))
        said = _one_line(str(error)).removesuffix(".")
        note(f"error: {said}{_variable_of(error)}; see {chain} --help")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except (MQError, OSError, ImportError, BaseExceptionGroup) as error:
        return _ended_by(error)
    return result if isinstance(result, int) else ExitCode.OK


def _ended_by(error: BaseException) -> int:
    """Say in one line what ended a command and return the exit status; a bug is raised again."""
    leaves = list(_leaves(error))
    if all(isinstance(leaf, BrokenPipeError) for leaf in leaves):
        return _reader_gone()
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return 130
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, ImportError):
            leaves[place] = missing_extra(leaf) or leaf
    known = all(isinstance(leaf, MQError | OSError) for leaf in leaves)
    if not known or any(isinstance(leaf, InvariantBroken) for leaf in leaves):
        raise error
    first = leaves[0]
    mistakes = getattr(first, "mistakes", ()) or (_words_of(first),)
    for said in (*mistakes[:-1], "; ".join([mistakes[-1], *getattr(first, "__notes__", ())])):
        note(f"error: {_one_line(said)}")
    return exit_code_of(leaves[0])


def extras_of(requirements: list[str]) -> dict[str, str]:
    """Return top-level module → extra, of requirements as a wheel's metadata has them.

    The first extra wins: they stand there in the order of `pyproject.toml`, the smallest first.
    """
    found: dict[str, str] = {}
    for line in requirements:
        if match := _OPTIONAL.match(line):
            found.setdefault(match[1].lower().replace("-", "_"), match[2])
    return found


def missing_extra(error: ImportError) -> CliError | None:
    """Return the error to show in place of *error*, or None when no extra brings the module."""
    cause: BaseException | None = error
    # The library that loads a command puts an error of its own around that of the import.
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    module = (cause.name or "").partition(".")[0] if cause is not None else ""
    try:
        extra = extras_of(requires(DISTRIBUTION) or []).get(module.lower())
    except PackageNotFoundError:
        return None
    if extra is None:
        return None
    return CliError(
        f"this command needs {module}, which is not installed",
        next_step=f"pip install '{DISTRIBUTION}[{extra}]'",
        exit_code=ExitCode.USAGE,
    )


def _reader_gone() -> int:
    """End quietly: what read our output has enough of it, as ``| head`` has.

    Sockets do not come here: the SDK has errors of its own for them.
    """
    # The interpreter flushes standard output once more at its end, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK


def exit_code_of(error: BaseException) -> int:
    """Return the exit status for the kind of error that ended a command."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    if isinstance(error, MQError) and type(error).__name__ in _UNREACHABLE:
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED


_UNREACHABLE = frozenset(
    {
        "NoNameServerError",
        "BrokerUnreachableError",
        "ConnectFailedError",
        "ConnectionLostError",
        "RequestTimedOutError",
    }
)
"""By name: looking at the classes would import the client into every command."""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _variable_of(error: CycloptsError) -> str:
    """Return how else a missing option can be given."""
    if not isinstance(error, MissingArgumentError) or error.argument is None:
        return ""
    names = list(error.argument.parameter.env_var or ())
    return f", or {names[0]} in the environment" if names else ""


def _words_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        # Without the number, which means the same.
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _one_line(text: str) -> str:
    return " ".join(text.split())


BEFORE_THE_COMMAND = {
    "--credentials": "DLEDGER_CREDENTIALS",
    "--tls-ca-file": "DLEDGER_TLS_CA_FILE",
}
"""Options of ``dledger`` itself → the variable of `client.connect` that they set."""


def take_access_options(tokens: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Put what stands before the command into the environment; return the rest.

    Raises:
        CliError: An option without its value; a usage error.
    """
    rest = list(tokens)
    while rest and (name := rest[0].partition("=")[0]) in BEFORE_THE_COMMAND:
        option, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise CliError(f"{option} needs a file", exit_code=ExitCode.USAGE)
            value = rest.pop(0)
        environment[BEFORE_THE_COMMAND[name]] = value
    return rest


def main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger``."""
    try:
        rest = take_access_options(sys.argv[1:] if tokens is None else tokens, os.environ)
    except CliError as error:
        note(f"error: {error}")
        return error.exit_code
    return run(build_app(), rest)


def broker_main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger-broker``, which is ``dledger broker``."""
    return main(["broker", *(sys.argv[1:] if tokens is None else tokens)])


def namesrv_main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger-namesrv``, which is ``dledger namesrv``."""
    return main(["namesrv", *(sys.argv[1:] if tokens is None else tokens)])


def chaos_main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger-chaos``, which is ``dledger chaos``."""
    return main(["chaos", *(sys.argv[1:] if tokens is None else tokens)])


if __name__ == "__main__":
    sys.exit(main())
