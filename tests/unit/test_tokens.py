import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.tokens import ITEM, pack_ids, unpack_ids


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_come_back(ids):
    packed = pack_ids(ids)
    assert len(packed) == ITEM * len(ids)
    assert unpack_ids(packed).tolist() == ids


def test_they_are_little_endian_words():
    assert pack_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


def test_what_is_no_id_or_no_whole_number_of_them_is_refused():
    with pytest.raises(OverflowError):
        pack_ids([1 << 31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\0\0\0\0\0")
