"""Which tokens of a chat prompt are system text, tools, their results, what users say, and the generation header.

A chat template is a program: where it puts a message can only be found by running it. Three ways, in this order:
render with marks around the contents; look for the content in the rendered text; render the conversation up to a
message and one further. Tool definitions and the generation header are what is there with them and not without.
What no way finds is named in the result, and :meth:`ProtectedSpans.tokens` then protects the whole prompt.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from fathom.runtime.specprefill.config import PROTECTED, SYSTEM, TOOL_RESULTS, TOOLS, USER

HEADER = "generation_header"
KIND_OF_ROLE = {"system": SYSTEM, "developer": SYSTEM, "user": USER}
KIND_OF_ROLE |= {"tool": TOOL_RESULTS, "function": TOOL_RESULTS}

MAX_DIFF_LINES = 4000
"""Longer texts are not compared line by line; all that lies between the first and the last difference is taken."""

Span = tuple[int, int]
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]


@dataclass(frozen=True)
class ProtectedSpans:
    """Token ranges ``start .. stop - 1`` of one prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        spans: ascending, disjoint ranges of each kind that was looked for. System text is what stands before the
            content of the first other message, the template's own words included, and later system messages.
        problems: why a kind could not be found, by kind; its ranges are not to be relied on.
    """

    prompt_tokens: int
    spans: dict[str, tuple[Span, ...]]
    problems: dict[str, str] = field(default_factory=dict)

    def tokens(self) -> tuple[Span, ...]:
        """What to protect: the ranges of all kinds, or the whole prompt where one of them has a problem."""
        if self.problems:
            return ((0, self.prompt_tokens),)
        return _merge(chain(*self.spans.values()))


def find_spans(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    prompt_ids: Sequence[int] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    kinds: Collection[str] = PROTECTED,
) -> ProtectedSpans:
    """Find the protected spans of a conversation.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
        messages: as given to ``apply_chat_template``: dicts with a role and a content, a string or a list of parts.
        tools: tool definitions as given to ``apply_chat_template``.
        prompt_ids: the prompt that will run. It may differ from the rendered conversation (an answer to continue at
            its end, image tokens inside); ranges that touch such a place are widened over it. None takes the
            rendered conversation.
        template_kwargs: further keywords for ``apply_chat_template``.
        kinds: what to look for, of ``PROTECTABLE``; beside the generation header, which always is.

    Raises:
        Exception: what the template raises for the conversation itself.
    """

    def render(conversation: Sequence[Message], definitions: Sequence[Any] | None, header: bool) -> str:
        return tokenizer.apply_chat_template(
            list(conversation),
            tools=definitions or None,
            tokenize=False,
            add_generation_prompt=header,
            **(template_kwargs or {}),
        )

    text = render(messages, tools, True)
    finder = _Finder(render, text, messages, tools, kinds)
    characters = finder.contents() | finder.tools() | {HEADER: finder.header()}
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError as error:  # a tokenizer in Python, which has no offsets
        ids = prompt_ids if prompt_ids is not None else tokenizer.encode(text, add_special_tokens=False)
        return ProtectedSpans(len(ids), {}, dict.fromkeys((*kinds, HEADER), str(error)))
    place = _Places(encoded["offset_mapping"], encoded["input_ids"], prompt_ids)
    spans = {kind: _merge(map(place.tokens, found)) for kind, found in characters.items()}
    return ProtectedSpans(place.prompt_tokens, spans, finder.problems)


class _Finder:
    """Character ranges in one rendered conversation."""

    def __init__(
        self,
        render: Render,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        kinds: Collection[str],
    ) -> None:
        self.render, self.text, self.messages, self.definitions = render, text, messages, tools
        self.kinds = kinds
        self.problems: dict[str, str] = {}

    def contents(self) -> dict[str, list[Span]]:
        """System text, tool results and what users say."""
        spans: dict[str, list[Span]] = {k: [] for k in (SYSTEM, TOOL_RESULTS, USER) if k in self.kinds}
        roles = [KIND_OF_ROLE.get(message.get("role", ""), "") for message in self.messages]
        written = [i for i, message in enumerate(self.messages) if _texts(message)]
        first_other = next((i for i in written if roles[i] != SYSTEM), None) if SYSTEM in spans else None
        wanted = [i for i in written if roles[i] in spans or i == first_other]
        marked = self._by_marks(wanted) if wanted else {}
        for index in wanted:
            ranges = self._without_marks(index) if marked is None else marked[index]
            kind = roles[index]
            if ranges and index == first_other:
                spans[SYSTEM].append((0, min(ranges)[0]))
            if kind in spans and ranges is None:
                self.problems[kind] = f"the chat template hides where the content of message {index} is"
            elif kind in spans:
                spans[kind] += ranges or []
        return spans

    def _by_marks(self, wanted: Sequence[int]) -> dict[int, list[Span]] | None:
        """Ranges of the messages' contents, none for what is left out; None when marks change what is rendered."""
        name = "xmark"
        while name in self.text:
            name += "x"
        marked = [
            _with_marks(message, f"{name}{i}q", f"{name}{i}z") if i in wanted else message
            for i, message in enumerate(self.messages)
        ]
        rendered = self._try(marked, self.definitions, True)
        if rendered is None:
            return None
        found: dict[int, list[Span]] = {index: [] for index in wanted}
        opened, plain, last = {}, 0, 0
        for mark in re.finditer(rf"{name}(\d+)([qz])", rendered):
            plain += mark.start() - last
            last = mark.end()
            index = int(mark[1])
            if mark[2] == "q":
                opened[index] = plain
            elif index in opened:
                found[index].append((opened.pop(index), plain))
            else:
                return None
        unmarked = re.sub(rf"{name}\d+[qz]", "", rendered)
        return found if unmarked == self.text and not opened else None

    def _without_marks(self, index: int) -> list[Span] | None:
        """The one place where each text of the content stands as it is; else the message's part of the
        conversation; else every place where they stand."""
        texts = [re.finditer(re.escape(text), self.text) for text in _texts(self.messages[index])]
        found = [[match.span() for match in matches] for matches in texts]
        places = sorted(chain(*found))
        if all(len(each) == 1 for each in found):
            return [(places[0][0], max(stop for _, stop in places))]
        before = self._try(self.messages[:index], self.definitions, False) if index else ""
        after = self._try(self.messages[: index + 1], self.definitions, False)
        if before is None or after is None or not self.text.startswith(after) or not after.startswith(before):
            return places if all(found) else None
        return [(len(before), len(after))]

    def header(self) -> list[Span]:
        """What the template adds for the answer to begin."""
        without = self._try(self.messages, self.definitions, False)
        if without is not None and without != self.text:
            return [(_shared_start(without, self.text), len(self.text))]
        # It has none, or writes it always: then it is what comes after the last content.
        last = max((i for i, message in enumerate(self.messages) if _texts(message)), default=None)
        found = self._by_marks([last]) if last is not None else None
        if last is None or not found or not found[last]:
            self.problems[HEADER] = "the chat template hides where the generation header is"
            return []
        return [(found[last][-1][1], len(self.text))]

    def tools(self) -> dict[str, list[Span]]:
        """What the template writes because of the tool definitions."""
        if TOOLS not in self.kinds:
            return {}
        if not self.definitions:
            return {TOOLS: []}
        without = self._try(self.messages, None, True)
        if without is None:
            self.problems[TOOLS] = "the chat template cannot render the conversation without its tools"
            return {TOOLS: []}
        return {TOOLS: _additions(without, self.text)}

    def _try(self, messages: Sequence[Message], tools: Sequence[Any] | None, header: bool) -> str | None:
        try:
            return self.render(messages, tools, header)
        except Exception:  # the template may raise anything for a conversation that is not whole
            return None


def _additions(without: str, text: str) -> list[Span]:
    """Ranges of ``text`` that are not in ``without``."""
    if without == text:
        return []
    start = _shared_start(without, text)
    rest = without[start:], text[start:]
    end = _shared_start(rest[0][::-1], rest[1][::-1])
    old, new = (part[: len(part) - end] for part in rest)
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    if len(before) + len(after) > MAX_DIFF_LINES:
        return [(start, start + len(new))]
    offsets = np.cumsum([start, *map(len, after)]).tolist()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [(offsets[j], offsets[k]) for tag, _, _, j, k in matcher.get_opcodes() if tag != "equal"]


def _texts(message: Message) -> list[str]:
    """The texts of a message without the white space around them, which templates may drop; no empty ones."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part["text"] for part in _text_parts(content)]
    return [text.strip() for text in texts if text.strip()]


def _text_parts(content: Any) -> list[Mapping[str, Any]]:
    parts = content if isinstance(content, list) else []
    return [
        p for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str) and p["text"].strip()
    ]


def _with_marks(message: Message, begin: str, end: str) -> Message:
    """A copy of the message with marks just inside the white space around its text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _surround(content, begin, end)}
    parts = _text_parts(content)
    changed = {id(part): dict(part) for part in parts}
    for part, marks in ((parts[0], (begin, "")), (parts[-1], ("", end))):
        changed[id(part)]["text"] = _surround(changed[id(part)]["text"], *marks)
    return {**message, "content": [changed.get(id(part), part) for part in content]}


def _surround(text: str, begin: str, end: str) -> str:
    lead = len(text) - len(text.lstrip())
    stop = len(text.rstrip())
    return text[:lead] + begin + text[lead:stop] + end + text[stop:]


class _Places:
    """Characters of the rendered conversation as tokens of the prompt that will run."""

    def __init__(self, offsets: Sequence[Span], ids: Sequence[int], prompt_ids: Sequence[int] | None) -> None:
        self._starts, self._ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        own, run = np.asarray(ids), np.asarray(ids if prompt_ids is None else prompt_ids)
        self.prompt_tokens, self._rendered_tokens = len(run), len(own)
        shorter = min(len(own), len(run))
        self._same_head = _equal_length(own[:shorter], run[:shorter])
        tail = _equal_length(own[len(own) - shorter :][::-1], run[len(run) - shorter :][::-1])
        self._same_tail = min(tail, shorter - self._same_head)

    def tokens(self, span: Span) -> Span:
        """All tokens with a character in the span, widened over what the two token sequences do not share."""
        if span[0] >= span[1]:
            return (0, 0)
        first = int(np.searchsorted(self._ends, span[0], side="right"))
        last = int(np.searchsorted(self._starts, span[1], side="left"))
        tail_begin = self._rendered_tokens - self._same_tail
        shift = self.prompt_tokens - self._rendered_tokens
        if first > self._same_head:
            first = first + shift if first >= tail_begin else self._same_head
        if last > self._same_head:
            last = last + shift if last >= tail_begin else self.prompt_tokens - self._same_tail
        return first, last


def _shared_start(a: str, b: str) -> int:
    """How many first characters two texts share."""
    shorter = min(len(a), len(b))
    return _equal_length(
        *(np.frombuffer(t[:shorter].encode("utf-32-le", "surrogatepass"), np.uint32) for t in (a, b))
    )


def _equal_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many first entries of two sequences of one length are equal."""
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else len(a)


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Ascending and disjoint, without empty ones."""
    merged: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
