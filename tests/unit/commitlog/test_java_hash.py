import numpy as np

from dledger.commitlog.java_hash import index_key_hash, java_hash, tags_code
from dledger.commitlog.queue_unit import index_hashes, java_hash_matrix

# "polygenelubricants" hashes to Integer.MIN_VALUE: a known curiosity.
MIN_VALUE_TEXT = "polygenelubricants"


def test_hashes_are_javas() -> None:
    assert tags_code("TagA") == 2598919
    assert tags_code("") == 0
    assert java_hash("hello world") == 1794106052
    assert java_hash(MIN_VALUE_TEXT) == -(2**31)


def test_a_character_outside_the_bmp_counts_as_two_units() -> None:
    assert java_hash("\U0001f600") == 31 * 0xD83D + 0xDE00
    assert java_hash("é") == 0xE9


def test_a_hash_continues_from_its_prefix() -> None:
    assert java_hash("world", java_hash("hello ")) == java_hash("hello world")


def test_an_index_hash_is_never_negative() -> None:
    assert index_key_hash("T1", "k") == abs(java_hash("T1#k"))
    assert index_hashes(np.array([-(2**31), -5, 5, 0], np.int32)).tolist() == [0, 5, 5, 0]


def test_the_smallest_integer_files_as_0() -> None:
    # Seven characters from "A" on, chosen so that the hash of all comes to -2^31.
    rest = -(2**31) - java_hash("AAAAAAA", java_hash("T1#"))
    digits = [rest % 2**32 // 31**k % 31 for k in reversed(range(7))]
    key = "".join(chr(ord("A") + digit) for digit in digits)
    assert java_hash("T1#" + key) == -(2**31)
    assert index_key_hash("T1", key) == 0


def test_the_matrix_hashes_each_row_after_its_prefix() -> None:
    texts = ["0" * 32, "F" * 32, "7F0000010001" + "A9" * 10]
    matrix = np.array([list(text.encode()) for text in texts], np.uint8)
    topics = ["T1#", "a-much-longer-topic#", "#"]
    one = java_hash_matrix(matrix, java_hash("T1#"))
    assert one.tolist() == [java_hash("T1#" + text) for text in texts]
    own = java_hash_matrix(matrix, np.array([java_hash(topic) for topic in topics], np.int32))
    assert own.tolist() == [java_hash(a + b) for a, b in zip(topics, texts, strict=True)]


def test_the_matrix_is_exact_for_the_largest_bytes() -> None:
    matrix = np.full((2, 4096), 127, np.uint8)
    assert java_hash_matrix(matrix, -1).tolist() == [java_hash("\x7f" * 4096, -1)] * 2
