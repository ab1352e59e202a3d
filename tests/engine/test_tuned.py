"""An engine in which SGLang runs made-up requests through both models before it serves any."""

import interpreted
from interpreted import Oracle, ask_all


def test_made_up_requests_change_nothing(start_nominal, tiny_model, close_draft, triggers):
    flags = *interpreted.FLAGS, "--disable-cuda-graph", "--max-running-requests", "4"
    server = start_nominal(tiny_model, close_draft, *flags, script="nominal_tuned.py")
    expected = Oracle(tiny_model, close_draft, triggers)
    for name, answer in ask_all(server, ["dense", "drafting"]).items():
        expected.check(name, answer)
    engine = server.engine()
    assert engine["open_accounts"] == engine["kv_pool"]["depth_pages"]["held"] == 0
