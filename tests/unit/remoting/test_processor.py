"""A table of processors, and the part of it that another port answers with."""

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.remoting.handling import Limiter
from dledger.remoting.processor_table import Handler, ProcessorTable
from dledger.remoting.protocol.command import response_to


def table(guard: object = None) -> ProcessorTable:
    made = ProcessorTable(guard)  # type: ignore[arg-type]  # a guard of the test's own or none
    for code in (10, 11, 361):
        made.register(code, lambda _, asked: response_to(asked), Limiter(str(code), 1))
    return made


def test_a_code_has_one_handler() -> None:
    with pytest.raises(ConfigError, match="request code 10 has a handler already"):
        table().register(10, lambda _, asked: response_to(asked), Limiter("again", 1))


def test_processor_of_another_port_keeps_the_limits() -> None:
    whole = table()
    part = whole.without({11, 361})
    assert part.codes() == {10}
    assert part.get(10) is whole.get(10)
    assert part.get(11) is None
    assert whole.codes() == {10, 11, 361}


def test_processor_guards_each_handler_once() -> None:
    guarded: list[int] = []

    def guard(code: int, handler: Handler) -> Handler:
        guarded.append(code)
        return handler

    whole = table(guard)
    whole.without(())
    assert guarded == [10, 11, 361]
