"""Files of metrics without holes, which a full disk would make deadly."""

import errno
import os

import pytest
from prometheus_client import mmap_dict

from fathom.runtime.metric_files import AllocatedDict

ENTRIES = 1200
"""Of 1,000 bytes each: more than a new file has room for."""


def key(number):
    return f"{number:01000}"


def written(file):
    entries = mmap_dict.MmapedDict.read_all_values_from_file(str(file))
    return {int(name): value for name, value, _, _ in entries}


def test_no_file_has_holes(tmp_path):
    """Neither a new one nor one that has grown; a reader finds what was written."""
    file = tmp_path / "counter_1.db"
    values = AllocatedDict(str(file))
    assert os.stat(file).st_blocks * 512 >= mmap_dict._INITIAL_MMAP_SIZE
    for number in range(ENTRIES):
        values.write_value(key(number), number, 0.0)
    size = os.stat(file)
    assert size.st_size > mmap_dict._INITIAL_MMAP_SIZE and size.st_blocks * 512 >= size.st_size
    values.close()
    assert written(file) == {number: number for number in range(ENTRIES)}
    assert AllocatedDict(str(file)).read_value(key(7)) == (7.0, 0.0)


def test_what_a_full_disk_has_no_room_for_is_written_later(tmp_path, monkeypatch, caplog):
    file = tmp_path / "counter_1.db"
    values = AllocatedDict(str(file))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        for number in range(ENTRIES):
            assert values.read_value(key(number)) == (0.0, 0.0)
            values.write_value(key(number), 1.0, 0.0)
    assert 0 < len(written(file)) < ENTRIES
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    for number in range(ENTRIES):
        values.write_value(key(number), 2.0, 0.0)
    assert written(file) == dict.fromkeys(range(ENTRIES), 2.0)


@pytest.mark.parametrize("process", ["HTTP", "scheduler"])
def test_a_servers_files_have_no_holes(server, process):
    """The ones of both processes that write metrics."""
    pid = server.process.pid if process == "HTTP" else server.engine()["pid"]
    links = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    files = {os.readlink(link) for link in links if os.path.exists(link)}
    own = [os.stat(file) for file in files if file.endswith(f"_{pid}.db")]
    assert own and all(found.st_blocks * 512 >= found.st_size for found in own)
