"""Answers with tool calls as models write them, in each parser's format."""

import json

CALLS = [("fun", {"a": "x y", "b": 1}), ("gun", {"a": "z"})]
OTHERS = [
    ("gun", {"a": 'don\'t [1], "{b}" \\n\n é日🙂: =', "b": -7, "e": True}),
    ("gun", {"c": ["x, y", "", "]"], "d": {"k": "}", "n": [-1, 2.5]}, "f": -0.25}),
]


def written(value):
    """As formats have it that say what is a string by the tool's schema, or by a word of their own."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tags(arguments, form):
    return "".join(form.format(k=key, v=written(value)) for key, value in arguments.items())


def apart(call):
    """Each call between marks of its own, with a text between them."""
    return lambda before, between, behind: before + call(*CALLS[0]) + between + call(*CALLS[1]) + behind


def together(opening, call, separator, closing):
    """All calls between the same marks; there is no text between them."""
    return lambda before, between, behind: (
        before + opening + separator.join(call(*each) for each in CALLS) + closing + behind
    )


def as_json(name="name", arguments="arguments"):
    return lambda called, given: json.dumps({name: called, arguments: given})


def python(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def invoked(name, arguments):
    values = tags(arguments, '<parameter name="{k}">{v}</parameter>\n')
    return f'<invoke name="{name}">\n{values}</invoke>\n'


def keyed(between):
    pair = f"<arg_key>{{k}}</arg_key>{between}<arg_value>{{v}}</arg_value>{between}"
    return lambda name, arguments: f"<tool_call>{name}{between}{tags(arguments, pair)}</tool_call>"


def dsml(name, arguments):
    def value(key, value):
        string = json.dumps(isinstance(value, str))
        return f'<｜DSML｜parameter name="{key}" string="{string}">{written(value)}</｜DSML｜parameter>\n'

    values = "".join(value(*pair) for pair in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'


def function(end):
    return lambda name, arguments: (
        f"<tool_call>\n<function={name}>\n"
        + tags(arguments, f"<parameter={{k}}>{end}{{v}}{end}</parameter>\n")
        + "</function>\n</tool_call>"
    )


def ifm(name, arguments):
    pair = "<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_value>{v}</ifm|arg_value>\n"
    return f"<ifm|tool_call>{name}\n{tags(arguments, pair)}</ifm|tool_call>"


def gemma(name, arguments):
    values = (f'{k}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{k}:{v}" for k, v in arguments.items())
    return f"<|tool_call>call:{name}{{{','.join(values)}}}<tool_call|>"


def kimi_k2(before, between, behind):
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        for i, (name, given) in enumerate(CALLS)
    )
    return f"{before}<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>{behind}"


def kimi_k3(before, between, behind):
    def argument(key, value):
        kind = "string" if isinstance(value, str) else "number"
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    calls = "".join(
        f'<|open|>call tool="{name}" index="{i + 1}"<|sep|>'
        + "".join(argument(*pair) for pair in given.items())
        + "<|close|>call<|sep|>"
        for i, (name, given) in enumerate(CALLS)
    )
    response = f"<|open|>response<|sep|>{before}<|close|>response<|sep|>" if before else ""
    return f"{response}<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>{behind}<|close|>message<|sep|>"


def muse(before, between, behind):
    calls = "".join(
        f'<atem:invoke name="{name}">\n'
        + "".join(
            f'<atem:parameter name="{key}">{json.dumps(value)}</atem:parameter>\n'
            for key, value in given.items()
        )
        + "</atem:invoke>\n"
        for name, given in CALLS
    )
    said = f"to=user<|message|>{before}<|eom|><|start|>assistant " if before else ""
    rest = f"<|eom|><|start|>assistant to=user<|message|>{behind}" if behind else ""
    return f"{said}to=functions<|message|><atem:function_calls>\n{calls}</atem:function_calls>{rest}"


def harmony(before, between, behind):
    said = f"<|start|>assistant<|channel|>commentary<|message|>{before}<|end|>" if before else ""
    calls = "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(given)}<|call|>"
        for name, given in CALLS
    )
    rest = f"<|start|>assistant<|channel|>final<|message|>{behind}" if behind else ""
    return f"<|channel|>analysis<|message|>Hm.<|end|>{said}{calls}{rest}"


QWENS = apart(lambda name, given: f"<tool_call>\n{as_json()(name, given)}\n</tool_call>")
M3 = "]<]minimax[>["
FORMS = {
    "apertus2509": together(
        "<|tools_prefix|>[", lambda name, given: json.dumps({name: given}), ", ", "]<|tools_suffix|>"
    ),
    "cohere_command4": together(
        "<|START_ACTION|>[", as_json("tool_name", "parameters"), ", ", "]<|END_ACTION|>"
    ),
    "deepseekv3": together(
        "<｜tool▁calls▁begin｜>",
        lambda name, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseekv31": together(
        "<｜tool▁calls▁begin｜>",
        lambda name, given: (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"
        ),
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseekv32": together("<｜DSML｜function_calls>\n", dsml, "", "</｜DSML｜function_calls>"),
    "deepseekv4": together("<｜DSML｜tool_calls>\n", dsml, "", "</｜DSML｜tool_calls>"),
    "dots": apart(
        lambda name, given: f"<dots_function_call>\n{invoked(name, given)}</dots_function_call>",
    ),
    "glm45": apart(keyed("\n")),
    "glm47": apart(keyed("")),
    "gpt-oss": harmony,
    "k2_horizon": apart(ifm),
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "lfm2": together("<|tool_call_start|>[", python, ", ", "]<|tool_call_end|>"),
    "ling3": apart(keyed("\n")),
    "llama3": together("<|python_tag|>", as_json("name", "parameters"), ";", ""),
    "mimo": apart(function("")),
    "minicpm5": apart(
        lambda name, given: (
            f'<function name="{name}">' + tags(given, '<param name="{k}">{v}</param>') + "</function>"
        )
    ),
    "mistral": together("[TOOL_CALLS] [", as_json(), ", ", "]"),
    "muse": muse,
    "poolside_v1": apart(keyed("\n")),
    "pythonic": together("[", python, ", ", "]"),
    "qwen25": QWENS,
    "qwen3_coder": apart(function("\n")),
    "spark25": apart(
        lambda name, given: (
            f"<tool_call>{name}\n"
            + tags(given, "<arg_key>{k}</arg_key><arg_value>{v}</arg_value>\n")
            + "</tool_call>"
        )
    ),
    "step3": together(
        "<｜tool_calls_begin｜>\n",
        lambda name, given: (
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
            + tags(given, '<steptml:parameter name="{k}">{v}</steptml:parameter>\n')
            + "</steptml:invoke><｜tool_call_end｜>\n"
        ),
        "",
        "<｜tool_calls_end｜>",
    ),
    "minimax-m2": apart(
        lambda name, given: f"<minimax:tool_call>\n{invoked(name, given)}</minimax:tool_call>"
    ),
    "minimax-m3": together(
        f"{M3}<tool_call>\n",
        lambda name, given: (
            f'{M3}<invoke name="{name}">\n'
            + tags(given, f"{M3}<{{k}}>{{v}}{M3}</{{k}}>\n")
            + f"{M3}</invoke>\n"
        ),
        "",
        f"{M3}</tool_call>",
    ),
    "trinity": QWENS,
    "interns1": apart(
        lambda name, given: (
            f"<|action_start|> <|plugin|>\n{as_json('name', 'parameters')(name, given)}<|action_end|>"
        ),
    ),
    "hermes": apart(lambda name, given: f"<tool_call>{as_json()(name, given)}</tool_call>"),
    "hunyuan": together(
        "<tool_calls>\n",
        lambda name, given: keyed("\n")(f"{name}<tool_sep>", given) + "\n",
        "",
        "</tool_calls>",
    ),
    "gigachat3": lambda before, between, behind: f"{before}<|function_call|>{as_json()(*CALLS[0])}",
    "gemma4": apart(gemma),
    "inkling": lambda before, between, behind: (
        before
        + "".join(
            f"<|message_model|>{name}<|content_invoke_tool_json|>{as_json('name', 'args')(name, given)}"
            "<|end_message|>"
            for name, given in CALLS
        )
        + behind
    ),
}
"""How models write a text, a call, a text, a call and a text, by the name of the parser."""
