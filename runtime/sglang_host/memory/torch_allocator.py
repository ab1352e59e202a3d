"""Paged KV-slot allocation without Triton: on a CPU, and of virtual slots on any device."""

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from fathom.runtime.staging import send


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator without its two Triton kernels.

    A slot is ``page * page_size + offset``. Page 0 is SGLang's dummy page and never handed out. Which token comes
    to lie where follows from lengths, which the host knows: the device looks up what it alone knows, the slots of
    last tokens and the ids of free pages.
    """

    free_pages: torch.Tensor
    _list: torch.Tensor  # of all pages, whose end the free ones are

    def clear(self) -> None:
        super().clear()
        self._list = self.free_pages

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """Free these pages, in the places of as many that were handed out: SGLang writes the whole list anew, for
        each request that ends and each leaf of the prefix cache that goes."""
        if self.need_sort:
            super()._release_page_ids(*page_ids)
            return
        end = len(self._list) - len(self.free_pages)
        for ids in reversed(page_ids):
            begin = end - len(ids)
            assert begin >= 0, "more pages were given back than there are"
            self._list[begin:end] = ids
            end = begin
        self.free_pages = self._list[end:]

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for the tokens ``prefix_lens[i] .. seq_lens[i] - 1`` of each request, concatenated.

        Args:
            prefix_lens, seq_lens: [batch] int64, tokens already held and tokens afterwards.
            last_loc: [batch] integers, slot of the last token held, -1 for none.
            extend_num_tokens: sum of ``seq_lens - prefix_lens``.

        Returns:
            [extend_num_tokens] int64 slots, or None when the pool has too few free pages.
        """
        return self.slots_behind(prefix_lens_cpu.cpu().numpy(), seq_lens_cpu.cpu().numpy(), last_loc)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per request, for the token at position ``seq_lens[i] - 1``; arguments as alloc_extend."""
        after = seq_lens_cpu.cpu().numpy()
        if ((after - 1) % self.page_size).all():
            return last_loc.long() + 1
        return self.slots_behind(after - 1, after, last_loc)

    def slots_behind(
        self, before: np.ndarray, after: np.ndarray, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Slots for the tokens ``before[i] .. after[i] - 1``, as alloc_extend has them."""
        size, counts = self.page_size, after - before
        held = -(-before // size)
        fresh = -(-after // size) - held
        free = self._take(int(fresh.sum()))
        if free is None:
            return None
        owner = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(owner)) + (before - np.cumsum(counts) + counts)[owner]
        page, offset = np.divmod(position, size)
        inside = page < held[owner]  # a page that the request has
        first = len(counts) + np.cumsum(fresh) - fresh - held
        told = (
            np.where(inside, owner, first[owner] + page),
            np.where(inside, position - before[owner] + 1, offset),
        )
        source, further = send(np.stack(told), self.device)
        return torch.cat([last_loc.long(), free * size])[source] + further

    def _take(self, pages: int) -> torch.Tensor | None:
        """[pages] int64 from the front of the free ones; None where there are too few."""
        if pages > len(self.free_pages):
            self.merge_and_sort_free()
        if pages > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return taken
