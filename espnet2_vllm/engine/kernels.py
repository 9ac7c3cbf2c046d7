"""Triton kernels of the step path. Each has a plain torch twin: ``core.embed``, ``sampling.choose`` and ``phases.*.advance``.

A launch costs tens of microseconds of host time, so everything that is S streams wide happens in five launches a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

# -- noise (twin: noise.gumbel) ----------------------------------------------------------------------------------------


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _absorb(h, value, constant):
    return _mix((h ^ ((value.to(tl.uint32) + 1) * constant)) + 0x9E3779B9)


@triton.jit
def _row_key(seed, position):
    h = _mix(seed.to(tl.uint32))
    h = _absorb(h, seed >> 32, 0x2545F491)
    return _absorb(h, position, 0x27D4EB2F)


@triton.jit
def _gumbel(key, stream, token):
    h = _absorb(_absorb(key, stream, 0x165667B1), token, 0x9E3779B1)
    u = ((h >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(u))


@triton.jit
def _take(value, token, key, stream, temperature, top, total, best, chosen, chosen_score):
    """Takes one more of the best ids into the draw: running sum of exponentials and running Gumbel-max."""
    score = (value - top) / temperature
    total += tl.exp(score)
    noisy = score + _gumbel(key, stream, token)
    better = noisy > best
    best = tl.where(better, noisy, best)
    chosen = tl.where(better, token, chosen)
    chosen_score = tl.where(better, score, chosen_score)
    return total, best, chosen, chosen_score


# -- input rows --------------------------------------------------------------------------------------------------------


# Sizes that follow the batch must not be specialised: a new value would compile in the middle of a run.
@triton.jit(do_not_specialize=["num_requests"])
def embed_kernel(
    out, token_ids, positions, slots, starts, num_requests, history, embedding, hidden_size,
    history_slot, history_row, AUXILIARY: tl.constexpr, PAD_EMBEDDED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over streams of embedding rows. One program a token and block of columns."""
    token = tl.program_id(0)
    low = 0
    high = num_requests
    for _ in range(STEPS):  # the request that the token belongs to: the last that starts at or before it
        middle = (low + high) // 2
        here = tl.load(starts + middle) <= token
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    slot = tl.load(slots + low).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden_size
    primary = tl.load(token_ids + token).to(tl.int64)
    total = tl.load(embedding + primary * hidden_size + columns, mask=inside, other=0.0).to(tl.float32)
    rows = history + slot * history_slot + position * history_row
    for stream in tl.static_range(AUXILIARY):
        identity = tl.load(rows + stream).to(tl.int64)
        wanted = inside if PAD_EMBEDDED else (inside & (identity != 0)) != 0
        total += tl.load(embedding + identity * hidden_size + columns, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * hidden_size + columns, total.to(out.dtype.element_ty), mask=inside)


# -- guidance (twin: pairs.Pairs.partners, pairs.merge) ----------------------------------------------------------------

NO_PARTNER, SPLIT, FOLLOWS = tl.constexpr(-1), tl.constexpr(-2), tl.constexpr(-3)


@triton.jit(do_not_specialize=["batch"])
def partners_kernel(
    partners, slots, seq_lens, prefill_lens, mates, is_companion, ints, ints_row, floats, floats_row, batch,
    TEXT: tl.constexpr, AUDIO: tl.constexpr, PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row: the companion's row of a guided main, or NO_PARTNER, SPLIT, or FOLLOWS for the companion of such a main."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    mate = tl.load(mates + slot)
    follower = tl.load(is_companion + slot) != 0
    main = tl.where(follower, tl.maximum(mate, 0), slot)
    phase = tl.load(ints + main * ints_row + PHASE)
    scale = tl.load(floats + main * floats_row + tl.where(phase == AUDIO, 3, 1))
    wanted = ((phase == AUDIO) | (phase == TEXT)) & (scale > 1.0) & (length >= tl.load(prefill_lens + slot))
    found = tl.full((), -1, tl.int32)
    if (mate >= 0) & wanted:
        for start in range(0, batch, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            inside = rows < batch
            others = tl.load(slots + rows, mask=inside, other=-1).to(tl.int64)
            lengths = tl.load(seq_lens + rows, mask=inside, other=-1)
            known = tl.load(prefill_lens + tl.maximum(others, 0), mask=inside, other=0)
            hit = inside & (others == mate) & (lengths == length) & (lengths >= known)
            found = tl.maximum(found, tl.max(tl.where(hit, rows, -1), 0))
    result = tl.where(found >= 0, found, tl.where(wanted & (follower == 0), SPLIT, NO_PARTNER))
    result = tl.where(follower & (found >= 0), FOLLOWS, result)
    tl.store(partners + row, result)


@triton.jit
def _merged(values, logits, logits_row, offsets, mask, partner, scale):
    """Conditional ``values`` of a row merged with the same columns of its partner's."""
    paired = partner >= 0
    source = logits + tl.maximum(partner, 0).to(tl.int64) * logits_row + offsets
    both = (mask & paired) != 0
    other = tl.load(source, mask=both, other=0.0).to(tl.float32)
    return tl.where(both, scale * values + (1.0 - scale) * other, values)


# -- choosing ids (twin: sampling.choose) ------------------------------------------------------------------------------


@triton.jit
def auxiliary_kernel(
    chosen_ids, chosen_logprobs, logits, logits_row, ids, valid, slots, seq_lens, ints, ints_row, floats, floats_row,
    partners, first_column, AUDIO: tl.constexpr, BAGPIPER: tl.constexpr, PHASE: tl.constexpr, TOPK: tl.constexpr,
    SEED: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr, STREAMS: tl.constexpr, GUIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One auxiliary stream of one row, if the row is in the audio phase."""
    row, auxiliary = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    state = ints + slot * ints_row
    phase = tl.load(state + PHASE)
    audio = phase == AUDIO if BAGPIPER else phase > 0
    if audio:
        key = _row_key(tl.load(state + SEED), tl.load(seq_lens + row).to(tl.int64))
        temperature = tl.load(floats + slot * floats_row + TEMPERATURE)
        count = tl.load(state + TOPK).to(tl.int32)
        columns = tl.arange(0, BLOCK)
        inside = columns < WIDTH
        inside &= tl.load(valid + auxiliary * WIDTH + columns, mask=inside, other=0) != 0
        offsets = first_column + auxiliary * WIDTH + columns
        source = logits + row.to(tl.int64) * logits_row
        values = tl.load(source + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        if GUIDED:
            scale = tl.load(floats + slot * floats_row + 3)
            values = _merged(values, logits, logits_row, offsets, inside, tl.load(partners + row), scale)
        top = tl.max(values, 0)
        total, score = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
        best, token = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
        for _ in range(count):
            value, column = tl.max(values, 0, return_indices=True)
            if value > -float("inf"):
                identity = tl.load(ids + auxiliary * WIDTH + column).to(tl.int32)
                total, best, token, score = _take(
                    value, identity, key, auxiliary + 1, temperature, top, total, best, token, score
                )
            values = tl.where(columns == column, -float("inf"), values)
        where = row * STREAMS + auxiliary + 1
        tl.store(chosen_ids + where, token)
        tl.store(chosen_logprobs + where, score - tl.log(total))


@triton.jit
def text_kernel(
    values_out, ids_out, logits, logits_row, text_start, text_size, slots, ints, ints_row, floats, floats_row, partners,
    num_chunks, TEXT: tl.constexpr, BAGPIPER: tl.constexpr, PHASE: tl.constexpr, TOPK: tl.constexpr, K: tl.constexpr,
    GUIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best ids of one chunk of the text span, for rows in the text phase."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    state = ints + slot * ints_row
    phase = tl.load(state + PHASE)
    text = phase == TEXT if BAGPIPER else phase == 0
    if text:
        count = tl.load(state + TOPK)
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = columns < text_size
        source = logits + row.to(tl.int64) * logits_row + text_start + columns
        values = tl.load(source, mask=inside, other=-float("inf")).to(tl.float32)
        if GUIDED:
            scale = tl.load(floats + slot * floats_row + 1)
            partner = tl.load(partners + row)
            values = _merged(values, logits, logits_row, text_start + columns, inside, partner, scale)
        where = (row.to(tl.int64) * num_chunks + chunk) * K
        for i in range(K):
            if i < count:
                value, column = tl.max(values, 0, return_indices=True)
                tl.store(values_out + where + i, value)
                tl.store(ids_out + where + i, text_start + chunk * BLOCK + column)
                values = tl.where(columns == chunk * BLOCK + column, -float("inf"), values)
            else:
                tl.store(values_out + where + i, -float("inf"))


@triton.jit
def primary_kernel(
    chosen_ids, chosen_logprobs, logits, logits_row, compact_ids, masks, slots, seq_lens, ints, ints_row, floats, floats_row,
    partners, text_values, text_ids, num_candidates, end_0, end_1,
    TEXT: tl.constexpr, AUDIO: tl.constexpr, BAGPIPER: tl.constexpr, PHASE: tl.constexpr, STEP: tl.constexpr,
    SEED: tl.constexpr, RULES: tl.constexpr, MIN: tl.constexpr, TOPK: tl.constexpr, TEMPERATURE: tl.constexpr,
    WIDTH: tl.constexpr, STREAMS: tl.constexpr, HAS_TEXT: tl.constexpr, GUIDED: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Stream 0 of one row among the special ids, its audio interval, and the text candidates if it is in the text phase."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    state = ints + slot * ints_row
    stored = tl.load(state + PHASE).to(tl.int32)
    if BAGPIPER:
        phase = stored
        block = tl.where(phase == AUDIO, RULES, 0)
        content = (phase == AUDIO) | (phase == TEXT)
        warmth = tl.where(phase == AUDIO, TEMPERATURE, 0)
    else:
        phase = tl.where(stored > 0, AUDIO, TEXT)
        block = 0
        content = phase > 0
        warmth = 0
    ends = content & (tl.load(state + STEP) >= tl.load(state + MIN + block))
    count = tl.where(content, tl.load(state + TOPK + block), 1).to(tl.int32)
    temperature = tl.where(content, tl.load(floats + slot * floats_row + warmth), 1.0)
    key = _row_key(tl.load(state + SEED), tl.load(seq_lens + row).to(tl.int64))

    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    allowed = tl.load(masks + phase * WIDTH + columns, mask=inside, other=0) != 0
    allowed |= ends & ((columns == end_0) | (columns == end_1))
    allowed = (allowed & inside) != 0
    values = tl.load(logits + row.to(tl.int64) * logits_row + columns, mask=allowed, other=-float("inf")).to(tl.float32)
    if GUIDED:
        scale = tl.load(floats + slot * floats_row + tl.where(phase == AUDIO, 3, 1))
        values = _merged(values, logits, logits_row, columns, allowed, tl.load(partners + row), scale)
    top = tl.max(values, 0)
    if HAS_TEXT:
        text = phase == TEXT
        places = tl.arange(0, CANDIDATES)
        base = row.to(tl.int64) * num_candidates
        words = tl.load(text_values + base + places, mask=(text & (places < num_candidates)) != 0, other=-float("inf"))
        top = tl.maximum(top, tl.max(words, 0))
    total, score = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    best, token = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
    stream = tl.full((), 0, tl.int32)
    for _ in range(count):
        value, column = tl.max(values, 0, return_indices=True)
        identity = tl.load(compact_ids + column).to(tl.int32)
        if HAS_TEXT:
            word, place = tl.max(words, 0, return_indices=True)
            other = tl.load(text_ids + base + place, mask=text & (word > -float("inf")), other=0).to(tl.int32)
            # On a tie the smaller id, which argmax over the whole vocabulary would find first.
            wins = tl.where(word > value, 1, 0)
            wins = tl.where(word == value, tl.where(other < identity, 1, 0), wins)
            words = tl.where(places == tl.where(wins > 0, place, -1), -float("inf"), words)
            values = tl.where(columns == tl.where(wins > 0, -1, column), -float("inf"), values)
            value = tl.where(wins > 0, word, value)
            identity = tl.where(wins > 0, other, identity)
        else:
            values = tl.where(columns == column, -float("inf"), values)
        if value > -float("inf"):
            total, best, token, score = _take(value, identity, key, stream, temperature, top, total, best, token, score)
    tl.store(chosen_ids + row * STREAMS, token)
    tl.store(chosen_logprobs + row * STREAMS, score - tl.log(total))


# -- phases (twins: phases.BagpiperPhases.advance, phases.OpusLMPhases.advance, core._finish) --------------------------


@triton.jit
def _publish(
    tokens, ids, logprobs, history, row, slot, position, emit, streams, inside, rows, forced, fed_empty, next_phase, token,
    chosen_logprobs, chosen_row, flags, history_slot, history_row, scratch, limit, STREAMS: tl.constexpr,
):  # fmt: skip
    """Writes a row to the channel and, as fed, to the history."""
    tl.store(tokens + row, token.to(tl.int64))
    logprob = tl.load(chosen_logprobs + chosen_row * STREAMS + streams, mask=inside & (forced == 0), other=0.0)
    codes = rows + ((streams + 1) << 20) + (forced.to(tl.int32) << 24)
    codes += tl.where(streams == 0, (fed_empty.to(tl.int32) << 25) + (next_phase.to(tl.int32) << 26) + flags, 0)
    wide = row * (STREAMS + 1)
    tl.store(ids + wide, token.to(tl.int32))
    tl.store(ids + wide + 1 + streams, codes, mask=inside)
    tl.store(logprobs + wide + 1 + streams, logprob, mask=inside)
    tl.store(logprobs + wide + streams, logprob, mask=streams == 0)
    target = tl.where(emit, slot, scratch)
    place = tl.minimum(position, limit)
    fed = tl.where(fed_empty, 0, rows)
    tl.store(history + target * history_slot + place * history_row + streams - 1, fed, mask=inside & (streams > 0))


@triton.jit
def bagpiper_kernel(
    tokens, ids, logprobs, history, chosen_ids, chosen_logprobs, slots, seq_lens, prefill_lens, emits,
    ints, ints_row, history_slot, history_row, scratch, limit, partners, assistant, text_token, audio_token, eos, eot, stop,
    MODALITY: tl.constexpr, TEXT: tl.constexpr, AUDIO: tl.constexpr, BRIDGE: tl.constexpr, DONE: tl.constexpr,
    FIRST_RULES: tl.constexpr, RULES: tl.constexpr, FIRST_ENFORCED: tl.constexpr, MAX_ENFORCED: tl.constexpr,
    STREAMS: tl.constexpr, GUIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    emit = tl.load(seq_lens + row) >= tl.load(prefill_lens + slot)
    tl.store(emits + row, emit.to(tl.int32))
    state = ints + slot * ints_row
    phase, step, segments = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    pending = segments < tl.load(state + 3)
    streams = tl.arange(0, BLOCK)
    inside = streams < STREAMS
    audio = phase == AUDIO
    content = audio | (phase == TEXT)
    entering, bridge = phase == MODALITY, phase == BRIDGE
    first = tl.load(chosen_ids + row * STREAMS)

    enforced = tl.load(state + FIRST_ENFORCED + tl.minimum(segments, MAX_ENFORCED - 1))
    enforced = tl.where(pending, enforced, 0)
    modality = tl.where(enforced == TEXT, text_token, tl.where(enforced == AUDIO, audio_token, first))
    primary = tl.where(bridge, assistant, tl.where(entering, modality, first))

    to_audio = modality == audio_token
    known = tl.load(state + FIRST_RULES + 4 + tl.where(to_audio, RULES, 0)) > 0
    entered = tl.where(to_audio, AUDIO, tl.where(modality == text_token, TEXT, DONE))
    entered = tl.where(known, entered, DONE)

    block = tl.where(audio, RULES, 0)
    ended = (first == eos) | (first == eot)
    last = content & (ended | (step + 1 >= tl.load(state + FIRST_RULES + 1 + block)))
    goes_on = (tl.load(state + FIRST_RULES + 3 + block) == 0) & ((first == eot) | pending)
    after = tl.where(last, tl.where(goes_on, BRIDGE, DONE), phase)
    after = tl.where(entering, entered, tl.where(bridge, MODALITY, after))
    done = after == DONE

    rows = tl.load(chosen_ids + row * STREAMS + streams, mask=(inside & audio & (streams > 0)) != 0, other=0)
    rows = tl.where(streams == 0, primary.to(tl.int32), rows)
    forced = tl.where(streams == 0, bridge | (entering & (enforced > 0)), audio == 0)
    token = tl.where(done, stop, primary.to(tl.int32))
    position = tl.load(seq_lens + row).to(tl.int64)
    partner = tl.full((), NO_PARTNER, tl.int32)
    if GUIDED:
        partner = tl.load(partners + row)
    flags = tl.where(partner == SPLIT, 1 << 29, 0)
    if partner != FOLLOWS:
        if emit:
            tl.store(state, after.to(tl.int64))
            tl.store(state + 1, tl.where(content & (last == 0), step + 1, 0))
            tl.store(state + 2, segments + tl.where(entering, 1, 0))
        _publish(
            tokens, ids, logprobs, history, row, slot, position, emit, streams, inside, rows, forced, last, after, token,
            chosen_logprobs, row, flags, history_slot, history_row, scratch, limit, STREAMS,
        )  # fmt: skip
    if partner >= 0:  # the companion gets its main's row
        other = tl.load(slots + partner).to(tl.int64)
        _publish(
            tokens, ids, logprobs, history, partner, other, position, emit, streams, inside, rows, forced, last, after, token,
            chosen_logprobs, row, flags, history_slot, history_row, scratch, limit, STREAMS,
        )  # fmt: skip


@triton.jit
def opuslm_kernel(
    tokens, ids, logprobs, history, chosen_ids, chosen_logprobs, slots, seq_lens, prefill_lens, emits,
    ints, ints_row, history_slot, history_row, scratch, limit, eos, stop,
    TEXT: tl.constexpr, AUDIO: tl.constexpr, DONE: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    emit = tl.load(seq_lens + row) >= tl.load(prefill_lens + slot)
    tl.store(emits + row, emit.to(tl.int32))
    state = ints + slot * ints_row
    step, finish, ended = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    audio, most = tl.load(state + 3) > 0, tl.load(state + 5)
    streams = tl.arange(0, BLOCK)
    inside = streams < STREAMS
    emptied = tl.where(finish >= 0, step - finish + 1, 0)
    forced = (streams > step) | (streams < emptied) | ((audio == 0) & (streams > 0))
    rows = tl.load(chosen_ids + row * STREAMS + streams, mask=inside & (forced == 0), other=0)
    natural = (finish < 0) & (ended > 0)
    cut = (finish < 0) & (natural == 0) & (step == most - (STREAMS - 1))
    rows = tl.where((streams == 0) & cut, eos, rows)
    forced = forced | ((streams == 0) & cut)
    finish = tl.where(natural | cut, step, finish)
    done = ((finish >= 0) & (step - finish >= STREAMS - 1)) | (step + 1 >= most)
    primary = tl.sum(tl.where(streams == 0, rows, 0), 0)
    if emit:
        tl.store(state, step + 1)
        tl.store(state + 1, finish)
        tl.store(state + 2, tl.where(primary == eos, 1, 0).to(tl.int64))
    phase = tl.where(done, DONE, tl.where(audio, AUDIO, TEXT))
    _publish(
        tokens, ids, logprobs, history, row, slot, tl.load(seq_lens + row).to(tl.int64), emit, streams, inside, rows, forced,
        step < 0, phase, tl.where(done, stop, primary), chosen_logprobs, row, 0, history_slot, history_row, scratch, limit,
        STREAMS,
    )  # fmt: skip
