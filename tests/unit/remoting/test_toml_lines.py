"""Where settings stand in a TOML file."""

from __future__ import annotations

from remoting.toml_lines import toml_lines

TEXT = """alone = 1
[server]  # of clients
listen_port = 1
  "quoted" = 2

[ raft ]
peers = '''
listen_port = none of this
'''
self_id="n0"
"""


def test_tables_and_keys_have_the_lines_they_begin_on() -> None:
    assert toml_lines(TEXT) == {
        ("", "alone"): 1,
        ("server", ""): 2,
        ("server", "listen_port"): 3,
        ("server", "quoted"): 4,
        ("raft", ""): 6,
        ("raft", "peers"): 7,
        ("raft", "listen_port"): 8,
        ("raft", "self_id"): 10,
    }
