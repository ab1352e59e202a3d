"""A step's page tables as the device writes them; the reference is compared with the host's in ``tests/kv``."""


def test_the_triton_kernel_in_the_interpreter(interpret):
    assert interpret("interpret_span_tables.py") == "5 cases\n"
