"""Paged KV-slot allocation without Triton: on a CPU, and of virtual slots on any device."""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator with SGLang's own PyTorch allocation in place of its two Triton kernels.

    A slot is ``page * page_size + offset``. Page 0 is SGLang's dummy page and never handed out.
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
            last_loc: [batch] int64, slot of the last token held, -1 for none.
            extend_num_tokens: sum of ``seq_lens - prefix_lens``.

        Returns:
            [extend_num_tokens] int64 slots, or None when the pool has too few free pages.
        """
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        alloc_extend_naive(
            prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot per request, for the token at position ``seq_lens[i] - 1``; arguments as alloc_extend."""
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
        )
