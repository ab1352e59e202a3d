"""Progress bars, also where nobody looks on."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0
"""Between two updates of a bar that goes into a file: a terminal's ten in a second would fill it."""


def progress(items: Iterable | None = None, **how: Any) -> tqdm:
    """A bar on stderr over ``items``, or one that its caller moves on; ``how`` as for ``tqdm``."""
    return tqdm(items, file=sys.stderr, mininterval=0.1 if sys.stderr.isatty() else LOG_SECONDS, **how)
