"""A server with known delays that speaks the routes which the bench uses. Run as a process of its own.

python fake_server.py ENGINE --port N [--first S] [--each S] [--lie WHAT]
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

parser = argparse.ArgumentParser()
parser.add_argument("engine", choices=["sglang", "fathom"])
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--first", type=float, default=0.0)
parser.add_argument("--each", type=float, default=0.0)
parser.add_argument("--lie", default="")
parser.add_argument("--model", default="")
parser.add_argument("--preset", default="exact")
args = parser.parse_args()

SCHEDULER = "sglang.Scheduler" if args.lie == "stock scheduler" else "fathom.runtime.host.FathomScheduler"
served = 0
earlier: dict[str, list[list[int]]] = {}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])


async def health(request):
    return PlainTextResponse("")


async def server_info(request):
    return JSONResponse({"version": "0.5.20", "attention_backend": "torch_native", "secret": 1})


async def fathom_info(request):
    requests = 0 if args.lie == "idle worker" else served
    engine = {"scheduler": SCHEDULER, "worker": "fathom.runtime.host.W", "steps": {"requests": requests}}
    engine |= {"pid": os.getpid(), "device": "NVIDIA H200", "draft": {"model": args.model}}
    engine |= {"fastkv": {"tsp_layer": 1}, "slow_fast": {"sink": 2, "recent": 3, "selected": 4}}
    return JSONResponse({"engine": [engine], "policy": {}, "versions": {}})


def report(body, common):
    """Half of the prompt is kept when a policy, or else the server's own, asks for anything."""
    n = len(body["prompt"])
    policy = body.get("fathom") or {"preset": args.preset}
    kept = n // 2 if policy != {"preset": "exact"} and args.lie != "silent fallback" else n
    tokens = {"prompt_tokens": n, "kept_tokens": kept, "kv_bytes": kept, "kv_bytes_dense": n}
    cached = common if args.lie != "no cache" else 0
    cached = n if args.lie == "cached" else cached
    return {**tokens, "cached_tokens": cached, "fast_steps": 0, "draft_read_tokens": 0, "draft_tokens": 0}


def cache_of(body):
    """Policies that differ in their decoding alone leave the same KV."""
    if args.lie == "one cache":
        return ""
    kept = {name: value for name, value in body.get("fathom", {}).items() if name != "decode"}
    return json.dumps([kept, body.get("cache_salt")])


def common_with_earlier(body):
    """Tokens at the beginning that some earlier prompt under this policy began with too."""
    found, prompt = 0, body["prompt"]
    for other in earlier.get(cache_of(body), []):
        same = next((i for i, (a, b) in enumerate(zip(other, prompt, strict=False)) if a != b), len(other))
        found = max(found, same)
    return found


async def stream(body, common):
    count = body["max_tokens"]
    for i in range(count):
        await asyncio.sleep(args.each if i else args.first)
        ends = args.engine == "fathom" and i == count - 1 and args.lie != "no report"
        last = {"fathom": report(body, common)} if ends else {}
        yield f"data: {json.dumps({'choices': [{'text': f' w{i}'}], **last})}\n\n"
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


async def models(request):
    if args.lie == "a key" and request.headers.get("authorization") != "Bearer secret":
        return PlainTextResponse("", status_code=401)
    return JSONResponse({"data": [{"id": "theirs"}]})


async def model_info(request):
    return JSONResponse({"model_path": args.model})


async def completions(request):
    global served
    served += 1
    body = await request.json()
    print(f"of {body['model']}", flush=True)
    print(f"asked {len(body['prompt'])}", flush=True)
    if args.lie == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    common = common_with_earlier(body)
    earlier.setdefault(cache_of(body), []).append(body["prompt"])
    return StreamingResponse(stream(body, common), media_type="text/event-stream")


async def flush(request):
    print("forgot", flush=True)
    earlier.clear()
    return PlainTextResponse("")


routes = [
    Route("/flush_cache", flush, methods=["POST"]),
    Route("/health", health),
    Route("/server_info", server_info),
    Route("/v1/models", models),
    Route("/model_info", model_info),
    Route("/v1/completions", completions, methods=["POST"]),
]
if args.engine == "fathom":
    routes.append(Route("/fathom/info", fathom_info))
uvicorn.run(Starlette(routes=routes), port=args.port, log_level="error")
