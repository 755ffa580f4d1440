"""Which addresses a pattern is about."""

from __future__ import annotations

import pytest

from remoting.access.accounts import WhiteAddresses


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("10.0.0.1", ["10.0.0.1", "::ffff:10.0.0.1"], ["10.0.0.2", "110.0.0.1", "::1"]),
        ("10.0.0.*", ["10.0.0.0", "10.0.0.255"], ["10.0.1.0"]),
        ("10.0.*.*", ["10.0.7.9"], ["10.1.0.0"]),
        ("10.0.0.10-20", ["10.0.0.10", "10.0.0.20"], ["10.0.0.9", "10.0.0.21"]),
        ("10.0.3-4.*", ["10.0.3.0", "10.0.4.255"], ["10.0.2.255", "10.0.5.0"]),
        ("10.0.0.{1,7}", ["10.0.0.1", "10.0.0.7"], ["10.0.0.2", "10.0.0.17"]),
        ("10.0.0.1,10.0.0.3;10.1.0.*", ["10.0.0.3", "10.1.0.9"], ["10.0.0.2"]),
        ("2001:db8::1", ["2001:db8:0::1"], ["2001:db8::2", "10.0.0.1"]),
        ("*", ["10.0.0.1", "2001:db8::1"], []),
        ("", [], ["10.0.0.1", "127.0.0.1", "0.0.0.0"]),
    ],
)
def test_a_pattern_is_about_these_and_no_others(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    white = WhiteAddresses(pattern)
    assert [host for host in inside if not white.fits(host)] == []
    assert [host for host in outside if white.fits(host)] == []


def test_a_host_that_is_no_address_fits_only_everybody() -> None:
    assert not WhiteAddresses("10.0.0.*").fits("broker.example")
    assert not WhiteAddresses("10.0.0.*").fits("")


@pytest.mark.parametrize(
    "pattern",
    [
        "10.0.0",
        "10.0.0.256",
        "10.0.0.-1",
        "10.0.0.5-3",
        "a.b.c.d",
        "10.0.0.{1,x}",
        "::g",
        "1e1.0.0.1",
    ],
)
def test_addresses_report_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"address|backwards"):
        WhiteAddresses(pattern)


def test_a_list_has_a_limit() -> None:
    with pytest.raises(ValueError, match="1001 address patterns, at most 1000"):
        WhiteAddresses(",".join(["10.0.0.1"] * 1001))
