"""How the lines of SGLang's logs begin: it puts the time before each, those of JSON too, which would be none."""

import logging
from collections.abc import Iterable

STAMPED = logging.Formatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
"""SGLang's lines of text."""
BARE = logging.Formatter("%(message)s")
"""Of lines of JSON, which have the time inside."""


def write_as(form: logging.Formatter, targets: Iterable[logging.Logger]) -> None:
    """Let lines of these loggers have this form."""
    for target in targets:
        for handler in target.handlers:
            handler.setFormatter(form)
