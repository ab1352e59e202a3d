"""The seams of tool calls."""

from fathom.runtime.sglang_host.seams.seam import SERVER, Seam, reads_attributes, reads_global, relies_on

TOOL_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SERVER,
        "function_call.function_call_parser:FunctionCallParser.parse_stream_chunk",
        "replace",
        "takes one step of a tool call, of a text or of none",
        "chunk_text",
        reads_attributes("detector parse_streaming_increment"),
    ),
    relies_on(
        SERVER,
        "function_call.json_array_parser:JsonArrayParser.parse_streaming_increment",
        "replace",
        "the same where a grammar makes the call",
        "new_text tools",
    ),
    *(
        relies_on(
            SERVER,
            "function_call.base_format_detector:BaseFormatDetector.parse_streaming_increment",
            "replace",
            f"reads arguments by the module's `{name}`, ours, which does not go through all of them in Python",
            "new_text tools",
            reads_global(name),
        )
        for name in ("_partial_json_loads", "_find_common_prefix")
    ),
    *(
        relies_on(
            SERVER,
            f"function_call.deepseekv32_detector:DeepSeekV32Detector.{function}",
            "replace",
            f"reads arguments by the module's `{name}`, ours, which does not go through all of them in Python",
            arguments,
            reads_global(name),
        )
        for function, arguments, name in (
            ("parse_streaming_increment", "new_text tools", "_find_common_prefix"),
            ("_parse_parameters_from_xml", "invoke_content allow_partial", "_partial_json_loads"),
        )
    ),
    relies_on(
        SERVER,
        "function_call.llama32_detector:Llama32Detector.parse_streaming_increment",
        "replace",
        "a call that is JSON is read as JSON",
        "new_text tools",
        reads_attributes("_buffer parse_streaming_increment"),
    ),
    *(
        relies_on(
            SERVER,
            f"function_call.{module}:{detector}.parse_streaming_increment",
            "replace",
            "calls in JSON are read by the base class, which is not given what is around them",
            "new_text tools",
            reads_attributes("parse_streaming_increment normal_text"),
        )
        for module, detector in (
            ("qwen25_detector", "Qwen25Detector"),
            ("hermes_detector", "HermesDetector"),
        )
    ),
    *(
        relies_on(SERVER, f"function_call.{module}:{detector}.{method}", use, why, parameters)
        for module, detector in (
            ("deepseekv3_detector", "DeepSeekV3Detector"),
            ("deepseekv31_detector", "DeepSeekV31Detector"),
            ("gigachat3_detector", "GigaChat3Detector"),
            ("internlm_detector", "InternlmDetector"),
            ("mimo_detector", "MiMoDetector"),
            ("minicpm5_detector", "MiniCPM5Detector"),
            ("minimax_m2", "MinimaxM2Detector"),
            ("step3_detector", "Step3Detector"),
        )
        for method, use, why, parameters in (
            (
                "parse_streaming_increment",
                "replace",
                "a block of calls is told when it is closed",
                "new_text tools",
            ),
            ("detect_and_parse", "call", "reads a block of calls as that of a whole answer", "text tools"),
        )
    ),
    relies_on(
        SERVER,
        "function_call.kimik2_detector:KimiK2Detector.parse_streaming_increment",
        "replace",
        "is given no mark in two pieces",
        "new_text tools",
        reads_attributes("_buffer"),
    ),
    relies_on(
        SERVER,
        "function_call.gpt_oss_detector:GptOssDetector.parse_streaming_increment",
        "replace",
        "is given one message at a time; of plain text its parser of messages is made anew",
        "new_text tools",
        reads_attributes("_buffer harmony_parser parse"),
    ),
    relies_on(
        SERVER,
        "function_call.deepseekv32_detector:DeepSeekV32Detector.parse_streaming_increment",
        "replace",
        "line ends between calls are no text; is given no text behind a section of calls",
        "new_text tools",
        reads_attributes("current_tool_id bot_token eot_token"),
    ),
    *(
        relies_on(
            SERVER,
            f"function_call.kimik3_detector:KimiK3Detector.{method}",
            "replace",
            why,
            parameters,
            reads_attributes("bot_token _buffer _emit_normal_text"),
        )
        for method, why, parameters in (
            (
                "parse_streaming_increment",
                "is given no text behind a section of calls, and no mark in two pieces",
                "new_text tools",
            ),
            ("finish", "what ends as a mark begins is text when a stream ends", "tools"),
        )
    ),
    relies_on(
        SERVER,
        "function_call.base_format_detector:BaseFormatDetector.finish",
        "replace",
        "what is kept for the begin of a mark is text when a stream ends",
        "tools",
    ),
    relies_on(
        SERVER,
        "function_call.function_call_parser:FunctionCallParser.parse_stream_end",
        "replace",
        "asks the detector for what it has kept; its calls go on with the numbers of those before",
        "",
        reads_attributes("detector finish"),
    ),
    relies_on(
        SERVER,
        "function_call.function_call_parser:FunctionCallParser.parse_non_stream",
        "replace",
        "the text of a whole answer is what a stream of it says",
        "full_text",
        reads_attributes("detector has_tool_call detect_and_parse"),
    ),
    relies_on(
        SERVER,
        "function_call.function_call_parser:FunctionCallParser.has_tool_call",
        "replace",
        "whether a whole answer is read for calls; ours also finds one without an end",
        "text",
        reads_attributes("detector has_tool_call"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._check_for_unstreamed_tool_args",
        "replace",
        "completes a call that a stream ends within, which agents would carry out; ours says nothing",
        "parser content request index",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._process_tool_calls",
        "replace",
        "reads the calls of a whole answer; of a demanded one that is cut off all JSON would be text",
        "text tools finish_reason tool_choice history_tool_calls_cnt",
        reads_attributes("ToolCallProcessingResult"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_responses:OpenAIServingResponses._make_response_output_items",
        "replace",
        "the same of a response, whose items it makes",
        "request final_output tokenizer output_logprobs require_reasoning",
        reads_attributes("_make_tool_call_item effective_tool_choice custom_tool_names"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_responses:OpenAIServingResponses._make_tool_call_item",
        "call",
        "a response's item of a call",
        "name arguments custom_names",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:normalize_assistant_tool_call_arguments",
        "replace",
        "reads the arguments of earlier calls, and refuses a chat for what is left of one that was cut off",
        "message strict",
    ),
    relies_on(
        SERVER,
        "function_call.base_format_detector:BaseFormatDetector.parse_base_json",
        "replace",
        "makes calls of JSON, and raises on what is no object",
        "action tools",
    ),
    relies_on(
        SERVER,
        "function_call.base_format_detector:BaseFormatDetector._get_tool_indices",
        "call",
        "which tools there are, by their names",
        "tools",
    ),
    relies_on(
        SERVER,
        "function_call.hunyuan_detector:HunyuanDetector.parse_streaming_increment",
        "replace",
        "is given no text behind a section of calls, and no mark in two pieces",
        "new_text tools",
    ),
    relies_on(
        SERVER,
        "function_call.qwen3_coder_detector:Qwen3CoderDetector.detect_and_parse",
        "replace",
        "is given no call that an answer ends within",
        "text tools",
        reads_attributes("tool_call_start_token"),
    ),
    relies_on(
        SERVER,
        "function_call.qwen3_coder_detector:Qwen3CoderDetector.__init__",
        "read",
        "the marks of a call",
        "",
        reads_attributes("tool_call_end_token function_end_token tool_call_prefix"),
    ),
    relies_on(
        SERVER,
        "function_call.core_types:ToolCallItem",
        "read",
        "calls of one answer are told apart by their numbers, which we correct",
        check=lambda c: {"tool_index", "name", "parameters"} <= c.model_fields.keys(),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._tool_call_parsing_active",
        "replace",
        "reads calls that a grammar made, which needs no parser",
        "request",
        reads_attributes("tool_choice _effective_tools tool_call_parser"),
    ),
    relies_on(
        SERVER,
        "function_call.function_call_parser:FunctionCallParser.get_structure_constraint",
        "replace",
        "leaves the arguments of a tool that is not strict any JSON, in a tag that can be dumped and read",
        "tool_choice parallel_tool_calls thinking_mode",
    ),
    relies_on(
        SERVER,
        "function_call.cohere_command4_detector:CohereCommand4Detector.detect_and_parse",
        "replace",
        "of a block of calls that is cut off those that are whole",
        "text tools",
        reads_attributes("bot_token eot_token _normalize_calls"),
    ),
    relies_on(
        SERVER,
        "function_call.mistral_detector:MistralDetector.parse_streaming_increment",
        "replace",
        "all calls of an array are streamed, a text keeps its brackets, and an end is looked for where one may be",
        "new_text tools",
        reads_attributes(
            "_buffer bot_token _tool_calls_marker _ends_with_partial_token current_tool_id "
            "_try_parse_compact_args_format"
        ),
    ),
    relies_on(
        SERVER,
        "function_call.mistral_detector:MistralDetector.detect_and_parse",
        "replace",
        "an array right behind the mark is read too",
        "text tools",
        reads_attributes("_tool_calls_marker bot_token"),
    ),
    relies_on(
        SERVER,
        "function_call.pythonic_detector:PythonicDetector.parse_streaming_increment",
        "replace",
        "the end of calls is looked for where one may be",
        "new_text tools",
        reads_attributes("_buffer _find_matching_bracket"),
    ),
    relies_on(
        SERVER,
        "function_call.pythonic_detector:PythonicDetector._get_parameter_value",
        "replace",
        "reads the value of an argument, whose error leaves its call out",
        "val",
    ),
    relies_on(
        SERVER,
        "function_call.pythonic_detector:PythonicDetector.detect_and_parse",
        "replace",
        "reads calls as Python, which names of tools need not be",
        "text tools",
        reads_attributes("_get_tool_indices func id"),
    ),
    relies_on(
        SERVER,
        "function_call.lfm2_detector:Lfm2Detector._parse_pythonic_content",
        "replace",
        "the same between marks",
        "content tools",
        reads_attributes("_get_tool_indices _parse_pythonic_call"),
    ),
    relies_on(
        SERVER,
        "function_call.dots_detector:DotsToolDetector.__init__",
        "replace",
        "keeps the pattern that a block of calls is searched for with, and strips what it finds",
        "",
        reads_attributes("func_call_regex"),
    ),
    relies_on(
        SERVER,
        "function_call.ling3_detector:Ling3Detector.__init__",
        "replace",
        "keeps the pattern of a call, which is a class member where a call may have no end",
        "",
        reads_attributes("func_detail_regex"),
    ),
    relies_on(
        SERVER,
        "function_call.ling3_detector:Ling3Detector._STREAMING_PARTIAL_PATTERN",
        "replace",
        "the pattern of a call in a stream, in which blanks may be given back",
        check=lambda pattern: "tool_call" in pattern.pattern,
    ),
    *(
        relies_on(
            SERVER,
            f"function_call.kimik3_detector:KimiK3Detector.{function}",
            "replace",
            f"finds calls, or their arguments, by the module's `{name}`",
            arguments,
            reads_global(name),
        )
        for function, arguments, name in (
            ("_parse_calls", "section", "_CALL_RE"),
            ("_decode_call", "attrs body", "_ARG_RE"),
        )
    ),
    relies_on(
        SERVER,
        "function_call.lfm2_detector:_recovery_candidates",
        "replace",
        "mends quotes by the module's function, which reads all calls once for each quote",
        "content",
        reads_global("_escape_nested_quotes_in_strings"),
    ),
    relies_on(
        SERVER,
        "function_call.internlm_detector:InternlmDetector.detect_and_parse",
        "replace",
        "finds blocks of calls by the module's `re`, and strips them",
        "text tools",
        reads_global("re"),
    ),
    relies_on(
        SERVER,
        "function_call.pythonic_detector:PythonicDetector.__init__",
        "replace",
        "keeps the pattern that a list of calls is searched for with",
        "",
        reads_attributes("tool_call_regex"),
    ),
    relies_on(
        SERVER,
        "function_call.pythonic_detector:PythonicDetector._find_matching_bracket",
        "replace",
        "says where a list in a stream ends",
        "buffer start",
    ),
    relies_on(
        SERVER,
        "function_call.base_format_detector:BaseFormatDetector.parse_streaming_increment",
        "call",
        "reads a call behind a separator, where there was one before",
        "new_text tools",
        reads_attributes("_buffer current_tool_id current_tool_name_sent tool_call_separator startswith"),
    ),
    relies_on(
        SERVER,
        "function_call.glm4_moe_detector:Glm4MoeDetector.parse_streaming_increment",
        "replace",
        "tells the text before a call, which is looked for by the class's `_STREAMING_PARTIAL_PATTERN`, ours",
        "new_text tools",
        reads_attributes("_buffer bot_token eot_token _STREAMING_PARTIAL_PATTERN search group end"),
    ),
    relies_on(
        SERVER,
        "function_call.glm4_moe_detector:Glm4MoeDetector._STREAMING_PARTIAL_PATTERN",
        "replace",
        "a call is found without a search through all of it for each piece",
        check=lambda pattern: pattern.pattern == r"<tool_call>(.*?)(?:\\n|\n)(.*?)(</tool_call>|$)",
    ),
    relies_on(
        SERVER,
        "function_call.glm47_moe_detector:Glm47MoeDetector.parse_streaming_increment",
        "read",
        "looks for a call by the module's `re.search`, ours, with this pattern",
        "new_text tools",
        reads_attributes(r"re search end <tool_call>(.*?)(?:(<arg_key.*?))?(?:(</tool_call>)|$)"),
    ),
    *(
        relies_on(
            SERVER,
            f"function_call.{module}:{detector}._process_xml_to_json_streaming",
            "replace",
            "is given no begin of a mark with that of another behind it",
            "raw_increment func_name tools",
            reads_attributes(
                "_stream_state _xml_tag_buffer _current_value _cached_value_type _value_started string"
            ),
        )
        for module, detector in (
            ("glm4_moe_detector", "Glm4MoeDetector"),
            ("glm47_moe_detector", "Glm47MoeDetector"),
        )
    ),
    *(
        relies_on(
            SERVER,
            f"function_call.minimax_m3:MinimaxM3Detector.{method}",
            "replace",
            "whether an argument is a text or an object, no piece's end decides",
            "calls",
            reads_attributes(f"_buffer _current_param_schema _schema_has_type {names}"),
        )
        for method, names in (
            ("_consume_param_start", "PARAM_START_PREFIX _current_param_is_complex"),
            ("_consume_scalar_param", "_parameter_end_token _current_param_buffer"),
        )
    ),
    *(
        relies_on(SERVER, f"function_call.minimax_m3:MinimaxM3Detector.{method}", "call", why, parameters)
        for method, why, parameters in (
            ("_consume_complex_param", "tells a list or an object", "calls"),
            ("_is_scalar_schema", "whether a schema names a type that is neither", "schema"),
            ("_parameter_end_token", "the mark that closes an argument", "tag"),
        )
    ),
    relies_on(
        SERVER,
        "function_call.step3_detector:Step3Detector.__init__",
        "replace",
        "keeps the pattern of an argument, in which it wants no `<`",
        "",
        reads_attributes("param_regex"),
    ),
)
