"""The tensor protocols against the pure step functions, over random rules, slots and interleavings."""

import random

import pytest
import torch
from fuzz.draws import layout_and_rules

from espnet2_vllm.engine.heads import primary_masks
from espnet2_vllm.engine.phases import make_phases
from espnet2_vllm.protocol import PHASES

DEVICE = torch.device("cpu")


def pick(rng, layout, constraint):
    """A row that the constraint allows, end tokens over-represented so that segments end."""
    if constraint.forced is not None:
        return (constraint.forced, *(layout.pad for _ in range(layout.num_streams - 1)))
    spans = constraint.primary
    single = [s for s in spans if s.size == 1]
    span = rng.choice(single) if single and rng.random() < 0.3 else rng.choice(spans)
    primary = rng.randrange(span.start, span.stop)
    if not constraint.audio:
        return (primary, *(layout.pad for _ in range(layout.num_streams - 1)))
    return (primary, *(rng.choice(ids) for ids in layout.auxiliary_candidates()))


@pytest.mark.parametrize("seed", range(60))
def test_tensor_protocol_equals_step_functions(seed):
    rng = random.Random(seed)
    layout, make_rules = layout_and_rules(rng)
    slots = rng.randint(1, 6)
    phases = make_phases(layout, slots, DEVICE)
    masks = primary_masks(layout, DEVICE)
    live = {}
    for _ in range(80):
        for slot in range(slots):
            if slot not in live and rng.random() < 0.5:
                rules, key = make_rules(), rng.getrandbits(63)
                live[slot] = [rules, rules.start(), key]
                phases.add(slot, rules, rules.start(), key)
        phases.table.flush()
        batch = rng.sample(sorted(live), rng.randint(0, len(live)))
        if not batch:
            continue
        index = torch.tensor(batch)
        tensor = phases.constraint(index)
        emit = [rng.random() < 0.8 for _ in batch]
        chosen = []
        for row, slot in enumerate(batch):
            rules, state, key = live[slot]
            expected = rules.constraint(state)
            assert PHASES[int(tensor.phase[row])] == PHASES[expected.phase]
            assert int(tensor.topk[row]) == expected.sampling.topk
            assert float(tensor.temperature[row]) == pytest.approx(expected.sampling.temperature)
            assert float(tensor.guidance[row]) == expected.guidance
            assert float(tensor.top_p[row]) == pytest.approx(expected.sampling.top_p)
            assert int(phases.seeds(index)[row]) == key
            allowed = masks[tensor.phase[row]].clone()
            allowed[list(layout.end_tokens)] |= bool(tensor.end_open[row])
            if expected.forced is None and expected.primary:
                ids = {i for span in expected.primary for i in range(span.start, span.stop)}
                assert set(torch.nonzero(allowed).flatten().tolist()) == ids
            chosen.append(pick(rng, layout, expected))
        advanced = phases.advance(index, torch.tensor(chosen), torch.tensor(emit))
        for row, slot in enumerate(batch):
            rules, state, key = live[slot]
            after, expected = rules.advance(state, chosen[row])
            assert tuple(advanced.rows[row].tolist()) == expected.emitted
            assert tuple(advanced.forced[row].tolist()) == expected.forced
            fed = expected.emitted[:1] + (layout.pad,) * (layout.num_streams - 1)
            assert (fed if bool(advanced.fed_empty[row]) else expected.emitted) == expected.fed
            assert bool(advanced.done[row]) == expected.done
            if emit[row]:
                live[slot][1] = after
                if expected.done:
                    del live[slot]
