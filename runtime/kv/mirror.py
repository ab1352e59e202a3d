"""The page tables of the KV memory on the device, kept up to date a few numbers at a time.

The host decides which page is whose. What a step reads follows from that and from lengths alone, so a device that
has the tables can write a step's lists of slots itself (``kernels/span_tables.py``): what the host sends per step
then grows with the pages that have changed, not with the length of contexts.
"""

from collections.abc import Iterable

import numpy as np
import torch

from fathom.kernels.span_tables import BLOCK
from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.kv.tables import Table
from fathom.runtime.staging import send


class PageMirror:
    """A copy of the shared map and of the private tables of some rows on a device.

    Changes are sent by :meth:`refresh`, in order with the work of the stream on which it is called: a step that was
    launched before goes on with the tables as they were.

    Attributes:
        backing: [spans, virtual pages + 1] int32, as the shared map's.
        directory: [spans, rows, blocks of the longest table] int32 numbers of blocks.
        blocks: [blocks, pages of one] int32 pages of private tables.
    """

    def __init__(
        self, memory: KvMemory, rows: int, longest: int, device: torch.device | str, block: int = BLOCK
    ) -> None:
        """
        Args:
            rows: of the engine's request table; longest: most tokens of a request.
            block: pages of a private table that lie together.
        """
        self.memory, self.device, self._block = memory, torch.device(device), block
        most = -(-longest // memory.page_size)
        shape = memory.spans, rows, -(-most // block)
        self._backing_at = int(np.prod(shape))
        self._blocks_at = self._backing_at + memory.shared.backing.size
        self._shape, self._most_blocks = shape, shape[2]
        self._held: dict[int, dict[int, list[int]]] = {}  # row -> span -> blocks
        self._free: list[int] = []
        self._flat = torch.zeros(self._blocks_at, dtype=torch.int32, device=self.device)
        self._add_blocks(memory.pool.total // block + memory.spans)
        # What is not backed stands as zeros already, which is most of a large pool.
        memory.shared.backed_since = [np.flatnonzero((memory.shared.backing != UNBACKED).any(0))]
        memory.on_close.append(self._close)

    def refresh(self, rows: Iterable[int]) -> None:
        """Send what has changed of the shared map, and of the private tables of these rows."""
        memory, places, values = self.memory, [], []
        if memory.shared.backed_since:
            virtual = np.unique(np.concatenate(memory.shared.backed_since))
            memory.shared.backed_since.clear()
            firsts = self._backing_at + np.arange(memory.spans) * memory.shared.backing.shape[1]
            places.append((firsts[:, None] + virtual).ravel())
            values.append(memory.shared.backing[:, virtual].ravel())
        for row in rows:
            for span, table in memory.tables.of(row).items():
                if table.mirrored < len(table.pages):
                    self._extend(row, span, table, places, values)
        if places:
            where = send(np.concatenate(places), self.device)
            self._flat[where] = send(np.concatenate(values).astype(np.int32), self.device)

    def _extend(
        self, row: int, span: int, table: Table, places: list[np.ndarray], values: list[np.ndarray]
    ) -> None:
        """The pages of a table that the device has not, and the blocks that they come to lie in."""
        held = self._held.setdefault(row, {}).setdefault(span, [])
        missing = -(-len(table.pages) // self._block) - len(held)
        if missing > 0:
            if missing > len(self._free):
                self._add_blocks(max(missing, len(self.blocks) // 4))
            fresh = self._free[-missing:]
            del self._free[-missing:]
            first = (span * self._shape[1] + row) * self._most_blocks + len(held)
            places.append(first + np.arange(missing))
            values.append(np.array(fresh))
            held += fresh
        page = np.arange(table.mirrored, len(table.pages))
        places.append(
            self._blocks_at + np.array(held)[page // self._block] * self._block + page % self._block
        )
        values.append(table.pages[table.mirrored :])
        table.mirrored = len(table.pages)

    def _add_blocks(self, count: int) -> None:
        known = (len(self._flat) - self._blocks_at) // self._block
        more = torch.zeros(count * self._block, dtype=torch.int32, device=self.device)
        self._flat = torch.cat([self._flat, more])
        self._free += range(known + count - 1, known - 1, -1)
        directory, backing, blocks = self._flat.tensor_split([self._backing_at, self._blocks_at])
        self.directory = directory.view(self._shape)
        self.backing = backing.view(self.memory.shared.backing.shape)
        self.blocks = blocks.view(-1, self._block)

    def _close(self, row: int) -> None:
        for blocks in self._held.pop(row, {}).values():
            self._free += blocks
