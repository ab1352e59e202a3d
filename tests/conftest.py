"""Fixtures shared by all tests: tiny random models, and servers, new processes or forks of a template."""

import contextlib
import fcntl
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from forked import LEAVING, READ_LATE, Forked, Template, await_ends
from httpx._transports import default as transports
from hypothesis import settings

from fathom.benchmarks.servers import free_port
from fathom.runtime.sglang_host import imports
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()  # transformers imports torchvision too

# A shell starts background commands with Ctrl-C ignored, and children inherit that; ours are to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every client loads all certificates, 25 ms, to ask this machine without them.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

# The same examples in every run, however busy the machine is. To look for others:
# make test ARGS="tests/runtime --hypothesis-profile=default --hypothesis-seed=random"
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO_TARGET = REPOSITORY / "demo" / "models" / "target"
START_SECONDS = 300
OVERLAPPING = REPOSITORY / "tests" / "engine" / "overlapping.py"
COMPARED = REPOSITORY / "tests" / "engine" / "compared.py"
THREADS = "1" if "PYTEST_XDIST_WORKER" in os.environ else os.environ.get("OMP_NUM_THREADS", "2")
"""Of each server: workers that share a machine leave each other a core."""


def environment() -> dict[str, str]:
    """Of a server. Threads that wait for others sleep: one that spins takes the core from whom it waits for."""
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": THREADS}


@contextlib.contextmanager
def turn(name: str, alone: bool):
    """Hold a lock that tests of other workers share, unless this one is to run alone.

    Who waits to be alone holds the gate, so that the others cannot take turns for ever.
    """
    base = Path(tempfile.gettempdir()) / f"pytest-{name}"
    with base.with_suffix(".gate").open("w") as gate, base.with_suffix(".lock").open("w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


TOGETHER = {
    "shared": (
        *("test_depth_pages.py", "test_parity.py", "test_seeds.py"),
        *("test_slow_fast.py", "test_speed.py", "test_storm.py"),
    ),
    "nominal": (
        *("test_flashinfer_engine.py", "test_lora.py", "test_triton_engine.py"),
        *("test_tuned.py", "test_two_gpus.py"),
    ),
}
"""Files of the engine's tests that use the same servers, or forks of one process: one worker runs them all. Another
runs all ``test_http*``."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """What is sent to one worker as a whole: a file, or the files that share servers."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if Path(file).name.startswith("test_http"):
                return "http"
            scopes = (scope for scope, files in TOGETHER.items() if Path(file).name in files)
            return next(scopes, file)

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Most of it is imports."""
    with imports.uncollected():
        return (yield)


def pytest_sessionfinish():
    await_ends()
    gc.unfreeze()  # libraries complain of what is left when a process ends


def in_turn(item, alone: bool):
    run = getattr(item.config, "workerinput", {}).get("testrunuid")
    return turn(run, alone) if run else contextlib.nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """What a test draws at random does not depend on which tests its worker ran before."""
    with in_turn(item, alone=False):
        torch.manual_seed(0)
        return (yield)


@contextlib.contextmanager
def without_collections():
    """Spare what lives now the collector's visits: after thousands of tests, one holds every thread for long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Tests marked `alone` compare clocks: meanwhile no other worker runs a test or starts a server."""
    alone = item.get_closest_marker("alone") is not None
    with in_turn(item, alone), without_collections() if alone else contextlib.nullcontext():
        return (yield)


@dataclass
class Server:
    """One running server process."""

    process: subprocess.Popen | Forked
    url: str
    log: Path

    @functools.cached_property
    def client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=self.url, timeout=120, limits=limits, verify=False)

    @property
    def openai(self):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    def engine(self) -> dict:
        """What the scheduler process says of itself."""
        return self.client.get("/fathom/info").json()["engine"][0]

    def series(self, prefix: str = "fathom:") -> dict[str, float]:
        """Series of ``/metrics`` whose name begins so, by name and labels."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
        return {name: float(value) for name, value in pairs}

    def flush(self) -> None:
        """Empty the prefix cache; a request's last step may end after its answer has arrived, so it may wait."""
        answer = self.client.post("/flush_cache", params={"timeout": 30})
        assert answer.status_code == 200, answer.text

    def stop(self) -> int:
        """Stop by SIGTERM as a container runtime does; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """The exit code of a server that was told to stop; whatever is left of it ends."""
        try:
            return self.process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def new_process(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen:
    """A command, in a session of its own; what it says goes to the log."""
    with log.open("a") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def answering(server: Server) -> Server:
    """The server, once it answers a generation."""
    process, log = server.process, server.log
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if server.client.get("/health_generate").status_code == 200:
                return server
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.stop()
    raise RuntimeError(f"server did not answer in {START_SECONDS} s:\n{log.read_text()[-4000:]}")


@contextlib.contextmanager
def starter(folder: Path, meanwhile: bool = False):
    """A function that starts a server by its command, to which a free port is added; all end with the block.

    Args:
        meanwhile: at its end they are only told to, and have ended with the next block.
    """
    servers = []

    def run(command: list[str], env: dict[str, str] | None = None, start=new_process) -> Server:
        port = free_port()
        log = folder / f"{len(servers)}.log"
        log.touch()
        env = environment() | (env or {})
        process = start([*command, "--port", str(port)], log, env)
        server = Server(process, f"http://127.0.0.1:{port}", log)
        servers.append(server)  # one whose start is interrupted ends too
        return answering(server)

    try:
        yield run
    finally:
        await_ends()
        LEAVING.extend(server for server in servers if server.process.poll() is None)
        for server in LEAVING:
            server.process.send_signal(signal.SIGTERM)
        if not meanwhile:
            await_ends()


def command_of(script: Path | None) -> list[str]:
    """``fathom``, or a script in its place, without arguments."""
    return [sys.executable, *([str(script)] if script else ["-m", "fathom.server.cli"])]


def serve(run, template, model, *flags, env=None, script=None, stock=False) -> Server:
    """Start a server of a model, by a script of the tests or stock SGLang's if asked.

    A new process where imports read the environment, or ask a driver that does not survive a fork.
    """
    if stock:
        cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
        quiet = ["--sleep-on-idle", "--log-level", "warning"]
        sglang = [sys.executable, "-m", "fathom.benchmarks.stock_sglang", "--model-path", str(model)]
        return run([*sglang, *cpu, *quiet, *flags], env)
    arguments = ["serve", str(model), *flags]
    if set(env or ()) - READ_LATE or torch.cuda.is_available():
        return run([*command_of(script), *arguments], env)
    return run(arguments, env, functools.partial(template.start, script=script))


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """What servers are forks of; it ends with the session."""
    with Template(tmp_path_factory.mktemp("template"), environment()) as template:
        yield template


@pytest.fixture(scope="module")
def start_process(tmp_path_factory):
    """Start a server by its command: ``start_process(command, env=None)``. It ends with the test's file."""
    with starter(tmp_path_factory.mktemp("servers"), meanwhile=True) as run:
        yield run


@pytest.fixture(scope="module")
def start_server(start_process, template):
    """Start a server of a model: ``start_server(model, "--flag", ..., env=None, script=None, stock=False)``."""
    return functools.partial(serve, start_process, template)


@pytest.fixture(scope="session")
def share_server(tmp_path_factory, template):
    """As `start_server`, for the few servers that several files use: it ends with the session."""
    with starter(tmp_path_factory.mktemp("shared")) as run:
        yield functools.partial(serve, run, template)


TEXT_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "dtype": "float32",
}
"""The shape of small random models, in the words of their configurations."""


def save_random_model(folder: Path, family: str = "Llama", seed: int = 7, **changes: object) -> Path:
    """A small random model with the demo's tokenizer; untied and spread out, so that its logits differ.

    Args:
        family: prefix of the classes in Transformers.
        changes: to its config.
    """
    import json

    import transformers

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (DEMO_TARGET / name).exists():
            shutil.copy(DEMO_TARGET / name, folder / name)
    vocabulary = json.loads((DEMO_TARGET / "config.json").read_text())["vocab_size"]
    options = TEXT_MODEL | {"vocab_size": vocabulary, "eos_token_id": vocabulary - 1}
    config = getattr(transformers, f"{family}Config")(**options | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(config.dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random Llama in float32."""
    return save_random_model(tmp_path_factory.mktemp("tiny"))


def renewed(start):
    """A function: the server that was started last, or another where that has ended."""
    last = []

    def server() -> Server:
        if not last or last[0].process.poll() is not None:
            last[:] = [start()]
        return last[0]

    return server


@pytest.fixture(scope="session")
def tiny_server(share_server, tiny_model):
    return renewed(lambda: share_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "40000"))


@pytest.fixture(scope="module")
def server(tiny_server) -> Server:
    """The tiny model in float32 behind `fathom serve`, shared by the tests that need no server of their own.

    One that a file of tests has ended takes no other file along.
    """
    return tiny_server()
