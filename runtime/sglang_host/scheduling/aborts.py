"""A request to abort is for the one request that it names.

SGLang aborts every request whose id begins with the one that is named: who chose a short id, and left, ended the
requests of others, and ``request-1`` those of ``request-10``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def alone(named: Any, requests: Iterable[Any]) -> Iterator[None]:
    """Let no request but the one that is named be found by its id.

    Args:
        named: SGLang's request to abort one, or all.
        requests: the scheduler's.
    """
    hidden = (
        [] if named.abort_all else [r for r in requests if r.rid.startswith(named.rid) and r.rid != named.rid]
    )
    ids = [request.rid for request in hidden]
    for request in hidden:
        request.rid = ""
    try:
        yield
    finally:
        for request, rid in zip(hidden, ids, strict=True):
            request.rid = rid
