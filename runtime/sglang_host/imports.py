"""Imports without the garbage collector: SGLang's are a million objects that all stay."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector from what is made within; all that is left of it then, it never visits again.

    It would walk through everything imported so far again and again, for a third of the time that the imports take,
    and write to what forks share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
