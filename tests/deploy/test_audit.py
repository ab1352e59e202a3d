"""The audit of dependencies: which advisories fail it, and pip-audit against an advisory service of our own."""

import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("audit", ROOT / "requirements" / "audit.py")
audit = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(audit)

BAD, GOOD = "bad-thing", "good-thing"


def package(name, fixed):
    return {"name": name, "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": fixed}]}


def test_an_advisory_with_an_answer_fails():
    assert audit.judge([package("Some_Thing", ["1.1"])], set()) == (
        ["Some_Thing 1.0: PYSEC-1, fixed in 1.1"],
        True,
    )


def test_what_cannot_be_answered_here_is_listed():
    lines, failed = audit.judge([package("a", []), package("Some_Thing", ["1.1"])], {"some-thing"})
    assert not failed
    assert lines == [
        "a 1.0: PYSEC-1, no fixed version yet",
        "Some_Thing 1.0: PYSEC-1, fixed in 1.1; SGLang pins this one",
    ]


def test_the_pins_are_read_from_sglang():
    pins = audit.pinned_by_sglang()
    assert {"sglang", "torch", "transformers", "xgrammar"} <= pins and "fastapi" not in pins


@pytest.fixture
def service():
    """An advisory service with OSV's interface that knows of one vulnerability."""
    known = {
        "id": "PYSEC-2026-1",
        "summary": "Bad.",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": BAD},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
            }
        ],
    }

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps({"vulns": [known]} if asked["package"]["name"] == BAD else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()


def test_pip_audit_is_asked_and_understood(service, tmp_path):
    lock = tmp_path / "a.lock"
    lock.write_text(f"{BAD}==1.0\n{GOOD}==1.0\n")
    found = audit.ask(str(lock), "osv", ("--osv-url", service, "--cache-dir", str(tmp_path / "cache")))
    assert {entry["name"] for entry in found} == {BAD, GOOD}
    assert audit.judge(found, set()) == ([f"{BAD} 1.0: PYSEC-2026-1, fixed in 1.1"], True)


def test_no_service_is_not_a_clean_bill(tmp_path, monkeypatch, capsys):
    lock = tmp_path / "a.lock"
    lock.write_text(f"{BAD}==1.0\n")
    url = ("--osv-url", "http://127.0.0.1:9/v1/query")
    monkeypatch.setattr(audit, "SERVICES", ("osv",))
    ask = audit.ask
    monkeypatch.setattr(audit, "ask", lambda name, service: ask(name, service, url))
    assert audit.main([str(lock)]) == 0
    assert "NOT AUDITED" in capsys.readouterr().out
