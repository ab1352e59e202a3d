"""In place of ``flashinfer.BatchPrefillWithPagedKVCacheWrapper``: what its documentation says, in plain PyTorch.

``Ragged`` stands for ``BatchPrefillWithRaggedKVCacheWrapper``.

Strict: whatever it could not do, would do wrongly or would wait for the device for raises ``ValueError``. What the
real one reads when it runs (the list of slots) is read when this one runs, so that it may have changed.
"""

from itertools import pairwise

import torch

HALF = (torch.float16, torch.bfloat16)


class OnDevice(torch.Tensor):
    """A tensor that the host must not look at; what is made of it is one too."""

    def _seen(self, *_, **__):
        raise ValueError("the host waits for the device")

    item = tolist = numpy = cpu = __int__ = __bool__ = __len__ = __iter__ = _seen


def values(tensor):
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, OnDevice) else tensor


def check(holds, problem):
    if not holds:
        raise ValueError(problem)


class Planned:
    """What both have. Attributes: plans: the lengths of each plan; dtypes: of queries and KV that it takes."""

    dtypes, head_dims = HALF, (64, 128, 256)

    def __init__(self, workspace):
        check(workspace.dtype == torch.uint8 and workspace.dim() == 1, "workspace")
        self.workspace, self.plans = workspace, []

    def _keep(self, bounds, heads, *, head_dim_vo, causal, sm_scale, q_data_type, kv_data_type):
        for tensor in bounds:
            check(tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), "index lists")
            check(tensor.device.type == "cpu" and not isinstance(tensor, OnDevice), "plan would wait")
        rows, entries = (tensor.tolist() for tensor in bounds)
        check(len(rows) == len(entries) > 1, "numbers of segments")
        check(rows[0] == entries[0] == 0, "lists begin at 0")
        new, length = ([b - a for a, b in pairwise(ends)] for ends in (rows, entries))
        check(min(new) >= 0 and min(length) >= 0, "lengths")
        check(causal and all(n <= m for n, m in zip(new, length, strict=True)), "rows without entries")
        query_heads, kv_heads, head_dim = heads
        check(head_dim == head_dim_vo in self.head_dims and query_heads % kv_heads == 0, "heads")
        check(q_data_type == kv_data_type in self.dtypes, "types")
        self.plans.append((new, length))
        self.rows, self.entries = rows, entries
        self.shape, self.kv_shape = (query_heads, head_dim), (kv_heads, head_dim)
        self.dtype, self.scale = q_data_type, sm_scale

    def _attend(self, q, keys, found, slots, out):
        check(self.plans, "run before plan")
        check(q.shape == (self.rows[-1], *self.shape) == out.shape and q.stride(-1) == 1, "queries")
        check(keys.shape[1:] == found.shape[1:] == self.kv_shape and keys.stride() == found.stride(), "pool")
        check({x.dtype for x in (q, keys, found, out)} == {self.dtype} and out.is_contiguous(), "types")
        for rows, entries in zip(pairwise(self.rows), pairwise(self.entries), strict=True):
            own, read = slice(*rows), slots[slice(*entries)].long()
            new, length = rows[1] - rows[0], entries[1] - entries[0]
            group = self.shape[0] // self.kv_shape[0]
            k, v = (x[read].float().repeat_interleave(group, 1) for x in (keys, found))
            scores = torch.einsum("thd,nhd->htn", values(q)[own].float(), k) * self.scale
            seen = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[own] = torch.einsum("htn,nhd->thd", weights, v).to(out.dtype)
        return out


class Wrapper(Planned):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        seq_lens,
        **options,
    ):
        self._keep((qo_indptr, paged_kv_indptr), (num_qo_heads, num_kv_heads, head_dim_qk), **options)
        for tensor in (paged_kv_indices, paged_kv_last_page_len, seq_lens):
            check(tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), "index lists")
        on_host = paged_kv_last_page_len, seq_lens
        check(all(x.device.type == "cpu" and not isinstance(x, OnDevice) for x in on_host), "plan would wait")
        last, lengths = (tensor.tolist() for tensor in on_host)
        _, length = self.plans[-1]
        check(lengths == length, "lengths")
        check(page_size == 1 and last == [min(n, 1) for n in length], "last pages")
        check(paged_kv_indices.shape[0] == self.entries[-1], "as many slots as entries")
        self.slots = paged_kv_indices

    def run(self, q, paged_kv_cache, *, out):
        return self._attend(q, *(values(x) for x in paged_kv_cache), values(self.slots), out)


class Ragged(Planned):
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **options):
        self._keep((qo_indptr, kv_indptr), (num_qo_heads, num_kv_heads, head_dim_qk), **options)

    def run(self, q, k, v, *, out):
        check(k.shape[0] == v.shape[0] == self.entries[-1], "as many keys and values as entries")
        check(k.is_contiguous() and v.is_contiguous(), "in one piece")
        return self._attend(q, values(k), values(v), torch.arange(self.entries[-1]), out)
