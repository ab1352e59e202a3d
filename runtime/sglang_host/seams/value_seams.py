"""The seams of texts in arguments of tool calls."""

from fathom.runtime.sglang_host.seams.seam import SERVER, Seam, reads_attributes, relies_on

VALUE_SEAMS: tuple[Seam, ...] = (
    *(
        relies_on(SERVER, f"function_call.{place}", use, why, parameters, reads_attributes(names))
        for place, use, why, parameters, names in (
            (
                "deepseekv32_detector:DeepSeekV32Detector._parse_parameters_from_xml",
                "replace",
                "strips the texts of arguments, which it finds by patterns of ours too",
                "invoke_content allow_partial",
                "parameter_regex partial_parameter_regex strip",
            ),
            (
                "dots_detector:DotsToolDetector._parse_xml_invoke",
                "replace",
                "the same",
                "match tools",
                "parameter_regex _extract_name strip",
            ),
            (
                "minicpm5_detector:MiniCPM5Detector.detect_and_parse",
                "replace",
                "the same, and of a text with tags it reads nothing, unless it is marked as text",
                "text tools",
                "func_call_regex strip",
            ),
            (
                "minimax_m2:MinimaxM2Detector._parse_block",
                "replace",
                "the same of line ends",
                "block tools",
                "tool_call_function_regex tool_call_parameter_regex _parse_parameter lstrip rstrip",
            ),
            (
                "minimax_m2:MinimaxM2Detector._parse_parameter",
                "call",
                "reads a value by the schema of its tool",
                "fname pname pval tools",
                "_convert_param_value_with_types",
            ),
            *(
                (
                    place,
                    "replace",
                    "reads a value, its first text, by its schema, and raises on a number without end",
                    parameters,
                    "int",
                )
                for place, parameters in (
                    ("mimo_detector:_convert_param_value", "param_value param_name func_name tools"),
                    ("minimax_m2:MinimaxM2Detector._convert_param_value_with_types", "value param_types"),
                    ("minimax_m3:MinimaxM3Detector._convert_leaf_value", "value schema"),
                )
            ),
            (
                "poolside_v1_detector:PoolsideV1Detector.parse_streaming_increment",
                "replace",
                "takes a line end from both ends of a value, and is given one",
                "new_text tools",
                "_buffer _state OUTSIDE removeprefix removesuffix",
            ),
            (
                "poolside_v1_detector:PoolsideV1Detector.detect_and_parse",
                "replace",
                "the same of a whole answer",
                "text tools",
                "removeprefix removesuffix",
            ),
            (
                "step3_detector:Step3Detector._parse_steptml_invoke",
                "replace",
                "strips the texts of arguments",
                "text tools",
                "invoke_regex param_regex strip",
            ),
        )
    ),
)
