"""Attention of one new row a request over a paged cache (decoding), in Triton.

FlashAttention 3 pads the one query of a request, times the query heads that share a KV head, to a tile of 64 or more, and is
bound by that tile rather than by memory. Here a program takes one KV head of one request, or a part of its rows (split KV as in
Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Two ways to multiply: several query heads share the
loaded keys in a matrix product; for a single one there is nothing to share, and each position of a tile keeps a softmax of its
own until the end, so that no turn of the loop waits for other threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2E = 1.4426950408889634
_ROWS_OF_A_PRODUCT = 16  # the least that tensor cores take
_MAX_SPLITS = 16
_PROGRAMS = 1024  # that a device of some 130 multiprocessors is kept busy with


class Plan(NamedTuple):
    """How a shape is run.

    Attributes:
        product: by matrix products; else by sums.
        tile: cached rows at a time.
        warps, stages: of a program, and of its loop's pipeline.
    """

    product: bool
    tile: int
    warps: int
    stages: int


# Query heads a KV head, head size: the fastest of those that ``python -m espnet2_vllm.bench.attention`` tries, on an H200.
PLANS = {
    (1, 64): Plan(False, 8, 2, 3),
    (1, 128): Plan(True, 32, 4, 2),
    (4, 128): Plan(True, 64, 4, 2),
}


def plan_for(group: int, head_size: int) -> Plan:
    """That of the shape, or of the most similar one."""
    if (group, head_size) in PLANS:
        return PLANS[group, head_size]
    return PLANS[1, 64 if head_size <= 64 else 128] if group == 1 else PLANS[4, 128]


def fits(group: int, head_size: int) -> bool:
    """Whether the kernel has the shape: query heads a KV head, and the size of a head."""
    return 1 <= group <= _ROWS_OF_A_PRODUCT and head_size in (32, 64, 128)


def splits_for(requests: int, kv_heads: int) -> int:
    """Parts that the rows of a request are cut in, a power of 2. It follows the batch's size alone, which a CUDA graph fixes."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * requests * kv_heads <= _PROGRAMS:
        splits *= 2
    return splits


class Workspace:
    """Partial results of split requests, for all layers one after the other.

    Args:
        max_requests: in a step.
    """

    def __init__(self, max_requests: int, heads: int, kv_heads: int, head_size: int, device: torch.device) -> None:
        # Most where the batch is as large as its number of parts allows.
        counts = [requests * splits_for(requests, kv_heads) for requests in range(1, max_requests + 1)]
        split = [count for requests, count in enumerate(counts, 1) if count > requests]
        parts = max(split, default=0) * heads
        self.values = torch.empty(parts, head_size, dtype=torch.float32, device=device)
        self.tops = torch.empty(parts, dtype=torch.float32, device=device)
        self.totals = torch.empty(parts, dtype=torch.float32, device=device)


@triton.jit
def _part(length, split, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Tiles [begin, end) of a part."""
    tiles = tl.cdiv(length, TILE)
    share = tl.cdiv(tiles, SPLITS)
    begin = split * share
    return begin, tl.minimum(begin + share, tiles)


@triton.jit
def _addresses(table, tile, length, page_stride, slot_stride, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Where the rows of a tile lie, and which of them there are."""
    rows = tile * TILE + tl.arange(0, TILE)
    inside = rows < length
    pages = tl.load(table + rows // PAGE, mask=inside, other=0).to(tl.int64)
    return pages * page_stride + (rows % PAGE) * slot_stride, inside


@triton.jit
def shared_attention_kernel(
    out, part_values, part_tops, part_totals, queries, keys, values, block_table, lengths, starts, scale,
    out_stride, query_stride, table_stride, page_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One KV head of one request: grid (KV heads, requests, splits)."""
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts + request)
    if tl.load(starts + request + 1) == row:
        return  # fills a CUDA graph up
    length = tl.load(lengths + request)
    begin, end = _part(length, split, TILE, SPLITS)
    if begin >= end:
        return
    columns = tl.arange(0, HEAD)
    members = tl.arange(0, M)
    held = members < GROUP
    heads = head * GROUP + members
    query = tl.load(
        queries + row * query_stride + heads[:, None] * HEAD + columns[None, :], mask=held[:, None], other=0.0
    )
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    result = tl.zeros((M, HEAD), tl.float32)
    table = block_table + request * table_stride
    for tile in tl.range(begin, end, num_stages=STAGES):
        at, inside = _addresses(table, tile, length, page_stride, slot_stride, TILE, PAGE)
        at += head * head_stride
        key = tl.load(keys + at[None, :] + columns[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(values + at[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        result = tl.dot(weight.to(value.dtype), value, result * shrink[:, None], input_precision="ieee")
        top = higher
    if SPLITS == 1:
        place = out + row * out_stride + heads[:, None] * HEAD + columns[None, :]
        tl.store(place, (result / total[:, None]).to(out.dtype.element_ty), mask=held[:, None])
    else:
        parts = (row * tl.num_programs(0) * GROUP + heads) * SPLITS + split
        tl.store(part_values + parts[:, None] * HEAD + columns[None, :], result, mask=held[:, None])
        tl.store(part_tops + parts, top, mask=held)
        tl.store(part_totals + parts, total, mask=held)


@triton.jit
def single_attention_kernel(
    out, part_values, part_tops, part_totals, queries, keys, values, block_table, lengths, starts, scale,
    out_stride, query_stride, table_stride, page_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One query head of one request: grid (query heads, requests, splits)."""
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts + request)
    if tl.load(starts + request + 1) == row:
        return
    length = tl.load(lengths + request)
    begin, end = _part(length, split, TILE, SPLITS)
    if begin >= end:
        return
    columns = tl.arange(0, HEAD)
    query = tl.load(queries + row * query_stride + head * HEAD + columns).to(tl.float32) * scale
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, HEAD), tl.float32)
    table = block_table + request * table_stride
    for tile in tl.range(begin, end, num_stages=STAGES):
        at, inside = _addresses(table, tile, length, page_stride, slot_stride, TILE, PAGE)
        at += head // GROUP * head_stride
        key = tl.load(keys + at[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        value = tl.load(values + at[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        score = tl.sum(key.to(tl.float32) * query[None, :], 1)
        higher = tl.where(inside, tl.maximum(top, score), top)
        floor = tl.where(higher == -float("inf"), 0.0, higher)  # where a place has had no row yet
        weight = tl.where(inside, tl.exp2(score - floor), 0.0)
        shrink = tl.exp2(top - floor)
        total = total * shrink + weight
        result = result * shrink[:, None] + weight[:, None] * value.to(tl.float32)
        top = higher
    highest = tl.max(top, 0)
    weight = tl.exp2(top - highest)
    whole = tl.sum(total * weight, 0)
    summed = tl.sum(result * weight[:, None], 0)
    if SPLITS == 1:
        tl.store(out + row * out_stride + head * HEAD + columns, (summed / whole).to(out.dtype.element_ty))
    else:
        part = (row * tl.num_programs(0) + head) * SPLITS + split
        tl.store(part_values + part * HEAD + columns, summed)
        tl.store(part_tops + part, highest)
        tl.store(part_totals + part, whole)


@triton.jit
def combine_attention_kernel(
    out, part_values, part_tops, part_totals, lengths, starts, out_stride,
    HEAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sums up the parts of one query head of one request: grid (query heads, requests)."""
    head, request = tl.program_id(0), tl.program_id(1)
    row = tl.load(starts + request)
    if tl.load(starts + request + 1) == row:
        return
    columns, splits = tl.arange(0, HEAD), tl.arange(0, SPLITS)
    begin, end = _part(tl.load(lengths + request), splits, TILE, SPLITS)
    there = begin < end
    parts = (row * tl.num_programs(0) + head) * SPLITS + splits
    tops = tl.load(part_tops + parts, mask=there, other=-float("inf"))
    weight = tl.exp2(tops - tl.max(tops, 0))
    total = tl.sum(tl.load(part_totals + parts, mask=there, other=0.0) * weight, 0)
    value = tl.load(part_values + parts[:, None] * HEAD + columns[None, :], mask=there[:, None], other=0.0)
    result = tl.sum(value * weight[:, None], 0) / total
    tl.store(out + row * out_stride + head * HEAD + columns, result.to(out.dtype.element_ty))


def decode_attention(
    out: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    workspace: Workspace,
    plan: Plan | None = None,
    splits: int | None = None,
) -> None:
    """Writes ``out`` for requests with one new row each, which is in the cache already, or none.

    Args:
        out, queries: [rows, heads, head size], a row's heads one after the other.
        keys, values: [pages, rows of a page, KV heads, head size], with the same strides, of which the last is 1.
        block_table: [requests, pages] int32.
        lengths: [requests] int32 rows in the cache.
        starts: [requests + 1] int32 index of a request's row; two that are equal belong to a request without one.
        scale: of the scores, before their softmax.
        plan, splits: for measurements; by default those of the shape and the batch.
    """
    heads, head_size = queries.shape[1:]
    kv_heads, requests = keys.shape[2], len(lengths)
    group = heads // kv_heads
    plan = plan or plan_for(group, head_size)
    splits = splits or splits_for(requests, kv_heads)
    parts = (workspace.values, workspace.tops, workspace.totals)
    kernel, across = (shared_attention_kernel, kv_heads) if plan.product else (single_attention_kernel, heads)
    kernel[(across, requests, splits)](
        out, *parts, queries, keys, values, block_table, lengths, starts, scale * _LOG2E,
        out.stride(0), queries.stride(0), block_table.stride(0), *keys.stride()[:3],
        GROUP=group, HEAD=head_size, PAGE=keys.shape[1], TILE=plan.tile, SPLITS=splits, M=_ROWS_OF_A_PRODUCT,
        STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    if splits > 1:
        combine_attention_kernel[(heads, requests)](
            out, *parts, lengths, starts, out.stride(0), HEAD=head_size, TILE=plan.tile, SPLITS=splits, num_warps=2
        )
