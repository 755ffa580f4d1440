"""A table of processors, and the part of it that another port answers with."""

from __future__ import annotations

import pytest

from commitlog.errors import ConfigError
from remoting.processor import Handler, Limiter, ProcessorTable
from remoting.protocol.command import response_to


def table(guard: object = None) -> ProcessorTable:
    made = ProcessorTable(guard)  # type: ignore[arg-type]  # a guard of the test's own or none
    for code in (10, 11, 361):
        made.register(code, lambda _, asked: response_to(asked), Limiter(str(code), 1))
    return made


def test_a_code_has_one_handler() -> None:
    with pytest.raises(ConfigError, match="request code 10 has a handler already"):
        table().register(10, lambda _, asked: response_to(asked), Limiter("again", 1))


def test_another_port_answers_what_it_should_with_the_same_limits() -> None:
    whole = table()
    part = whole.without({11, 361})
    assert part.codes() == {10}
    assert part.get(10) is whole.get(10)
    assert part.get(11) is None
    assert whole.codes() == {10, 11, 361}


def test_a_guard_is_put_around_each_handler_once_and_stays_in_a_part() -> None:
    guarded: list[int] = []

    def guard(code: int, handler: Handler) -> Handler:
        guarded.append(code)
        return handler

    whole = table(guard)
    whole.without(())
    assert guarded == [10, 11, 361]
