"""Batches that attention is measured on, what the measurement is held against, and which plan wins."""

import math

import pytest
import torch

from espnet2_vllm.bench.attention import HEADS, PAGE, best_plan, exact, make_batch, plans, table
from espnet2_vllm.engine.attention import Heads
from espnet2_vllm.engine.decode_attention import PLANS


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_requests_stand_everywhere_between_prompt_and_last_row(layout):
    batch = make_batch(Heads(4, 2, 32), 9, 20, 41, layout=layout, device="cpu")
    assert sorted(batch.lengths.tolist()) == list(range(21, 62, 5))
    used = [
        page for row, n in zip(batch.block_table, batch.lengths, strict=True) for page in row[: math.ceil(n / PAGE)]
    ]
    assert sorted(int(page) for page in used) == list(range(len(used)))  # each page is one request's
    assert batch.bytes == sum(range(21, 62, 5)) * 2 * 2 * 32 * 2
    keys, values = batch.layers[0]
    assert keys.shape == values.shape == (len(used), PAGE, 2, 32) and keys.stride() == values.stride()
    assert (keys.stride(1) > keys.stride(2)) == (layout == "NHD")


def test_what_kernels_are_held_against_is_attention():
    batch = make_batch(Heads(4, 2, 32), 3, 20, 40, device="cpu")
    found = exact(batch)
    keys, values = batch.layers[0]
    for row in range(3):
        pages = batch.block_table[row, : math.ceil(batch.lengths[row] / PAGE)].long()
        key, value = (
            part[pages].flatten(0, 1)[: batch.lengths[row]].float().transpose(0, 1) for part in (keys, values)
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            batch.queries[row].float()[:, None], key, value, enable_gqa=True
        )
        torch.testing.assert_close(found[row], expected[:, 0], rtol=1e-4, atol=1e-4)


def test_the_plans_in_use_are_among_those_that_are_tried():
    for heads in HEADS.values():
        tried = plans(heads)
        assert PLANS[heads.query_heads // heads.kv_heads, heads.head_size] in tried
        assert len(set(tried)) == len(tried)
        assert heads.query_heads == heads.kv_heads or all(plan.product for plan in tried)


def test_the_plan_that_is_near_the_best_everywhere_wins():
    times = {
        "Plan(a)": (1.0, 4.0),
        "Plan(b)": (1.5, 2.0),
        "Plan(c)": (1.2, 1.0),
        "vLLM's Triton": (0.5, 0.5),
        "Plan(d)": (0.9,),
    }
    cells = [
        {
            "model": "m",
            "requests": count,
            "layout": layout,
            "kernel": kernel,
            "seconds": seconds * 1e-6,
            "bandwidth": 1e12,
        }
        for layout in ("NHD", "HND")
        for kernel, found in times.items()
        for count, seconds in zip((64, 512), found, strict=False)
    ]
    cells.append({"model": "m", "requests": 64, "layout": "NHD", "kernel": "Plan(e)", "error": "out of resources"})
    assert best_plan(cells, "NHD") == "Plan(c)"  # d was not measured everywhere
    shown = "\n".join(table(cells, 4e12))
    assert "| m | 512 | HND | vLLM's Triton | 0.5 | 1,000 | 25% |" in shown and "| Plan(c) | 1.2 |" in shown
    assert "Plan(a)" not in shown and "Plan(e)" not in shown
