"""The umbrella command ``dledger`` and the scripts that run one daemon, as ``dledger-broker``.

Sub-commands are named here, those of other packages too, and imported when they are asked for: so
nothing imports upwards, and help loads none.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, MutableMapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from itertools import takewhile
from typing import Annotated, Any, Final, Literal

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter

from dledger.commitlog.errors import ConfigError, InvariantBroken, MQError
from dledger.output import CliError, ExitCode, leaves_of, note, read_option

RUN = Group.create_ordered("Run")
LOOK = Group.create_ordered("Show and change")
MESSAGES = Group.create_ordered("Messages")
CHECK = Group.create_ordered("Check and measure")

COMMANDS = (
    ("broker", "dledger.cli.broker_command:app", RUN, "Run one broker, a member of its group."),
    ("up", "dledger.cli.up_command:up", RUN, "Run a local cluster until Ctrl-C."),
    ("console", "dledger.console.command:console", RUN, "Serve a web console of a cluster."),
    ("cluster", "dledger.cli.cluster_command:app", LOOK, "Show brokers, their roles and health."),
    ("raft", "dledger.cli.raft_command:app", LOOK, "Show and change the members of a Raft group."),
    ("topic", "dledger.cli.topic_command:app", LOOK, "List, create, show and delete topics."),
    (
        "group",
        "dledger.cli.group_command:app",
        LOOK,
        "Show consumer groups: members, lag, offsets; move offsets.",
    ),
    ("producer", "dledger.cli.group_command:producers", LOOK, "Show connected producers."),
    ("stats", "dledger.cli.stats_command:stats", LOOK, "Show rates, counts and lag."),
    ("top", "dledger.cli.top_command:top", LOOK, "Show members, rates and lag on one screen."),
    ("debug", "dledger.cli.debug_command:app", CHECK, "Collect logs and states for a bug report."),
    (
        "send",
        "dledger.cli.message_command:send",
        MESSAGES,
        "Send messages, from arguments or from standard input.",
    ),
    ("consume", "dledger.cli.message_command:consume", MESSAGES, "Print messages of a topic."),
    ("dlq", "dledger.cli.dlq_command:app", MESSAGES, "Show dead letters and give them back."),
    (
        "config",
        "dledger.cli.config_command:app",
        LOOK,
        "Show and change settings of running daemons.",
    ),
    (
        "acl",
        "dledger.cli.acl_command:app",
        LOOK,
        "Show and change accounts, of a file or of a cluster.",
    ),
    ("msg", "dledger.cli.message_command:msg", MESSAGES, "Show messages and their trace."),
    (
        "log",
        "dledger.log_command:app",
        CHECK,
        "Check and read the data folder of a stopped broker.",
    ),
    (
        "backup",
        "dledger.cli.backup_command:app",
        LOOK,
        "Back a broker group up while it runs, check that, restore it.",
    ),
    ("context", "dledger.cli.contexts:app", LOOK, "Give clusters names, and choose one."),
    (
        "selftest",
        "dledger.cli.selftest_command:selftest",
        CHECK,
        "Send messages to a cluster, read them back, state a verdict.",
    ),
    ("completion", "dledger.cli.main:completion", CHECK, "Print the completion script of a shell."),
    ("bench", "dledger.cli.bench_command:app", CHECK, "Measure sending, consuming and storing."),
    (
        "demo",
        "dledger.jepsen_like.chaos.demo:demo",
        CHECK,
        "Kill a leader under load and check that nothing is lost.",
    ),
    ("namesrv", "dledger.namesrv.command:app", RUN, "Run one NameServer."),
    (
        "proxy",
        "dledger.proxy.command:app",
        RUN,
        "Run one proxy for clients of RocketMQ's gRPC protocol.",
    ),
    (
        "sim",
        "dledger.jepsen_like.command:app",
        CHECK,
        "Run simulated clusters under faults in virtual time.",
    ),
    (
        "chaos",
        "dledger.jepsen_like.chaos.command:app",
        CHECK,
        "Run real clusters under faults, record what clients see, check it.",
    ),
    (
        "history",
        "dledger.spark_jobs.commands.history:app",
        CHECK,
        "Convert, generate and export histories.",
    ),
    (
        "check",
        "dledger.spark_jobs.commands.check:check",
        CHECK,
        "Check the recorded history of a run, of any length.",
    ),
    (
        "audit",
        "dledger.spark_jobs.commands.audit:audit",
        CHECK,
        "Compare the data folders of replicas, up to the commit point.",
    ),
)

ABOUT = (
    "A message broker in which every broker group is one Raft log. Where daemons check accounts:"
    " dledger --credentials FILE COMMAND, and --tls-ca-file FILE where they talk TLS; see"
    " docs/operate/access.md."
)

DISTRIBUTION: Final = "dledger-mq"
_OPTIONAL: Final = re.compile(
    r"""^(?P<requirement>(?P<name>[\w.-]+)[^;]*?)\s*;.*\bextra\s*==\s*['"](?P<extra>[^'"]+)['"]"""
)


def build_app() -> App:
    """Return the whole command tree; nothing below the first level is imported yet."""
    app = _app("dledger", ABOUT)
    for name, target, group, about in COMMANDS:
        app.command(target, name=name, help=about, group=group)
    return app


_LAID_OUT: Final = re.compile(r"^(?:\s|[-*] )", re.MULTILINE)
"""A list, or lines that stand as they are."""


class HelpPages:
    """Prints pages of help as plain text: an entry is wrapped once, its further lines indented."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        """Print a table of commands or options."""
        self._printer()(console, options, panel)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        """Print how a command is called."""
        self._printer().render_usage(console, options, usage)

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        """Print what a command does."""
        self._printer().render_description(console, options, description)

    @cached_property
    def _printer(self) -> Callable[[], Any]:
        # Commands that print no help do without this import.
        from cyclopts.help.formatters.plain import PlainFormatter

        class Printer(PlainFormatter):
            def _print_plain(self, console: Any, text: str) -> None:
                first, further = "", ""
                if text.startswith(self.indent):
                    first, further = self.indent, 3 * self.indent
                paragraphs = [
                    part
                    if not first and _LAID_OUT.search(part)
                    else textwrap.fill(
                        " ".join(part.split()),
                        width=console.width,
                        initial_indent=first,
                        subsequent_indent=further,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                    for part in text.split("\n\n")
                ]
                # The console would style each line; there is nothing to style.
                console.file.write("\n\n".join(paragraphs) + "\n")

        return Printer


def _version() -> str:
    from importlib.metadata import version

    return version(DISTRIBUTION)


def _app(name: str, about: str) -> App:
    return App(
        name=name,
        help=about,
        version=_version,
        backend="trio",
        default_parameter=Parameter(negative=(), converter=read_option),
        # Its boxes cost as much time as everything else of a help page.
        help_format="plaintext",
        help_formatter=HelpPages(),
        result_action="return_value",
    )


def run(app: App, tokens: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors become one line on standard error."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        chain = " ".join((app.name[0], *(error.command_chain or ())))
        said = _one_line(_text_of(app, error)).removesuffix(".")
        note(f"error: {said}{_variable_of(error)}; see {chain} --help")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except (MQError, OSError, ImportError, BaseExceptionGroup) as error:
        return _ended_by(error)
    return result if isinstance(result, int) else ExitCode.OK


def _text_of(app: App, error: CycloptsError) -> str:
    """Return what is wrong; to suggest a command, the library loads all, and some lack an extra."""
    try:
        return str(error)
    except ImportError:
        token = next(iter(error.unused_tokens or ()), "")
        kind = "option" if token.startswith("-") else "command"
        near = get_close_matches(token, list(app), n=1)
        return f'Unknown {kind} "{token}".' + (f' Did you mean "{near[0]}"?' if near else "")


def _ended_by(error: BaseException) -> int:
    """Say in one line what ended a command and return the exit status; a bug is raised again."""
    leaves = list(leaves_of(error))
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
    notes = [*getattr(first, "__notes__", ()), *_tls_hints(str(first))]
    for said in (*mistakes[:-1], "; ".join([mistakes[-1], *notes])):
        note(f"error: {_one_line(said)}")
    return exit_code_of(leaves[0])


def _tls_hints(said: str) -> list[str]:
    """Return what to try where one side may talk TLS and the other does not."""
    if "TLS handshake" in said:
        return ["it may talk no TLS, or with another authority's certificate: see --tls-ca-file"]
    if _CONNECTION_ENDED.search(said) and not os.environ.get("DLEDGER_TLS_CA_FILE"):
        return ["it may talk TLS: dledger --tls-ca-file FILE"]
    return []


_CONNECTION_ENDED: Final = re.compile(r"connection to \S+ ended .* before the answer")


def extras_of(requirements: list[str]) -> dict[str, list[str]]:
    """Return top-level module → what its extra needs, of requirements in a wheel's metadata.

    The first extra wins: they stand there in the order of `pyproject.toml`, the smallest first.
    """
    needs: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    for line in requirements:
        if match := _OPTIONAL.match(line):
            name = match["name"].lower().replace("-", "_")
            extra = needs.setdefault(match["extra"], [])
            extra.append(match["requirement"])
            modules.setdefault(_MODULES.get(name, name), extra)
    return modules


_MODULES: Final = {"grpcio": "grpc", "grpcio_health_checking": "grpc_health", "protobuf": "google"}
"""Distribution → its top-level module, where the names differ."""


def missing_extra(error: ImportError) -> CliError | None:
    """Return the error to show in place of *error*, or None when no extra brings the module."""
    from importlib.metadata import PackageNotFoundError, requires

    cause: BaseException | None = error
    # The library that loads a command puts an error of its own around that of the import.
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    module = (cause.name or "").partition(".")[0] if cause is not None else ""
    try:
        needs = extras_of(requires(DISTRIBUTION) or []).get(module.lower())
    except PackageNotFoundError:
        return None
    if needs is None:
        return None
    # The packages, not our own extra: that line works wherever this installation came from.
    return CliError(
        f"this command needs {module}, which is not installed",
        next_step=f"pip install {' '.join(map(shlex.quote, needs))}",
        exit_code=ExitCode.USAGE,
    )


def _reader_gone() -> int:
    """End quietly: what read our output has enough of it, as ``| head`` has."""
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
"""Options of ``dledger`` itself → the variable of `dledger.client.connect` that they set."""


def take_access_options(tokens: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Put what stands before the command into the environment; return the rest.

    Raises CliError: an option without its value; a usage error.
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


USE_CONTEXTS: Final = frozenset(
    [name for name, _, group, _ in COMMANDS if group in (LOOK, MESSAGES)] + ["selftest"]
) - {"context"}
"""Commands that ask a cluster. A daemon gets its NameServers from its own settings, and what
measures makes a cluster of its own."""


def run_with_context(tokens: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Put the context in use into *environment* for a command that asks a cluster.

    A command line that names NameServers means another cluster: its account is not that of the
    context.

    Raises ConfigError: the file of contexts cannot be read.
    """
    if tokens and tokens[0] in USE_CONTEXTS and not _names_name_servers(tokens):
        from dledger.cli.contexts import use_context

        use_context(environment)


def _names_name_servers(tokens: Sequence[str]) -> bool:
    options = takewhile(lambda token: token != "--", tokens)
    return any(
        token == "--namesrv"
        or token.startswith("--namesrv=")
        or (token.startswith("-n") and not token.startswith("--"))
        for token in options
    )


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /
) -> int:
    """Print the script that completes commands and options in a shell; takes some seconds.

    bash: dledger completion bash > ~/.local/share/bash-completion/completions/dledger
    """
    app = _app("dledger", ABOUT)
    for name, target, group, about in COMMANDS:
        alone = _app("dledger", ABOUT)
        alone.command(target, name=name, help=about, group=group)
        try:
            alone.generate_completion(prog_name="dledger", shell=shell)
        except ImportError:  # it needs an extra that is not installed: its name is all there is
            app.command(App(name=name, help=about, group=group))
        else:
            app.command(target, name=name, help=about, group=group)
    sys.stdout.write(app.generate_completion(prog_name="dledger", shell=shell))
    return ExitCode.OK


def main(tokens: Sequence[str] | None = None) -> int:
    """Run ``dledger``."""
    try:
        rest = take_access_options(sys.argv[1:] if tokens is None else tokens, os.environ)
        run_with_context(rest, os.environ)
    except MQError as error:
        note(f"error: {error}")
        return exit_code_of(error)
    return run(build_app(), rest)


def _of_daemon(command: str) -> Callable[..., int]:
    """Return what runs ``dledger-COMMAND``, which is ``dledger COMMAND``."""

    def run_daemon(tokens: Sequence[str] | None = None) -> int:
        return main([command, *(sys.argv[1:] if tokens is None else tokens)])

    return run_daemon


broker_main = _of_daemon("broker")
namesrv_main = _of_daemon("namesrv")
proxy_main = _of_daemon("proxy")
chaos_main = _of_daemon("chaos")
console_main = _of_daemon("console")


if __name__ == "__main__":
    sys.exit(main())
