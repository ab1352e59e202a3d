"""What one HTTP request asked for and what the engine reported about it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fathom.runtime.config import Choice, Limits, Policy, choose
from fathom.server.telemetry.history import History

PRIVATE_KEYS = frozenset({"first_token_time", "staircase"})
"""Keys of the scheduler's report that are not for clients."""


@dataclass
class Face:
    """What the HTTP side of one server knows.

    Attributes:
        asked: the operator's policy fields, for requests that say nothing else.
        tunings: the operator's values of fields that only refine another one, for requests that give none.
        limits: what the served model allows; filled in when it is known.
        history: the last generations, for the live page.
        completes_middles: whether the operator has said how a completion with a suffix is asked for.
        packed_weights: whether the engine has packed weights, which nobody can change or read back.
        tokenizes: whether the server has a tokenizer.
    """

    asked: Mapping[str, Any] = field(default_factory=dict)
    tunings: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    history: History = field(default_factory=History)
    completes_middles: bool = False
    packed_weights: bool = False
    tokenizes: bool = True

    def __post_init__(self) -> None:
        self.choice: Choice = self.choose(None)

    @property
    def default(self) -> Policy:
        """The policy of requests that bring none."""
        return self.choice.policy

    def choose(self, request: Any) -> Choice:
        """The policy of a request with this ``fathom`` object.

        Raises:
            PolicyError: for what is illegal or not to be had here.
        """
        return choose(request, self.asked, self.limits, self.tunings)

    def look_at(self, server_args: Any) -> None:
        """Take in what the operator's options of SGLang leave out."""
        self.completes_middles = server_args.completion_template is not None
        self.tokenizes = not server_args.skip_tokenizer_init

    def learn(self, limits: Limits) -> None:
        """Take in what the served model allows, and hold what the operator asked for against it.

        Raises:
            PolicyError: when the default policy asks for what this model cannot do.
        """
        self.limits = limits
        self.choice = self.choose(None)


@dataclass(frozen=True)
class Conversation:
    """What a chat prompt is rendered from: what ``apply_chat_template`` gets.

    Attributes:
        messages: dicts with a role and a content; tools: their definitions, or None.
        template_kwargs: further keywords for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] | None = None


@dataclass
class RequestContext:
    """One HTTP request on a generation route.

    Attributes:
        route: the route, as a metric label.
        policy: the policy it runs under.
        left_out: fields that its preset would have filled, each with the reason why it could not.
        model: the name it gives of the model, or of an adapter; "" where it gives none.
        json_schema: what its answer must be, beside its sampling parameters; "" for anything.
        stops: the stop sequences of a message.
        received_time: ``time.perf_counter()`` seconds when its first byte was handed to us.
        conversation: what its chat prompt was rendered from.
        protected: token ranges of the prompt that a selection must keep.
        body_bytes: length of its body.
        converted: a chat request of SGLang's, and what returns or raises what came of making its prompt.
        places: by place of the answer, where its tokens were found in its text.
        waiting_logprobs: by place of the answer, log-probabilities of tokens whose text was not sent yet.
        expected: generations that the request asked for; grows when the engine is called.
        finished: ids of the generations that ended, with or without a report.
        reports: the scheduler's report by generation id.
        stopped_by: the text that ended the last generation, if one did.
    """

    route: str
    policy: Policy
    received_time: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    json_schema: str = ""
    stops: Sequence[Any] = ()
    conversation: Conversation | None = None
    protected: tuple[tuple[int, int], ...] = ()
    body_bytes: int = 0
    converted: tuple[Any, Callable[[], Any]] | None = None
    places: dict[int, Any] = field(default_factory=dict)
    waiting_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    expected: int = 0
    finished: set[str] = field(default_factory=set)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped_by: str | None = None

    @property
    def complete(self) -> bool:
        """Whether every generation has ended."""
        return 0 < self.expected <= len(self.finished)

    def collect(self, output: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take the reports out of what the engine returned."""
        for item in output if isinstance(output, list) else [output]:
            meta = item.get("meta_info") or {}
            if meta.get("finish_reason") is None:
                continue
            self.finished.add(meta.get("id", ""))
            matched = meta["finish_reason"].get("matched")
            self.stopped_by = matched if isinstance(matched, str) else None
            if report := meta.get("fathom"):
                self.reports[meta.get("id", "")] = report

    def answer(self) -> dict[str, Any] | None:
        """The object for the client, or None when nothing was reported."""
        return self.describe(self.reports.values()) if self.reports else None

    def describe(self, reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The object for some of the request's reports."""
        head: dict[str, Any] = {"preset": self.policy.preset}
        if self.left_out:
            head["left_out"] = dict(self.left_out)
        return head | merge(reports)


CURRENT: ContextVar[RequestContext | None] = ContextVar("fathom_request", default=None)


def public(report: dict[str, Any]) -> dict[str, Any]:
    """A report without the keys that are not for clients."""
    return {key: value for key, value in report.items() if key not in PRIVATE_KEYS}


LARGEST = frozenset({"longest_burst"})
"""Keys of a report whose values are compared, not summed."""


def merge(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One object for all generations of an answer.

    Counters are summed, or the largest taken (``LARGEST``); other values stay where all reports agree, and are left
    out where they do not.
    """
    reports = [public(report) for report in reports]
    merged: dict[str, Any] = {}
    for key in reports[0]:
        values: list[Any] = [report.get(key) for report in reports]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            merged[key] = max(values) if key in LARGEST else sum(values)
        elif all(value == values[0] for value in values):
            merged[key] = values[0]
    return merged | {"generations": len(reports)}
