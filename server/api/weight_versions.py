"""``metadata`` of chats and completions: text alone, as OpenAI's clients have it, while the weights stay the same.

SGLang also lists there which tokens came of which weights. A list is no OpenAI ``metadata``: clients that check an
answer refuse it, and others warn of it.
"""

from typing import Any


def install() -> None:
    """Let chats and completions make it by ours."""
    from sglang.srt.entrypoints.openai import serving_chat, serving_completions

    for module in (serving_chat, serving_completions):
        module.build_endpoint_weight_version_metadata = metadata_of


def metadata_of(meta_info: dict[str, Any]) -> dict[str, Any]:
    """The version of an answer's weights; a list of all only where they were changed while it was made."""
    versions = meta_info.get("weight_versions", ())
    told = {"weight_version": meta_info["weight_version"]}
    return told | {"weight_versions": versions} if len(versions) > 1 else told
