"""The Triton kernels over pools of 8-bit numbers, in Triton's interpreter."""


def test_kernels_agree_with_their_references_of_the_same_numbers(interpret):
    assert interpret("interpret_8bit_kv.py") == "18 comparisons\n"
