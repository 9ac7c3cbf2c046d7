"""Attention of single rows against its definition in float64, over random heads, batches, caches and plans.

Runs natively where there is a GPU, elsewhere under Triton's interpreter (TRITON_INTERPRET=1): python attention_check.py SEED SEED
"""

import random
import sys

import torch

from espnet2_vllm.engine.decode_attention import Plan, Workspace, decode_attention, plan_for, splits_for

NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
# The interpreter multiplies bfloat16 wrongly.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3} | ({torch.bfloat16: 1e-2} if NATIVE else {})


def plan(rng, group):
    if rng.random() < 0.3:
        return None
    product = group > 1 or rng.random() < 0.5
    return Plan(
        product, rng.choice((16, 32, 64) if product else (8, 16, 32)), rng.choice((2, 4)), rng.choice((1, 2, 3))
    )


def cache(rng, pages, page, kv_heads, head_size, dtype):
    """Keys and values in either order of a page; what no request holds is not a number."""
    shape = (pages, page, kv_heads, 2 * head_size)
    if rng.random() < 0.5:
        return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    return torch.full((pages, kv_heads, page, 2 * head_size), float("nan"), dtype=dtype, device=DEVICE).transpose(1, 2)


def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(TOLERANCES))
    group, kv_heads, head_size = rng.choice((1, 2, 4, 7)), rng.choice((1, 2, 3)), rng.choice((32, 64, 128))
    page, requests = rng.choice((16, 32)), rng.randint(1, 6)
    lengths = [rng.choice((1, page, rng.randint(1, 5 * page))) for _ in range(requests)]
    counts = [-(-length // page) for length in lengths]
    pages = rng.sample(range(sum(counts) + 3), sum(counts))
    whole = cache(rng, sum(counts) + 3, page, kv_heads, head_size, dtype)
    keys, values = whole.split(head_size, dim=-1)
    table = torch.zeros(requests, max(counts) + 1, dtype=torch.int32, device=DEVICE)
    table[:] = pages[0]
    heads = group * kv_heads
    filled = rng.randint(0, 2)  # requests without a row, with which a CUDA graph is filled up
    # A slice of a wider product.
    queries = torch.randn(requests + filled, heads + 2, head_size, device=DEVICE).to(dtype)[:, :heads]
    queries[requests:] = float("nan")
    expected = torch.zeros(requests, heads, head_size, dtype=torch.float64, device=DEVICE)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, pages = pages[:count], pages[count:]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32, device=DEVICE)
        rows = torch.randn(length, kv_heads, 2 * head_size, device=DEVICE).to(dtype)
        for at in range(length):
            whole[mine[at // page], at % page] = rows[at]
        key, value = rows.double().repeat_interleave(group, 1).split(head_size, dim=-1)
        weights = (torch.einsum("hd,nhd->hn", queries[row].double(), key) * 0.1).softmax(1)
        expected[row] = torch.einsum("hn,nhd->hd", weights, value)
    lengths += [0] * filled
    starts = [*range(requests + 1), *[requests] * filled]
    table = torch.cat([table, table[:1].expand(filled, -1)])
    out = torch.full((requests + filled, heads, head_size), 7.0, dtype=dtype, device=DEVICE)
    chosen, splits = plan(rng, group), rng.choice((None, 1, 2, 4))
    space = Workspace(16 * len(lengths), heads, kv_heads, head_size, DEVICE)
    decode_attention(
        out, queries, keys, values, table, *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, starts)),
        0.1, space, chosen, splits,
    )  # fmt: skip
    error = ((out[:requests] - expected).norm() / expected.norm()).item()
    facts = (dtype, group, kv_heads, head_size, page, lengths, chosen or plan_for(group, head_size), splits)
    assert error < TOLERANCES[dtype], (error, facts)
    assert (out[requests:] == 7).all(), facts


def check_splits():
    """The workspace holds what any batch is cut in, for which its rows alone count."""
    for kv_heads in (1, 2, 8, 32):
        for most in (1, 7, 64, 512):
            space = Workspace(most, 4 * kv_heads, kv_heads, 64, torch.device("cpu"))
            for requests in range(1, most + 1):
                splits = splits_for(requests, kv_heads)
                assert splits == 1 or requests * splits * 4 * kv_heads <= len(space.tops), (kv_heads, most, requests)


if __name__ == "__main__":
    check_splits()
    first, last = map(int, sys.argv[1:])
    for seed in range(first, last):
        print(f"world {seed}", flush=True)
        check(seed)
    print(f"{last - first} worlds equal")
