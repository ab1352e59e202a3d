"""The key under which a policy's KV is found again in the prefix cache."""

from fathom.runtime.config import Policy

CACHE_KEY_PREFIX = "fathom/"


def cache_key(extra_key: str | None, policy: Policy) -> str | None:
    """The prefix cache's key: KV altered by a policy is never found under another one.

    The exact policy leaves the client's key as it is. Applying one policy twice changes nothing.

    Raises:
        ValueError: for a key that claims another policy's name space.
    """
    name = policy.fingerprint()
    prefix = "" if name == "exact" else f"{CACHE_KEY_PREFIX}{name}/"
    key = extra_key if isinstance(extra_key, str) else ""
    if key.startswith(CACHE_KEY_PREFIX):
        if prefix and key.startswith(prefix):
            return key
        raise ValueError(f'extra_key must not start with "{CACHE_KEY_PREFIX}": it is reserved')
    return prefix + key if prefix else extra_key
