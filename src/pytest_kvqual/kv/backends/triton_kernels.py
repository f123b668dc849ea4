"""The Triton kernels of ``triton_k16v8``: what runs on the device, and nothing that decides what runs.

Importing this module imports Triton; ``TRITON_INTERPRET=1`` in the environment at that moment makes every kernel run in
Triton's interpreter, on CPU tensors. ``INTERPRETED`` says which it was.

Words of the parameters: ``HEAD`` elements of a head, ``D`` the power of two that holds it; ``GROUP`` query heads of one
KV head; ``BLOCK`` positions of a page; ``M`` rows and ``N`` positions of a tile; ``V8`` whether V is one E4M3 byte.
Strides are in elements of the tensor that they belong to. Scores are kept in base 2: the softmax scale comes multiplied
by log2(e).

A request with one query row is computed in parts of ``size`` positions: whole tiles, at most ``SPLITS`` parts, none but
the last shorter than ``SHORTEST``. The size hangs on the request's length alone, so that the bits of a row hang neither
on the batch nor on the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """Float32 ``values`` in a 16-bit type, rounded to nearest, ties to even.

    The interpreter cuts a bfloat16 off, so the rounding is done before.
    """
    if _INTERPRETED:
        if DTYPE == tl.bfloat16:
            bits = values.to(tl.int32, bitcast=True)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
            values = tl.where(values == values, rounded, values)
    return values.to(DTYPE)


@triton.jit
def e4m3_bytes(values):
    """E4M3 bytes of float32 ``values``: clamped to +-448, rounded to nearest, ties to even; NaN keeps its sign.

    From 2**-6 on the code is the float32's upper bits, rounded at bit 20, with another exponent bias. Below, the unit
    is 2**-9, which is what the last bit of a float32 from 2**14 to 2**15 stands for: the addition of 2**14 rounds.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    shifted = clamped.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(raw, DTYPE: tl.constexpr, CAST: tl.constexpr):
    """The values of E4M3 bytes in ``DTYPE``: times 2**-8, or as they are with ``CAST``, the hardware's conversion.

    Sign, exponent and mantissa of the byte stand at the same places of a float16 with a bias that differs by 8,
    subnormals included. Only NaN (all seven bits set) needs the float16's own exponent: the carry of the magnitude plus
    one says whether it is.
    """
    if CAST:
        values = raw.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        wide = raw.to(tl.uint16)
        magnitude = wide & 0x7F
        nan = ((magnitude + 1) >> 7) * 0x7C00
        half = (((wide & 0x80) << 8) | (magnitude << 7) | nan).to(tl.float16, bitcast=True)
        if DTYPE == tl.float16:
            values = half
        else:
            values = half.to(tl.float32).to(DTYPE)
    return values


@triton.jit(do_not_specialize=["rows"])
def kvqual_write_cells(
    key,
    value,
    keys,
    values,
    slots,
    rows,
    v_scale,
    key_row,
    key_head,
    value_row,
    value_head,
    keys_block,
    keys_head,
    keys_position,
    values_block,
    values_head,
    values_position,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    V8: tl.constexpr,
):
    """One KV head of ``TOKENS`` rows: K and V to the cells of their slots."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    row = row.to(tl.int64)
    element = tl.arange(0, D)
    inside = live[:, None] & (element < HEAD)[None, :]
    k = tl.load(key + (row * key_row + head * key_head)[:, None] + element[None, :], mask=inside, other=0.0)
    v = tl.load(value + (row * value_row + head * value_head)[:, None] + element[None, :], mask=inside, other=0.0)
    block, offset = slot // BLOCK, slot % BLOCK
    at = block * keys_block + head * keys_head + offset * keys_position
    tl.store(keys + at[:, None] + element[None, :], k, mask=inside)
    at = block * values_block + head * values_head + offset * values_position
    if V8:
        wide = v.to(tl.float32)
        # The correctly rounded quotient: a plain division may be an approximation on a GPU.
        stored = e4m3_bytes(tl.div_rn(wide, tl.zeros_like(wide) + v_scale))
        tl.store(values + at[:, None] + element[None, :], stored, mask=inside)
    else:
        tl.store(values + at[:, None] + element[None, :], v, mask=inside)


@triton.jit
def attend_tile(
    q,
    peak,
    total,
    mixed,
    position,
    valid,
    last,
    keys,
    values,
    table,
    scale,
    keys_block,
    keys_position,
    values_block,
    values_position,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    V8: tl.constexpr,
    CAST: tl.constexpr,
    WIDEN: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Adds ``N`` positions to the running maxima ``[M]``, sums ``[M]`` and weighted sums ``[M, D]`` of ``q [M, D]``.

    ``valid [N]`` are the positions that the request has: no other cell is loaded, whatever the table says of it.
    ``last [M]`` is the last position that each row sees. ``WIDEN`` is for the interpreter, which multiplies the bits of
    a bfloat16: its operands become float32, which changes no product.
    """
    element = tl.arange(0, D)
    block = tl.load(table + position // BLOCK, mask=valid, other=0).to(tl.int64)
    offset = position % BLOCK
    if D == HEAD:
        inside = valid[:, None]
    else:
        inside = valid[:, None] & (element < HEAD)[None, :]
    at = block * keys_block + offset * keys_position
    k = tl.load(keys + at[:, None] + element[None, :], mask=inside, other=0.0)
    at = block * values_block + offset * values_position
    if WIDEN:
        scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32)) * scale
    else:
        scores = tl.dot(q, tl.trans(k)) * scale
    if CAUSAL:
        seen = valid[None, :] & (position[None, :] <= last[:, None])
    else:
        seen = valid[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet: minus infinity less itself would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if V8:
        raw = tl.load(values + at[:, None] + element[None, :], mask=inside, other=0)
        v = e4m3_values(raw, q.dtype, CAST)
    else:
        v = tl.load(values + at[:, None] + element[None, :], mask=inside, other=0.0)
    narrowed = narrow(weights, q.dtype)
    if WIDEN:
        mixed = tl.dot(narrowed.to(tl.float32), v.to(tl.float32), mixed * shrink[:, None])
    else:
        mixed = tl.dot(narrowed, v, mixed * shrink[:, None])
    return higher, total, mixed


@triton.jit(do_not_specialize=["columns", "splits"])
def kvqual_decode_parts(
    query,
    keys,
    values,
    table,
    lengths,
    starts,
    maxima,
    sums,
    partial,
    scale,
    columns,
    splits,
    query_row,
    query_head,
    keys_block,
    keys_head,
    keys_position,
    values_block,
    values_head,
    values_position,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    V8: tl.constexpr,
    CAST: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One part of the positions of a request with one query row, for the query heads of one KV head.

    Writes maxima and sums ``[R, HEADS, splits]`` and weighted sums ``[R, HEADS, splits, D]``, all float32.
    """
    part = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    row = tl.load(starts + request).to(tl.int32)
    if tl.load(starts + request + 1).to(tl.int32) - row != 1:
        return
    length = tl.minimum(tl.load(lengths + request).to(tl.int32), columns * BLOCK)
    size = tl.maximum(((length + SPLITS - 1) // SPLITS + N - 1) // N * N, SHORTEST)
    begin = part * size
    if begin >= length:
        return
    end = tl.minimum(begin + size, length)
    member = tl.arange(0, M)
    element = tl.arange(0, D)
    head = kv_head * GROUP + member
    at = row.to(tl.int64) * query_row + head[:, None] * query_head + element[None, :]
    q = tl.load(query + at, mask=(member < GROUP)[:, None] & (element < HEAD)[None, :], other=0.0)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.full([M], 0.0, tl.float32)
    mixed = tl.full([M, D], 0.0, tl.float32)
    for start in range(begin, end, N):
        position = start + tl.arange(0, N)
        peak, total, mixed = attend_tile(
            q,
            peak,
            total,
            mixed,
            position,
            position < end,
            member,
            keys + kv_head.to(tl.int64) * keys_head,
            values + kv_head.to(tl.int64) * values_head,
            table + request.to(tl.int64) * table_row,
            scale,
            keys_block,
            keys_position,
            values_block,
            values_position,
            HEAD,
            D,
            BLOCK,
            V8,
            CAST,
            WIDEN,
            False,
        )
    slot = (request.to(tl.int64) * HEADS + head) * splits + part
    tl.store(maxima + slot, peak, mask=member < GROUP)
    tl.store(sums + slot, total, mask=member < GROUP)
    tl.store(partial + slot[:, None] * D + element[None, :], mixed, mask=(member < GROUP)[:, None])


@triton.jit(do_not_specialize=["requests", "rows", "columns", "splits"])
def kvqual_merge_parts(
    output,
    lengths,
    starts,
    maxima,
    sums,
    partial,
    factor,
    requests,
    rows,
    columns,
    splits,
    output_row,
    output_head,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
):
    """Number ``i`` merges the parts of request ``i`` where it has one row, and clears row ``i`` where it is padding.

    ``H`` heads at a time. A request of length 0 comes back as zero too.
    """
    item = tl.program_id(0)
    head = tl.program_id(1) * H + tl.arange(0, H)
    element = tl.arange(0, D)
    inside = (head < HEADS)[:, None] & (element < HEAD)[None, :]
    place = head[:, None] * output_head + element[None, :]
    if item < requests:
        row = tl.load(starts + item).to(tl.int32)
        if tl.load(starts + item + 1).to(tl.int32) - row == 1:
            length = tl.minimum(tl.load(lengths + item).to(tl.int32), columns * BLOCK)
            size = tl.maximum(((length + SPLITS - 1) // SPLITS + N - 1) // N * N, SHORTEST)
            part = tl.arange(0, SPLITS)
            live = (part * size < length)[None, :] & (head < HEADS)[:, None]
            slot = ((item.to(tl.int64) * HEADS + head) * splits)[:, None] + part[None, :]
            peaks = tl.load(maxima + slot, mask=live, other=float("-inf"))
            highest = tl.max(peaks, 1)
            weights = tl.exp2(peaks - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
            total = tl.sum(weights * tl.load(sums + slot, mask=live, other=0.0), 1)
            at = slot[:, :, None] * D + element[None, None, :]
            parts = tl.load(partial + at, mask=live[:, :, None], other=0.0)
            mixed = tl.sum(parts * weights[:, :, None], 1)
            result = mixed / tl.where(total == 0.0, 1.0, total)[:, None] * factor
            narrowed = narrow(result, output.dtype.element_ty)
            tl.store(output + row.to(tl.int64) * output_row + place, narrowed, mask=inside)
    if item < rows:
        if item >= tl.load(starts + requests).to(tl.int32):
            nothing = tl.full([H, D], 0.0, output.dtype.element_ty)
            tl.store(output + item.to(tl.int64) * output_row + place, nothing, mask=inside)


@triton.jit(do_not_specialize=["requests", "columns"])
def kvqual_attend_rows(
    query,
    output,
    keys,
    values,
    table,
    lengths,
    starts,
    scale,
    factor,
    requests,
    columns,
    query_row,
    query_head,
    output_row,
    output_head,
    keys_block,
    keys_head,
    keys_position,
    values_block,
    values_head,
    values_position,
    table_row,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    V8: tl.constexpr,
    CAST: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``ROWS`` query rows of one request with several, for the query heads of one KV head; causal.

    Request ``r`` owns the tiles from ``starts[r] // ROWS + r`` on: at least as many as its rows need, and the bound on
    all of them hangs on the shapes alone, so that no length has to be known where the kernel is launched.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    low = requests * 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle).to(tl.int32) // ROWS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first = tl.load(starts + request).to(tl.int32)
    count = tl.load(starts + request + 1).to(tl.int32) - first
    begin = (tile - (first // ROWS + request)) * ROWS
    if (count < 2) | (begin >= count):
        return
    length = tl.load(lengths + request).to(tl.int32)
    member = tl.arange(0, M)
    element = tl.arange(0, D)
    row = begin + member // GROUP
    real = (member < ROWS * GROUP) & (row < count)
    head = kv_head * GROUP + member % GROUP
    at = (first + row).to(tl.int64)[:, None] * query_row + head[:, None] * query_head + element[None, :]
    inside = real[:, None] & (element < HEAD)[None, :]
    q = tl.load(query + at, mask=inside, other=0.0)
    end = tl.minimum(length - count + tl.minimum(begin + ROWS, count), columns * BLOCK)
    last = tl.where(real, length - count + row, end)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.full([M], 0.0, tl.float32)
    mixed = tl.full([M, D], 0.0, tl.float32)
    for start in range(0, end, N):
        position = start + tl.arange(0, N)
        peak, total, mixed = attend_tile(
            q,
            peak,
            total,
            mixed,
            position,
            position < end,
            last,
            keys + kv_head.to(tl.int64) * keys_head,
            values + kv_head.to(tl.int64) * values_head,
            table + request.to(tl.int64) * table_row,
            scale,
            keys_block,
            keys_position,
            values_block,
            values_position,
            HEAD,
            D,
            BLOCK,
            V8,
            CAST,
            WIDEN,
            True,
        )
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None] * factor
    at = (first + row).to(tl.int64)[:, None] * output_row + head[:, None] * output_head + element[None, :]
    tl.store(output + at, narrow(result, output.dtype.element_ty), mask=inside)


@triton.jit
def decode_bytes(raw, found, DTYPE: tl.constexpr, CAST: tl.constexpr):
    """The 256 E4M3 bytes as the attention kernels read them, in float32: what a device check compares."""
    at = tl.arange(0, 256)
    tl.store(found + at, e4m3_values(tl.load(raw + at), DTYPE, CAST).to(tl.float32))
