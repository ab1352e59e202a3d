"""Pools, tables and evidence of more than 2**31 elements. Triton's interpreter wraps around where a GPU does."""


def test_offsets_do_not_wrap_around(interpret):
    assert interpret("interpret_far.py") == "5 cases\n"
