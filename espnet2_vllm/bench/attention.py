"""Attention of decode steps on a GPU, kernel by kernel: ``python -m espnet2_vllm.bench.attention``.

For the heads of the released models and for batches of requests with one new row each it times vLLM's FlashAttention and Triton
kernels and every plan of ``engine.decode_attention``, and prints the fastest plans. Lengths are spread evenly over those that
requests go through between their prompt and their last row; pages lie in the cache at random; launches of several layers, whose
caches exceed what the device keeps, are one CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..engine.attention import Heads
from ..engine.decode_attention import Plan, Workspace, decode_attention, splits_for

HEADS = {"bagpiper-8b": Heads(32, 8, 128), "opuslm-7b": Heads(32, 32, 128), "opuslm-dialogue-1.7b": Heads(32, 32, 64)}
PAGE = 16
_COLD = 256 * 2**20  # bytes of cache that a graph reads at least, so that it finds none of them on the chip
_REPLAYS = 9
_TOLERANCE = 1e-2  # of bfloat16 results, against float32
_LAYOUTS = ("NHD", "HND")


class Batch(NamedTuple):
    """One new row for each request; ``layers`` holds keys and values [pages, rows of a page, KV heads, head size] of each."""

    heads: Heads
    queries: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    block_table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor

    @property
    def bytes(self) -> int:
        """Of keys and values that one layer must read."""
        return int(self.lengths.sum()) * self.heads.kv_heads * 2 * self.heads.head_size * self.queries.element_size()

    @property
    def scale(self) -> float:
        return self.heads.head_size**-0.5


def plans(heads: Heads) -> list[Plan]:
    """What is tried."""
    products = [
        Plan(True, tile, warps, stages)
        for tile, warps, stages in itertools.product((16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4))
        if tile * heads.head_size <= 2048 * warps and tile // 8 >= warps
    ]
    if heads.query_heads != heads.kv_heads:
        return products
    sums = [
        Plan(False, tile, warps, stages)
        for tile, warps, stages in itertools.product((8, 16, 32, 64), (1, 2, 4, 8), (1, 3))
        if 256 * warps <= tile * heads.head_size <= 1024 * warps
    ]
    return [*sums, *products]


def make_batch(
    heads: Heads, requests: int, prompt: int, output: int, *, layout: str = "NHD", seed: int = 0, device: str = "cuda"
) -> Batch:
    """Random rows in bfloat16.

    Args:
        layout: order of a page in memory: rows, then heads (NHD), or the other way round.
    """
    rng = random.Random(seed)
    lengths = [prompt + 1 + (output - 1) * index // max(requests - 1, 1) for index in range(requests)]
    rng.shuffle(lengths)
    counts = [math.ceil(length / PAGE) for length in lengths]
    pages = list(range(sum(counts)))
    rng.shuffle(pages)
    table = torch.zeros(requests, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor(pages[:count])
        del pages[:count]
    torch.manual_seed(seed)
    shape = (sum(counts), PAGE, heads.kv_heads, 2 * heads.head_size)
    page = math.prod(shape) * 2
    layers = []
    for _ in range(max(2, min(32, math.ceil(_COLD / page)))):
        cache = torch.randn(shape if layout == "NHD" else [shape[i] for i in (0, 2, 1, 3)], device=device).bfloat16()
        layers.append((cache if layout == "NHD" else cache.transpose(1, 2)).split(heads.head_size, dim=-1))
    queries = torch.randn(requests, heads.query_heads, heads.head_size, device=device).bfloat16()
    return Batch(
        heads,
        queries,
        layers,
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.arange(requests + 1, dtype=torch.int32, device=device),
    )


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]  # writes its first argument, given keys and values


def own_kernel(batch: Batch, plan: Plan | None) -> Kernel:
    space = Workspace(len(batch.lengths), *batch.heads, batch.queries.device)

    def run(out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        table = (batch.block_table, batch.lengths, batch.starts)
        decode_attention(out, batch.queries, keys, values, *table, batch.scale, space, plan)

    return run


def triton_kernel(batch: Batch) -> Kernel:
    """vLLM's, as its TRITON_ATTN backend calls it."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    heads, device = batch.heads, batch.queries.device
    few = 128 // heads.kv_heads
    parts = torch.empty(few, heads.query_heads, 16, heads.head_size, device=device)
    tops, totals = torch.empty_like(parts[..., 0]), torch.empty_like(parts[..., 0])

    def run(out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        unified_attention(
            q=batch.queries, k=keys, v=values, out=out, cu_seqlens_q=batch.starts, max_seqlen_q=1, seqused_k=batch.lengths,
            max_seqlen_k=batch.block_table.shape[1] * PAGE, softmax_scale=batch.scale, causal=True, window_size=(-1, -1),
            block_table=batch.block_table, softcap=0, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=few,
            num_par_softmax_segments=16, softmax_segm_output=parts, softmax_segm_max=tops, softmax_segm_expsum=totals,
        )  # fmt: skip

    return run


def flash_kernel(batch: Batch) -> Kernel:
    """FlashAttention 3 as vLLM calls it within CUDA graphs."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    heads, longest = batch.heads, batch.block_table.shape[1] * PAGE
    schedule = get_scheduler_metadata(
        batch_size=len(batch.lengths), max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=heads.query_heads,
        num_heads_kv=heads.kv_heads, headdim=heads.head_size, cache_seqlens=batch.lengths, cu_seqlens_q=batch.starts,
        page_size=PAGE, causal=True, num_splits=32,
    )  # fmt: skip

    def run(out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        flash_attn_varlen_func(
            q=batch.queries, k=keys, v=values, out=out, cu_seqlens_q=batch.starts, max_seqlen_q=1, seqused_k=batch.lengths,
            max_seqlen_k=longest, softmax_scale=batch.scale, causal=True, block_table=batch.block_table,
            scheduler_metadata=schedule, fa_version=3, num_splits=32,
        )  # fmt: skip

    return run


def exact(batch: Batch) -> torch.Tensor:
    """[requests, heads, head size] float32 of the first layer, by plain products."""
    keys, values = batch.layers[0]
    group = batch.heads.query_heads // batch.heads.kv_heads
    rows = []
    for row, length in enumerate(batch.lengths.tolist()):
        pages = batch.block_table[row, : math.ceil(length / PAGE)].long()
        key, value = (part[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for part in (keys, values))
        weights = (torch.einsum("hd,nhd->hn", batch.queries[row].float(), key) * batch.scale).softmax(1)
        rows.append(torch.einsum("hn,nhd->hd", weights, value))
    return torch.stack(rows)


def time_kernel(batch: Batch, kernel: Kernel, expected: torch.Tensor) -> float:
    """Seconds a layer.

    Raises:
        RuntimeError: if the result is another one than ``expected``.
    """
    out = torch.full_like(batch.queries, float("nan"))
    kernel(out, *batch.layers[0])
    error = ((out.float() - expected).norm() / expected.norm()).item()
    if not error < _TOLERANCE:
        raise RuntimeError(f"the result is off by {error:.2g} of its size")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in batch.layers:
            kernel(out, *layer)
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(batch.layers))
    return statistics.median(times[1:])


def compile_plans(work: Sequence[tuple[Heads, Plan]], requests: Sequence[int]) -> None:
    """Runs each once for each number of parts that these batches are cut in, so that Triton's cache on disk has it."""
    for heads, plan in work:
        for count in {splits_for(count, heads.kv_heads): count for count in requests}.values():
            batch = make_batch(heads, count, 1, 1)
            try:
                own_kernel(batch, plan)(torch.empty_like(batch.queries), *batch.layers[0])
            except Exception:  # noqa: BLE001 - said when its turn to be measured comes
                break
    torch.cuda.synchronize()


def measure(name: str, requests: Sequence[int], prompt: int, output: int) -> Iterator[dict[str, Any]]:
    """One dictionary for each number of requests, layout and kernel."""
    heads = HEADS[name]
    candidates: dict[str, Callable[[Batch], Kernel]] = {
        "FlashAttention 3": flash_kernel,
        "vLLM's Triton": triton_kernel,
    }
    for count, layout in itertools.product(requests, _LAYOUTS):
        batch = make_batch(heads, count, prompt, output, layout=layout)
        expected = exact(batch)
        own = {str(plan): (lambda batch, plan=plan: own_kernel(batch, plan)) for plan in plans(heads)}
        for label, make in {**candidates, **own}.items():
            try:
                seconds = time_kernel(batch, make(batch), expected)
            except Exception as error:  # noqa: BLE001 - a plan that the device cannot run is a result too
                yield {"model": name, "requests": count, "layout": layout, "kernel": label, "error": str(error)[:200]}
                continue
            yield {
                "model": name,
                "requests": count,
                "layout": layout,
                "kernel": label,
                "seconds": seconds,
                "bandwidth": batch.bytes / seconds,
            }


def best_plan(cells: Sequence[dict[str, Any]], layout: str) -> str:
    """The plan whose times, each over the fastest there was, have the least product over all numbers of requests."""
    times: dict[int, dict[str, float]] = {}
    for cell in cells:
        if cell["layout"] == layout and cell["kernel"].startswith("Plan") and "seconds" in cell:
            times.setdefault(cell["requests"], {})[cell["kernel"]] = cell["seconds"]
    common = set.intersection(*(set(found) for found in times.values()))
    return min(common, key=lambda plan: math.prod(found[plan] / min(found.values()) for found in times.values()))


def table(cells: Sequence[dict[str, Any]], peak: float) -> Iterator[str]:
    """Markdown: what vLLM has, and the best plan of each layout."""
    yield "| model | requests | layout | kernel | us a layer | GB/s | of peak |\n|---|---|---|---|---|---|---|"
    for name in dict.fromkeys(cell["model"] for cell in cells):
        mine = [cell for cell in cells if cell["model"] == name and "seconds" in cell]
        shown = {layout: best_plan(mine, layout) for layout in _LAYOUTS}
        for cell in mine:
            if cell["kernel"].startswith("Plan") and cell["kernel"] != shown[cell["layout"]]:
                continue
            figures = f"{cell['seconds'] * 1e6:.1f} | {cell['bandwidth'] / 1e9:,.0f} | {cell['bandwidth'] / peak:.0%}"
            yield f"| {name} | {cell['requests']} | {cell['layout']} | {cell['kernel']} | {figures} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(HEADS), help=f"of {', '.join(HEADS)}")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--lengths", type=int, nargs=2, default=[128, 256], metavar=("PROMPT", "OUTPUT"))
    parser.add_argument("--compilers", type=int, default=8, help="processes that compile at once")
    parser.add_argument("--peak", type=float, default=4.8e12, help="bytes a second of the device's memory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    work = [(HEADS[name], plan) for name in args.models for plan in plans(HEADS[name])]
    with ProcessPoolExecutor(args.compilers, get_context("spawn")) as pool:
        parts = [work[first :: args.compilers] for first in range(args.compilers)]
        for done in [pool.submit(compile_plans, part, args.requests) for part in parts]:
            done.result()
    cells = []
    for name in args.models:
        cells += measure(name, args.requests, *args.lengths)
        if args.json is not None:
            args.json.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    print("\n".join(table(cells, args.peak)))
    for cell in cells:
        if "error" in cell:
            print(f"- {cell['model']}, {cell['requests']}, {cell['layout']}: {cell['kernel']}: {cell['error']}")


if __name__ == "__main__":
    main()
