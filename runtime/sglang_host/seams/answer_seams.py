"""The seams of answers: thoughts, where tokens are in a text, and what is told of the weights."""

from fathom.runtime.sglang_host.seams.seam import SERVER, Seam, reads_attributes, reads_global, relies_on

ANSWER_SEAMS: tuple[Seam, ...] = (
    *(
        relies_on(
            SERVER,
            f"entrypoints.openai.{module}:build_endpoint_weight_version_metadata",
            "replace",
            "metadata of an answer, in which clients want no list",
            "meta_info",
        )
        for module in ("serving_chat", "serving_completions")
    ),
    *(
        relies_on(
            SERVER,
            f"entrypoints.http_server:{route}",
            "replace",
            f"makes its parser by the module's `{parser}`, ours, which tells which there are",
            "obj request",
            reads_global(parser),
        )
        for route, parser in (
            ("parse_function_call_request", "FunctionCallParser"),
            ("separate_reasoning_request", "ReasoningParser"),
        )
    ),
    relies_on(
        SERVER,
        "parser.reasoning_parser:CohereCommand4Detector.parse_streaming_increment",
        "replace",
        "takes all steps of a piece, and is given no mark that the model repeats",
        "new_text",
        reads_attributes("_buffer _reasoning_done think_end_token"),
    ),
    *(
        relies_on(
            SERVER,
            f"parser.reasoning_parser:BaseReasoningFormatDetector.{method}",
            "replace",
            "is given no text before thoughts, and no mark in two pieces",
            parameters,
            reads_attributes(
                f"_in_reasoning think_start_token think_start_self_label think_end_token {names}"
            ),
        )
        for method, parameters, names in (
            ("_detect_and_parse_impl", "text", "previous_content"),
            ("_parse_streaming_increment_impl", "new_text", "_buffer stripped_think_start"),
        )
    ),
    relies_on(
        SERVER,
        "parser.harmony_parser:CanonicalStrategy._parse_partial_analysis",
        "replace",
        "what is told of a message before its end, which it does of thoughts alone",
        "text tokens start_pos",
        reads_attributes("_extract_channel_type reasoning CHANNEL MESSAGE"),
    ),
    relies_on(
        SERVER,
        "parser.harmony_parser:HarmonyParser.parse",
        "replace",
        "keeps the begin of a message that is told in pieces; behind a call leaves a word out, or its begin",
        "chunk",
        reads_attributes("_buffer _should_filter_commentary _partial_commentary commentary"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_completions:to_openai_style_logprobs",
        "replace",
        "each token with its log-probability, id and text, before the choice that they are of",
        "input_token_logprobs output_token_logprobs input_top_logprobs output_top_logprobs",
    ),
    *(
        relies_on(
            SERVER,
            f"entrypoints.openai.serving_completions:OpenAIServingCompletion.{method}",
            "read",
            f"makes a choice by the module's `{kind}`, ours, which says where its tokens begin",
            parameters,
            lambda method, names={kind, "to_openai_style_logprobs"}: names <= {*method.__code__.co_names},
        )
        for method, kind, parameters in (
            ("_build_completion_response", "CompletionResponseChoice", "request ret created"),
            (
                "_generate_completion_stream",
                "CompletionResponseStreamChoice",
                "adapted_request request raw_request",
            ),
        )
    ),
)
