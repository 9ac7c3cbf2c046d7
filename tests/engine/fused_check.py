"""The fused step against the plain one over random layouts, rules and batches.

Runs natively where there is a GPU, elsewhere under Triton's interpreter (TRITON_INTERPRET=1): python fused_check.py SEED SEED
"""

import copy
import pathlib
import random
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from fuzz.draws import layout_and_rules  # noqa: E402

from espnet2_vllm.engine.core import SpeechCore, SpeechWeights  # noqa: E402
from espnet2_vllm.engine.fused import FusedStep  # noqa: E402
from espnet2_vllm.protocol import TEXT  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, SLOTS, ROWS = 32, 6, 64


def build(rng):
    layout, make_rules = layout_and_rules(rng)
    torch.manual_seed(rng.getrandbits(31))
    weights = SpeechWeights(
        torch.randn(layout.vocab_size, HIDDEN, device=DEVICE),
        torch.randn(layout.vocab_size, HIDDEN, device=DEVICE),
        torch.randn(layout.num_streams, HIDDEN, device=DEVICE),
    )
    core = SpeechCore(layout, weights, num_slots=SLOTS, max_rows=ROWS, device=DEVICE)
    return layout, make_rules, weights, core


def check_embed(core, fused, rng):
    layout = core.layout
    core.history.random_(0, layout.vocab_size)
    core.history[torch.rand(core.history.shape, device=DEVICE) < 0.3] = 0
    counts = [rng.randint(1, 5) for _ in range(rng.randint(1, SLOTS))]
    slots = torch.tensor(rng.sample(range(SLOTS), len(counts)), device=DEVICE)
    positions = torch.cat([torch.arange(c) + rng.randint(0, ROWS - c) for c in counts]).to(DEVICE)
    ids = torch.randint(0, layout.vocab_size, (sum(counts),), device=DEVICE)
    expected = core.embed(ids, slots.repeat_interleave(torch.tensor(counts, device=DEVICE)), positions)
    out = torch.zeros(sum(counts), HIDDEN, device=DEVICE)
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    fused.embed(out, ids.to(torch.int32), positions, slots.to(torch.int32), starts)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def check_warm_up(core, weights):
    """It compiles, or runs, all there is, and leaves no trace."""
    tables = (core.history, core.phases.table.ints, core.phases.table.floats)
    before = [table[:SLOTS].clone() for table in tables]
    FusedStep(core, weights, SLOTS).warm_up(lambda hidden: hidden @ weights.head.t())
    assert all(torch.equal(table[:SLOTS], saved) for table, saved in zip(tables, before, strict=True))


def check_steps(layout, make_rules, weights, core, rng, steps=12):
    other = copy.copy(core)
    other.phases = copy.copy(core.phases)
    other.phases.table = copy.copy(core.phases.table)
    table = other.phases.table
    fused = FusedStep(other, weights, SLOTS)
    mains = {}  # of companions
    if layout.family == "bagpiper" and rng.random() < 0.7:
        free = rng.sample(range(SLOTS), SLOTS)
        mains = {free.pop(): free.pop() for _ in range(rng.randint(1, SLOTS // 2))}
    for slot in range(SLOTS):
        args = {"rules": make_rules().to_dict(), "seed": rng.getrandbits(63)}
        core.add(str(slot), slot, {"companion_of": str(mains[slot])} if slot in mains else args, 1, None)
    core.flush()
    other.history = core.history.clone()
    table.ints, table.floats = core.phases.table.ints.clone(), core.phases.table.floats.clone()
    paired = 0
    for step in range(steps):
        batch = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        slots = torch.tensor(batch, device=DEVICE)
        hidden = torch.randn(len(batch), HIDDEN, device=DEVICE)
        first = weights.stream_emb[0] if layout.primary_stream_embedded else 0
        logits = (hidden + first) @ weights.head.t()
        emit = torch.tensor([rng.random() < 0.8 for _ in batch], device=DEVICE)
        lengths = torch.randint(1, ROWS, (len(batch),), device=DEVICE)
        for row, slot in enumerate(batch):
            if slot in mains and mains[slot] in batch and rng.random() < 0.8:
                mate = batch.index(mains[slot])
                emit[row], lengths[row] = emit[mate], lengths[mate]
        known = torch.full((SLOTS + 1,), ROWS, device=DEVICE)
        known[slots] = torch.where(emit, lengths, lengths + 1)
        paired += int(
            core.pairs.any
            and core.pairs.partners(slots, lengths, emit, core.phases.constraint(slots).guidance > 1).guided.sum()
        )
        text = bool((core.phases.constraint(slots).phase == TEXT).any())
        plain = core.sample(hidden, logits, slots, lengths, emit)
        tokens, emits, tensors = fused.sample(
            hidden, logits if text or step % 3 == 0 else None, slots.to(torch.int32), lengths.to(torch.int32),
            known.to(torch.int32), max(core._topk.values()),
        )  # fmt: skip
        assert torch.equal(tokens[:, 0], plain.tokens), (tokens[:, 0], plain.tokens)
        assert torch.equal(tensors.logprob_token_ids[:, 1:].long(), plain.codes)
        assert torch.equal(emits.bool(), emit)
        torch.testing.assert_close(tensors.logprobs[:, 1:], plain.logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tensors.logprobs[:, 0], plain.logprobs[:, 0], rtol=1e-4, atol=1e-4)
        assert torch.equal(table.ints[:SLOTS], core.phases.table.ints[:SLOTS])
        assert torch.equal(other.history[:SLOTS], core.history[:SLOTS])
    return paired


def check(seed):
    rng = random.Random(seed)
    layout, make_rules, weights, core = build(rng)
    check_embed(core, FusedStep(core, weights, SLOTS), rng)
    if seed % 4 == 0:
        check_warm_up(core, weights)
    return check_steps(layout, make_rules, weights, core, rng)


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    guided = 0
    for seed in range(first, last):
        print(f"world {seed}", flush=True)
        guided += check(seed)
    assert guided or last - first < 10, "no row was guided"
    print(f"{last - first} worlds equal, {guided} guided rows")
