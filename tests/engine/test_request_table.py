"""The request table on a CPU is SGLang's, in memory that is taken where it is written to."""

import re
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from fathom.runtime.sglang_host.memory.request_table import RequestTable

CONTEXT = 1_000_004


def resident_mib() -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def test_a_table_takes_the_memory_of_what_is_in_it():
    before = resident_mib()
    table = RequestTable(2048, CONTEXT, "cpu", False)
    assert table.req_to_token.shape == (2049, CONTEXT)
    for row in table.alloc_rows(500):
        assert not table.req_to_token[row, :100].any()
        table.write((row, slice(0, 100)), torch.arange(100, dtype=torch.int32))
        assert table.req_to_token[row, :100].tolist() == list(range(100))
    assert resident_mib() - before < 64  # 7,816 are written where each row is zeroed


def test_it_is_otherwise_as_sglangs():
    ours, stock = (kind(7, 16, "cpu", False) for kind in (RequestTable, ReqToTokenPool))
    assert torch.equal(ours.req_to_token, stock.req_to_token)
    assert vars(ours).keys() == vars(stock).keys()
    assert ours.max_context_len == stock.max_context_len
    assert ours.req_to_token.dtype == stock.req_to_token.dtype


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages to refuse"
)
def test_the_engine_has_one(server):
    areas = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ rw-p.*?^Size:\s+(\d+) kB.*?^Rss:\s+(\d+) kB.*?^VmFlags:([a-z ]+)$",
        Path(f"/proc/{server.engine()['pid']}/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    whole = 2048 * 8192 * 4 / 1024
    own = [(int(size), int(resident)) for size, resident, flags in areas if "nh" in flags.split()]
    assert any(size >= whole and resident < whole / 4 for size, resident in own)
