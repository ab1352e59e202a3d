"""`fathom serve --demo` answers the README's question, over HTTP and with an unmodified client."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from fathom.kernels.bfloat16_cpu import has_bfloat16_products

EXAMPLES = Path(__file__).resolve().parents[2] / "demo" / "examples"
BODY = json.loads((EXAMPLES / "question.json").read_text())
ANSWER = (EXAMPLES / "answer.txt").read_text().strip()


@pytest.fixture(scope="module")
def demo(start_process):
    return start_process([sys.executable, "-m", "fathom.server.cli", "serve", "--demo"])


def test_the_readme_question_is_answered(demo):
    answer = httpx.post(f"{demo.url}/v1/chat/completions", json=BODY, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["usage"]["prompt_tokens"] > 1000
    assert answer["fathom"]["kept_tokens"] == answer["usage"]["prompt_tokens"]
    assert answer["fathom"]["decode_steps"] == answer["usage"]["completion_tokens"] - 1


def test_the_readme_client_works(demo):
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="fathom-demo", messages=BODY["messages"], temperature=0, stream=True
    )
    chunks = list(answer)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert any(getattr(chunk, "fathom", None) for chunk in chunks)


def test_json_of_a_schema_comes_to_its_end(demo):
    """The model knows no JSON: where the grammar lets it, it goes on with blanks."""

    class Owner(BaseModel):
        name: Literal["Lena", "Bob"]

    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    asked = {"model": "fathom-demo", "messages": BODY["messages"], "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.parse(**asked, response_format=Owner)
    assert answer.choices[0].message.parsed.name in ("Lena", "Bob")


def test_bfloat16_is_computed_as_the_processor_can(demo):
    """The demo is in bfloat16: its prompts go through the tiles of products, where there are any."""
    engine = httpx.get(f"{demo.url}/fathom/info").json()["engine"][0]
    assert engine["bfloat16_products"] == has_bfloat16_products()


def test_chunks_and_company_change_no_answer(start_process, template):
    """Chunks beside decode steps of others, most of a prompt from the prefix cache or none of it."""
    flags = ("--chunked-prefill-size", "200", "--enable-mixed-chunk")
    server = start_process(["serve", "--demo", *flags], start=template.start)

    def ask(_):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=120).json()
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(8))) == {ANSWER}
