"""An engine in which SGLang runs made-up requests through both models before it serves any."""

import interpreted
from interpreted import Oracle, ask_all
from noisy import noisy_copy
from windowed import F, S, save_windowed


def test_made_up_requests_change_nothing(start_nominal, tmp_path, triggers):
    """Some of the models' layers have sliding windows."""
    target = save_windowed(tmp_path / "target", (F, S, S, F))
    draft = noisy_copy(target, tmp_path / "draft", 0.02)
    flags = *interpreted.FLAGS, "--disable-cuda-graph", "--max-running-requests", "4"
    server = start_nominal(target, draft, *flags, script="nominal_tuned.py")
    expected = Oracle(target, draft, triggers)
    for name, answer in ask_all(server, ["dense", "drafting"]).items():
        expected.check(name, answer)
    engine = server.engine()
    assert engine["open_accounts"] == engine["kv_pool"]["depth_pages"]["held"] == 0
