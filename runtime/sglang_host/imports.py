"""Imports without the garbage collector: of SGLang's, hundreds of thousands of objects stay."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector from what is made within; all that is left of it then, it never visits again.

    It would walk through everything imported so far again and again, for a sixth of the time that the imports
    take, and write to what forks share. After an exception, which ends the process, it is as before: libraries
    complain of what is not collected then.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
