"""HTML from nested calls: all text is escaped, because only :func:`el` makes :class:`Html`."""

from html import escape


class Html(str):
    """Text that is HTML already."""


VOID = frozenset({"meta", "br", "link"})


def el(tag: str, *content: object, **attributes: object) -> Html:
    """An element.

    Args:
        content: what is in it; anything but :class:`Html` is text, and None is left out.
        attributes: by name, a trailing underscore removed and others made hyphens; None is left out.
    """
    names = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    given = "".join(
        f' {name}="{escape(str(value), quote=True)}"' for name, value in names if value is not None
    )
    inner = "".join(_text(item) for item in content)
    return Html(f"<{tag}{given}>" if tag in VOID else f"<{tag}{given}>{inner}</{tag}>")


def join(*parts: object) -> Html:
    """Several things, one after another."""
    return Html("".join(_text(part) for part in parts))


def _text(item: object) -> str:
    if item is None:
        return ""
    return item if isinstance(item, Html) else escape(str(item), quote=False)
