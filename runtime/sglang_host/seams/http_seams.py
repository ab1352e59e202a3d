"""The seams of SGLang's routes: requests that control the engine, API keys, limits, Ollama's routes, health."""

import inspect
from types import CodeType
from typing import Any

from fathom.runtime.sglang_host.seams.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)


def _asks_for_the_endpoint(function: Any) -> bool:
    """Whether the middleware that a function adds looks for the endpoint in its module, before the method."""
    inner = (code.co_names for code in function.__code__.co_consts if isinstance(code, CodeType))
    return any(names[:2] == ("_get_fastapi_request_path", "method") for names in inner)


HTTP_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.abort_request",
        "override",
        "nobody's request is aborted for the beginning of its id",
        "recv_req",
        reads_attributes("chunked_req waiting_queue grammar_manager collect_inflight_reqs startswith"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req._check_str_based_finish",
        "replace",
        "a pattern that takes too long ends its own request",
        "new_accepted_len",
        reads_attributes("re search error finished_reason"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:re",
        "replace",
        "patterns are looked for within a time limit",
        check=lambda module: hasattr(module, "search") and hasattr(module, "error"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_request_dispatcher",
        "override",
        "a control request that fails is answered and does not end the scheduler",
        "",
        reads_attributes("_request_dispatcher"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.process_input_requests",
        "read",
        "hands each request to the dispatcher and sends what it returns",
        "recv_reqs",
        lambda f: reads_attributes("_request_dispatcher send_output")(inspect.unwrap(f)),
    ),
    relies_on(
        SCHEDULER,
        "observability.metrics_collector:SchedulerMetricsCollector._log_gauge_queue_count",
        "override",
        "clients cannot make up series by their priorities",
        "gauge data",
        reads_attributes("by_priority total"),
    ),
    relies_on(
        "server scheduler",
        "managers.io_struct:BaseReq",
        "read",
        "the failure of a control request travels in its answer's id",
        check=lambda c: "rid" in c.__struct_fields__,
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.detokenize_logprob_tokens",
        "override",
        "a token that the tokenizer does not know ends no server",
        "token_logprobs_val token_logprobs_idx decode_to_text",
        reads_attributes("batch_decode"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin.init_communicators",
        "override",
        "creates what asks the engine, which becomes ours",
        "",
        reads_attributes("_dispatch_to_scheduler"),
    ),
    relies_on(
        SERVER,
        "managers.communicator:FanOutCommunicator.__call__",
        "override",
        "sees every answer to a control request",
        "obj",
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:flush_cache",
        "call",
        "empties the prefix cache under vLLM's name too",
        "timeout",
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin._execute_profile",
        "override",
        "why a profile could not be started or stopped is for the client",
        "req",
    ),
    relies_on(
        SERVER,
        "utils.auth:decide_request_auth",
        "replace",
        "routes that need no key need none behind a mount point",
        "method path authorization_header api_key admin_api_key auth_level",
    ),
    relies_on(
        SERVER,
        "utils.auth:add_api_key_middleware",
        "replace",
        "Anthropic's clients send their keys in another header, and routes have formats of refusals",
        "app api_key admin_api_key",
        reads_attributes("add_middleware"),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:_setup_and_run_http_server",
        "read",
        "looks for `add_api_key_middleware` in its module when the server starts",
        check=reads_attributes("add_api_key_middleware"),
    ),
    relies_on(
        SERVER,
        "server_args:ServerArgs.resolved_dict",
        "replace",
        "keys are not told to who may read the other arguments",
        "",
    ),
    relies_on(
        SERVER,
        "server_args:ServerArgs.launch_command",
        "read",
        "the command line that is told is ours, without keys",
        check=lambda found: reads_attributes("_launch_command")(found.fget),
    ),
    relies_on(
        SERVER,
        "utils.common:set_prometheus_multiproc_dir",
        "read",
        "keeps the folder of metrics in its module: a fork must not remove it",
        "",
        reads_global("prometheus_multiproc_dir"),
    ),
    relies_on(
        SERVER,
        "utils.common:_get_fastapi_request_path",
        "replace",
        "a path that a client made up is no label of a counter",
        "request",
    ),
    relies_on(
        SERVER,
        "utils.common:add_prometheus_track_response_middleware",
        "read",
        "asks for a request's endpoint, and then for its method",
        check=_asks_for_the_endpoint,
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.protocol:ResponsesRequest.to_sampling_params",
        "replace",
        "a limit of output tokens is what the client gets",
        "default_max_tokens default_params stop tool_call_constraint",
        reads_attributes("max_output_tokens"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_responses:OpenAIServingResponses.create_responses",
        "replace",
        "no response takes a stored one's place",
        "request raw_request",
        reads_attributes("request_id response_store"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_responses:OpenAIServingResponses.__init__",
        "replace",
        "stored responses, and the conversations before them, are bounded",
        "tokenizer_manager template_manager enable_prompt_tokens_details tool_server",
        reads_attributes("response_store msg_store"),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_responses:OpenAIServingResponses._response_input_history",
        "replace",
        "a conversation goes on though the response before was let go meanwhile",
        "request",
        reads_attributes("msg_store previous_response_id"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_grammar_manager",
        "override",
        "what is kept of compiled grammars is bounded",
        "",
        reads_attributes("GrammarManager grammar_manager"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.base_grammar_backend:BaseGrammarBackend.get_cached_or_future_value",
        "read",
        "asks the mapping of compiled grammars, which is ours, by get",
        "key require_reasoning",
        reads_attributes("cache get"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.base_grammar_backend:BaseGrammarBackend.set_cache",
        "read",
        "puts compiled grammars into that mapping",
        "key value",
        reads_attributes("cache"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.xgrammar_backend:XGrammarGrammar.copy",
        "read",
        "keeps the compiled grammar, whose size counts, as ctx",
        "",
        reads_attributes("ctx"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.xgrammar_backend:XGrammarGrammarBackend.dispatch_regex",
        "read",
        "compiles with grammar_compiler, whose own cache is given a limit",
        "key_string",
        reads_attributes("grammar_compiler compile_regex"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.reasoner_grammar_backend:ReasonerGrammarBackend._init_value_dispatch",
        "read",
        "compiles with the backend that it has as grammar_backend, and keeps what is around it",
        "key reasoning",
        reads_attributes("grammar_backend"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.reasoner_grammar_backend:ReasonerGrammarBackend._make_grammar_object",
        "read",
        "what bounds a request's thoughts, which it has where there is a filter",
        "grammar reasoning",
        reads_attributes("enable_token_filter _token_filter_fn"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager._handle_open_session_req_output",
        "override",
        "why a session could not be opened is for its client",
        "recv_obj",
        reads_attributes("session_futures set_result"),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:app",
        "read",
        "lists its routes, of which the websockets are taken away: no key is asked of them",
        check=lambda app: isinstance(app.router.routes, list),
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_responses:OpenAIServingResponses.responses_full_generator",
        "replace",
        "what the engine refuses keeps its status",
        "request sampling_params result_generator context model_name tokenizer request_metadata created_time "
        "require_reasoning output_items",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._process_logprobs_tokens",
        "replace",
        "gives each token of a stream's event its own alternatives",
        "logprobs use_token_index",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._generate_stream_content",
        "replace",
        "sends log-probabilities with the text of their tokens",
        "content index request stream_offsets reasoning_parser_dict parser_dict has_tool_calls choice_logprobs "
        "finish_reason_type continuous_usage_stats prompt_tokens reasoning_tokens completion_tokens",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._generate_chat_stream",
        "replace",
        "ends with the reason and then the usage; the messages route begins with the first usage that it sees",
        "adapted_request request raw_request",
    ),
    relies_on(
        SERVER,
        "entrypoints.anthropic.serving:AnthropicServing.handle_count_tokens",
        "replace",
        "a conversation of no messages is the client's mistake; a long one is counted beside the event loop",
        "request raw_request",
    ),
    relies_on(
        SERVER,
        "entrypoints.anthropic.serving:AnthropicServing._convert_to_chat_completion_request",
        "replace",
        "raises ValueError for `adaptive` thoughts of a model without any, and changes nothing before",
        "anthropic_request",
    ),
    relies_on(
        SERVER,
        "entrypoints.anthropic.serving:AnthropicServing._error_response",
        "replace",
        "answers while the exception that it is about is handled",
        "status_code error_type message exception_name",
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:_execute_server_warmup",
        "replace",
        "asks the module's `kill_process_tree`, ours, where its first request is not answered",
        check=reads_global("kill_process_tree"),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:_freeze_gc_after_server_warmup",
        "replace",
        "asks the server itself, which may not listen yet where it makes no first request",
        "server_args",
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:_wait_and_warmup",
        "read",
        "calls the module's `_freeze_gc_after_server_warmup`, ours, before it says that the server is ready",
        check=reads_global("_freeze_gc_after_server_warmup"),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:lifespan",
        "replace",
        "serves these routes with what the module calls `OllamaServing` and `OpenAIServingDetokenize`, ours",
        check=lambda f: reads_attributes("OllamaServing OpenAIServingDetokenize")(inspect.unwrap(f)),
    ),
    *(
        relies_on(SERVER, f"entrypoints.ollama.serving:OllamaServing.{method}", "override", why, parameters)
        for method, why, parameters in (
            ("_convert_options_to_sampling_params", "maps seeds and answers without a limit", "options"),
            ("handle_chat", "SGLang's passes on what is no list of token ids", "request raw_request"),
            ("handle_generate", "converts its options, where we put `format`", "request raw_request"),
            *(
                (
                    f"_{form}_{route}_response",
                    "tells the whole text and why it ended",
                    "gen_request raw_request model_name",
                )
                for form in ("generate", "stream")
                for route in ("chat", "generate")
            ),
        )
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_base:OpenAIServingBase._validate_request",
        "override",
        "its text is the answer to token ids that no tokenizer takes",
        "_",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_base:OpenAIServingBase.handle_request",
        "read",
        "asks for that text before anything else",
        check=reads_attributes("_validate_request create_error_response"),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_server:health_generate",
        "read",
        "asks for a generation and takes any sign of the engine, also while it is paused",
        "request",
        reads_attributes("last_receive_tstamp"),
    ),
    relies_on(
        SERVER,
        "entrypoints.http_request_decompression:RequestDecompressionMiddleware",
        "replace",
        "is found by its name among the middleware, and taken away for a bounded one",
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.create_abort_task",
        "override",
        "the end of a stream ends no other request with its id; one for an Ollama stream",
        "obj",
    ),
    *(
        relies_on(SERVER, target, "replace", why, parameters)
        for target, why, parameters in (
            (
                "managers.tokenizer_manager:TokenizerManager._tokenize_texts",
                "long texts become tokens beside the event loop, and it waits for nothing",
                "texts is_cross_encoder",
            ),
            (
                "entrypoints.openai.serving_chat:OpenAIServingChat._convert_to_internal_request",
                "long chats become prompts beside the event loop",
                "request raw_request",
            ),
            (
                "entrypoints.openai.serving_responses:OpenAIServingResponses._make_request",
                "long responses' chats become prompts beside the event loop, and it waits for nothing",
                "request prev_response tokenizer",
            ),
            *(
                (
                    f"entrypoints.openai.serving_tokenize:OpenAIServing{name}._handle_non_streaming_request",
                    "answers long requests beside the event loop, and waits for nothing",
                    "adapted_request request raw_request",
                )
                for name in ("Tokenize", "Detokenize")
            ),
        )
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat.handle_request",
        "replace",
        "makes a prompt of a chat request by one method, once",
        "request raw_request",
        reads_attributes("_convert_to_internal_request"),
    ),
    *(
        relies_on(
            SERVER,
            f"entrypoints.anthropic.serving:AnthropicServing.{method}",
            "replace",
            "makes a prompt of a message by the chat's method, once",
            "chat_request anthropic_request raw_request",
            reads_attributes("openai_serving_chat _convert_to_internal_request"),
        )
        for method in ("_handle_non_streaming", "_handle_streaming")
    ),
)
