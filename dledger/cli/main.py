"""The umbrella command ``dledger`` and the scripts ``dledger-broker`` and ``dledger-namesrv``.

Sub-commands are named here and imported when they are asked for. Those of other packages come in
by the entry-point group ``dledger.commands``, so that nothing imports upwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points, version

from cyclopts import App, CycloptsError, Group, Parameter

from commitlog.errors import ConfigError, InvariantBroken, MQError
from dledger.cli.output import CliError, ExitCode, note

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
    ("send", "dledger.cli.message_command:send", MESSAGES, "Send messages."),
    ("consume", "dledger.cli.message_command:consume", MESSAGES, "Print messages of a topic."),
    ("msg", "dledger.cli.message_command:msg", MESSAGES, "Look at one message."),
    ("log", "dledger.cli.log_command:app", CHECK, "Check the data folder of a stopped broker."),
    ("bench", "dledger.cli.bench_command:app", CHECK, "Measure sending, consuming and storing."),
    ("demo", "dledger.cli.demo_command:demo", CHECK, "Kill a leader under load and check."),
)

OTHER_PACKAGES = "dledger.commands"
ABOUT_OTHERS = {"namesrv": "Run one NameServer."}


def build_app() -> App:
    """Return the whole command tree; nothing below the first level is imported yet."""
    app = _app("dledger", "A message broker in which every broker group is one Raft log.")
    for name, target, group, about in COMMANDS:
        app.command(target, name=name, help=about, group=group)
    for entry in sorted(entry_points(group=OTHER_PACKAGES)):
        app.command(entry.value, name=entry.name, group=RUN, help=ABOUT_OTHERS.get(entry.name))
    return app


def _app(name: str, about: str) -> App:
    return App(
        name=name,
        help=about,
        version=lambda: version("dledger-mq"),
        backend="trio",
        default_parameter=Parameter(negative=()),
        result_action="return_value",
    )


def run(app: App, tokens: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors become one line on standard error."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        note(f"error: {_one_line(str(error))}; see {app.name[0]} --help")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except BrokenPipeError:
        # Whoever read our output has gone; that is how `| head` ends a command.
        sys.stderr.close()
        return ExitCode.OK
    except (MQError, OSError, BaseExceptionGroup) as error:
        leaves = list(_leaves(error))
        bugs = [leaf for leaf in leaves if not isinstance(leaf, (MQError, OSError))]
        if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            return 130
        if bugs or any(isinstance(leaf, InvariantBroken) for leaf in leaves):
            raise
        note(f"error: {_one_line(str(leaves[0]))}")
        return exit_code_of(leaves[0])
    return result if isinstance(result, int) else ExitCode.OK


def exit_code_of(error: BaseException) -> int:
    """Return the exit status that tells what kind of error ended a command."""
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


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger``."""
    return run(build_app(), sys.argv[1:] if tokens is None else tokens)


def broker_main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger-broker``, which is ``dledger broker``."""
    return main(["broker", *(sys.argv[1:] if tokens is None else tokens)])


def namesrv_main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger-namesrv``, which is ``dledger namesrv``."""
    return main(["namesrv", *(sys.argv[1:] if tokens is None else tokens)])


if __name__ == "__main__":
    sys.exit(main())
