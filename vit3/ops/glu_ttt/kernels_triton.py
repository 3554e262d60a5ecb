"""The GLU inner step and its gradient as Triton kernels; ``triton.py`` beside this file launches them.

Three passes forward and three backward, in the order of the formulas in ``README.md``; no tensor of the length of
the sequence is written but the output and the gradients of q, k and v:

    gradient    K, V, W0 -> sums of G          apply_backward      Q, dO, W' -> dQ, sums of dW'
    step        sums of G -> G, W'             step_backward       sums of dW', G -> dW', dG
    apply       Q, W' -> O                     gradient_backward   K, V, W0, dG -> dK, dV, sums of dW0

Shapes in comments: [n, D] a tile of tokens, [D, J] a block of columns. W0, W', G, dW' and dG hold the columns of W1
and W2 side by side, (.., D, 2D) in float32. Everything up to dQ and dK is separable by column, so a block of columns
limits registers and shared memory at large D. A program takes 16 D tokens of one sample and head, whatever the
batch: sums have a fixed order and results do not depend on the other samples.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, stride_n, stride_d, columns, left, BLOCK: tl.constexpr, D: tl.constexpr):
    """Tokens [0, BLOCK) from ``base``, at given columns; zero from token ``left`` and from column D on."""
    n = tl.arange(0, BLOCK)
    inside = (n[:, None] < left) & (columns[None, :] < D)
    return tl.load(base + n[:, None] * stride_n + columns[None, :] * stride_d, mask=inside, other=0.0)


@triton.jit
def _write(base, stride_n, stride_d, columns, left, x, BLOCK: tl.constexpr, D: tl.constexpr):
    n = tl.arange(0, BLOCK)
    inside = (n[:, None] < left) & (columns[None, :] < D)
    tl.store(base + n[:, None] * stride_n + columns[None, :] * stride_d, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _turn(x, cos, sin, first, head, h, w, quarter, sign, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Rotate the channel pairs of x [n, D], tokens from ``first`` on; the result has the dtype of x."""
    token = first + tl.arange(0, BLOCK)
    pair = tl.arange(0, DP // 2)
    if DP == 128:  # narrower offsets: without this, float32 spills on sm_80; with it, narrower heads would
        head = head.to(tl.int32)
    channel = head * (D // 2) + pair  # of the C/2 pairs
    by_row = channel < quarter
    line = tl.where(by_row[None, :], (token // w)[:, None], h + (token % w)[:, None])
    place = line * quarter + tl.where(by_row, channel, channel - quarter)[None, :]
    inside = (token[:, None] < h * w) & (pair[None, :] < D // 2)
    c = tl.load(cos + place, mask=inside, other=0.0)
    s = tl.load(sin + place, mask=inside, other=0.0) * sign
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [BLOCK, DP // 2, 2]))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [BLOCK, DP]).to(x.dtype)


@triton.jit
def _matrix(base, offset, columns, D: tl.constexpr, DP: tl.constexpr):
    """Columns of a matrix (D, 2D), from column ``offset`` on, in float32: [D, J]."""
    rows = tl.arange(0, DP)
    inside = (rows[:, None] < D) & (columns[None, :] < D)
    return tl.load(base + rows[:, None] * (2 * D) + offset + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _matrix_t(base, offset, columns, D: tl.constexpr, DP: tl.constexpr):
    """The same, transposed: [J, D]."""
    rows = tl.arange(0, DP)
    inside = (columns[:, None] < D) & (rows[None, :] < D)
    return tl.load(base + rows[None, :] * (2 * D) + offset + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _store_matrix(base, offset, columns, x, D: tl.constexpr, DP: tl.constexpr):
    rows = tl.arange(0, DP)
    inside = (rows[:, None] < D) & (columns[None, :] < D)
    tl.store(base + rows[:, None] * (2 * D) + offset + columns[None, :], x, mask=inside)


@triton.jit
def _add_dot(x, w, total, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """total + x @ w, with w (float32) rounded to the dtype of x; EXACT: what the rounding lost is multiplied too."""
    high = w.to(x.dtype)
    total = tl.dot(x, high, total, input_precision=PRECISION)
    if EXACT:
        total = tl.dot(x, (w - high.to(tl.float32)).to(x.dtype), total)
    return total


@triton.jit
def _dot(x, w, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    return _add_dot(x, w, tl.zeros([x.shape[0], w.shape[1]], tl.float32), PRECISION, EXACT)


@triton.jit
def gradient(
    k, v, w, cos, sin, sums,
    n, heads, splits, h, w_, quarter,
    k_b, k_m, k_n, k_d, v_b, v_m, v_n, v_d,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over a range of tokens of K^T R, R = [V silu(Z2) | V Z1 silu'(Z2)]: (B*M, splits, D, 2D)."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    column, split, bm = pid % blocks, pid // blocks % splits, (pid // blocks // splits).to(tl.int64)
    b, m = bm // heads, bm % heads
    first = split * TOKENS
    columns = column * J + tl.arange(0, J)
    every = tl.arange(0, DP)
    k += b * k_b + m * k_m + first.to(tl.int64) * k_n
    v += b * v_b + m * v_m + first.to(tl.int64) * v_n
    w += m * (2 * D * D)
    dtype = k.dtype.element_ty
    w1 = _matrix(w, 0, columns, D, DP).to(dtype)
    w2 = _matrix(w, D, columns, D, DP).to(dtype)
    g1 = tl.zeros([DP, J], tl.float32)
    g2 = tl.zeros([DP, J], tl.float32)
    count = tl.minimum(n - first, TOKENS)
    for start in range(0, count, BLOCK):
        x = _tile(k, k_n, k_d, every, count - start, BLOCK, D)
        if ROTARY:
            x = _turn(x, cos, sin, first + start, m, h, w_, quarter, 1.0, BLOCK, D, DP)
        y = _tile(v, v_n, v_d, columns, count - start, BLOCK, D).to(tl.float32)
        z1 = tl.dot(x, w1, input_precision=PRECISION)  # [n, D] @ [D, J] -> [n, J]
        z2 = tl.dot(x, w2, input_precision=PRECISION)
        s = tl.sigmoid(z2)
        r1 = y * (z2 * s)
        r2 = y * z1 * (s * (1 + z2 * (1 - s)))
        xt = tl.trans(x)
        g1 = tl.dot(xt, r1.to(dtype), g1, input_precision=PRECISION)  # [D, n] @ [n, J] -> [D, J]
        g2 = tl.dot(xt, r2.to(dtype), g2, input_precision=PRECISION)
        k += BLOCK * k_n
        v += BLOCK * v_n
    sums += (bm * splits + split) * (2 * D * D)
    _store_matrix(sums, 0, columns, g1, D, DP)
    _store_matrix(sums, D, columns, g2, D, DP)


@triton.jit
def step(
    sums, w, g, fast, splits, heads, factor, lr,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, STORE_G: tl.constexpr,
):  # fmt: skip
    """G = factor times the sum over splits; W' = W0 - lr G / (||G|| + 1), norm by column."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    half, column, bm = pid % 2, pid // 2 % blocks, (pid // 2 // blocks).to(tl.int64)
    columns = column * J + tl.arange(0, J)
    total = tl.zeros([DP, J], tl.float32)
    for split in range(splits):
        total += _matrix(sums + (bm * splits + split) * (2 * D * D), half * D, columns, D, DP)
    total *= factor
    if STORE_G:
        _store_matrix(g + bm * (2 * D * D), half * D, columns, total, D, DP)
    norm = tl.sqrt(tl.sum(total * total, 0))[None, :]
    start = _matrix(w + bm % heads * (2 * D * D), half * D, columns, D, DP)
    _store_matrix(fast + bm * (2 * D * D), half * D, columns, start - lr * (total / (norm + 1)), D, DP)


@triton.jit
def apply(
    q, fast, cos, sin, out,
    n, heads, splits, h, w_, quarter,
    q_b, q_m, q_n, q_d, o_b, o_m, o_n, o_d,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = (Q W1') silu(Q W2')."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    column, split, bm = pid % blocks, pid // blocks % splits, (pid // blocks // splits).to(tl.int64)
    b, m = bm // heads, bm % heads
    first = split * TOKENS
    columns = column * J + tl.arange(0, J)
    every = tl.arange(0, DP)
    q += b * q_b + m * q_m + first.to(tl.int64) * q_n
    out += b * o_b + m * o_m + first.to(tl.int64) * o_n
    fast += bm * (2 * D * D)
    dtype = q.dtype.element_ty
    f1 = _matrix(fast, 0, columns, D, DP).to(dtype)
    f2 = _matrix(fast, D, columns, D, DP).to(dtype)
    count = tl.minimum(n - first, TOKENS)
    for start in range(0, count, BLOCK):
        x = _tile(q, q_n, q_d, every, count - start, BLOCK, D)
        if ROTARY:
            x = _turn(x, cos, sin, first + start, m, h, w_, quarter, 1.0, BLOCK, D, DP)
        y1 = tl.dot(x, f1, input_precision=PRECISION)  # [n, D] @ [D, J] -> [n, J]
        y2 = tl.dot(x, f2, input_precision=PRECISION)
        _write(out, o_n, o_d, columns, count - start, y1 * y2 * tl.sigmoid(y2), BLOCK, D)
        q += BLOCK * q_n
        out += BLOCK * o_n


@triton.jit
def apply_backward(
    grad, q, fast, cos, sin, dq, sums,
    n, heads, splits, h, w_, quarter,
    g_b, g_m, g_n, g_d, q_b, q_m, q_n, q_d, dq_b, dq_m, dq_n, dq_d,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    WRITE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """dY = [dO silu(Y2) | dO Y1 silu'(Y2)]; WRITE: dQ = dY W'^T; SUM: sums of Q^T dY over a range of tokens.

    Both at once need all columns in one block (J >= D); otherwise WRITE goes through the blocks inside a program and
    SUM takes one block per program, in two launches.
    """
    blocks: tl.constexpr = (D + J - 1) // J
    programs: tl.constexpr = 1 if WRITE else blocks
    inner: tl.constexpr = blocks if WRITE else 1
    pid = tl.program_id(0)
    column, split, bm = pid % programs, pid // programs % splits, (pid // programs // splits).to(tl.int64)
    b, m = bm // heads, bm % heads
    first = split * TOKENS
    every = tl.arange(0, DP)
    grad += b * g_b + m * g_m + first.to(tl.int64) * g_n
    q += b * q_b + m * q_m + first.to(tl.int64) * q_n
    dq += b * dq_b + m * dq_m + first.to(tl.int64) * dq_n
    fast += bm * (2 * D * D)
    dtype = q.dtype.element_ty
    d1 = tl.zeros([DP, J], tl.float32)
    d2 = tl.zeros([DP, J], tl.float32)
    count = tl.minimum(n - first, TOKENS)
    for start in range(0, count, BLOCK):
        x = _tile(q, q_n, q_d, every, count - start, BLOCK, D)
        if ROTARY:
            x = _turn(x, cos, sin, first + start, m, h, w_, quarter, 1.0, BLOCK, D, DP)
        dx = tl.zeros([BLOCK, DP], tl.float32)
        for block in range(inner):
            columns = (column + block) * J + tl.arange(0, J)
            f1 = _matrix(fast, 0, columns, D, DP)
            f2 = _matrix(fast, D, columns, D, DP)
            y1 = _dot(x, f1, PRECISION, EXACT)  # [n, D] @ [D, J] -> [n, J]
            y2 = _dot(x, f2, PRECISION, EXACT)
            do = _tile(grad, g_n, g_d, columns, count - start, BLOCK, D).to(tl.float32)
            s = tl.sigmoid(y2)
            dy1 = (do * (y2 * s)).to(dtype)
            dy2 = (do * y1 * (s * (1 + y2 * (1 - s)))).to(dtype)
            if WRITE:
                dx = _add_dot(dy1, tl.trans(f1), dx, PRECISION, EXACT)  # [n, J] @ [J, D] -> [n, D]
                dx = _add_dot(dy2, tl.trans(f2), dx, PRECISION, EXACT)
            if SUM:
                xt = tl.trans(x)
                d1 = tl.dot(xt, dy1, d1, input_precision=PRECISION)  # [D, n] @ [n, J] -> [D, J]
                d2 = tl.dot(xt, dy2, d2, input_precision=PRECISION)
        if WRITE:
            if ROTARY:
                dx = _turn(dx, cos, sin, first + start, m, h, w_, quarter, -1.0, BLOCK, D, DP)
            _write(dq, dq_n, dq_d, every, count - start, dx, BLOCK, D)
        grad += BLOCK * g_n
        q += BLOCK * q_n
        dq += BLOCK * dq_n
    if SUM:
        columns = column * J + tl.arange(0, J)
        sums += (bm * splits + split) * (2 * D * D)
        _store_matrix(sums, 0, columns, d1, D, DP)
        _store_matrix(sums, D, columns, d2, D, DP)


@triton.jit
def step_backward(
    sums, g, dfast, dg, unit, splits, lr,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """dW' = the sum over splits; dG from dW' = -dG^/lr; unit = the largest |dG| of a head, as a power of two."""
    bm = tl.program_id(0).to(tl.int64)
    place = bm * (2 * D * D)
    largest = 0.0
    for start in range(0, 2 * DP, J):
        half, columns = start // DP * D, start % DP + tl.arange(0, J)
        total = tl.zeros([DP, J], tl.float32)
        for split in range(splits):
            total += _matrix(sums + (bm * splits + split) * (2 * D * D), half, columns, D, DP)
        _store_matrix(dfast + place, half, columns, total, D, DP)
        raw = _matrix(g + place, half, columns, D, DP)
        norm = tl.sqrt(tl.sum(raw * raw, 0))[None, :]
        direction = raw / tl.where(norm > 0, norm, 1.0)
        up = -lr * total
        along = tl.sum(up * direction, 0)[None, :]
        change = up / (norm + 1) - direction * (norm * along / ((norm + 1) * (norm + 1)))
        _store_matrix(dg + place, half, columns, change, D, DP)
        largest = tl.maximum(largest, tl.max(tl.abs(change)))
    power = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 7.9e-31))))  # 2^-100: no denormal, and no log of 0
    tl.store(unit + bm, power)


@triton.jit
def gradient_backward(
    k, v, w, dg, unit, cos, sin, dk, dv, sums,
    n, heads, splits, factor, h, w_, quarter,
    k_b, k_m, k_n, k_d, v_b, v_m, v_n, v_d, dk_b, dk_m, dk_n, dk_d, dv_b, dv_m, dv_n, dv_d,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    WRITE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """WRITE: dK and dV; SUM: sums of K^T dZ over a range of tokens. As in ``apply_backward``, both if J >= D.

    Inside, gradients are in units of factor * unit, so that 16-bit operands neither overflow nor vanish.
    """
    blocks: tl.constexpr = (D + J - 1) // J
    programs: tl.constexpr = 1 if WRITE else blocks
    inner: tl.constexpr = blocks if WRITE else 1
    pid = tl.program_id(0)
    column, split, bm = pid % programs, pid // programs % splits, (pid // programs // splits).to(tl.int64)
    b, m = bm // heads, bm % heads
    first = split * TOKENS
    every = tl.arange(0, DP)
    k += b * k_b + m * k_m + first.to(tl.int64) * k_n
    v += b * v_b + m * v_m + first.to(tl.int64) * v_n
    dk += b * dk_b + m * dk_m + first.to(tl.int64) * dk_n
    dv += b * dv_b + m * dv_m + first.to(tl.int64) * dv_n
    w += m * (2 * D * D)
    dg += bm * (2 * D * D)
    u = tl.load(unit + bm)
    r = 1.0 / u  # exact: a power of two
    u *= factor
    dtype = k.dtype.element_ty
    d1 = tl.zeros([DP, J], tl.float32)
    d2 = tl.zeros([DP, J], tl.float32)
    count = tl.minimum(n - first, TOKENS)
    for start in range(0, count, BLOCK):
        x = _tile(k, k_n, k_d, every, count - start, BLOCK, D)
        if ROTARY:
            x = _turn(x, cos, sin, first + start, m, h, w_, quarter, 1.0, BLOCK, D, DP)
        dx = tl.zeros([BLOCK, DP], tl.float32)
        for block in range(inner):
            columns = (column + block) * J + tl.arange(0, J)
            w1 = _matrix(w, 0, columns, D, DP)
            w2 = _matrix(w, D, columns, D, DP)
            c1 = _matrix(dg, 0, columns, D, DP) * r
            c2 = _matrix(dg, D, columns, D, DP) * r
            z1 = _dot(x, w1, PRECISION, EXACT)  # [n, D] @ [D, J] -> [n, J]
            z2 = _dot(x, w2, PRECISION, EXACT)
            h1 = _dot(x, c1, PRECISION, EXACT)
            h2 = _dot(x, c2, PRECISION, EXACT)
            y = _tile(v, v_n, v_d, columns, count - start, BLOCK, D).to(tl.float32)
            s = tl.sigmoid(z2)
            a = z2 * s  # silu
            slope = s * (1 - s)
            p = s + z2 * slope  # silu'
            dz1 = (y * p * h2).to(dtype)
            dz2 = (y * (p * h1 + z1 * slope * (2 + z2 - 2 * a) * h2)).to(dtype)
            if WRITE:
                dy = (a * h1 + z1 * p * h2) * u
                _write(dv, dv_n, dv_d, columns, count - start, dy, BLOCK, D)
                if EXACT:  # read again: kept since their first use, both parts would not fit the registers
                    w1t = _matrix_t(w, 0, columns, D, DP)
                    w2t = _matrix_t(w, D, columns, D, DP)
                    c1t = _matrix_t(dg, 0, columns, D, DP) * r
                    c2t = _matrix_t(dg, D, columns, D, DP) * r
                else:
                    w1t, w2t, c1t, c2t = tl.trans(w1), tl.trans(w2), tl.trans(c1), tl.trans(c2)
                dx = _add_dot((y * a).to(dtype), c1t, dx, PRECISION, EXACT)  # [n, J] @ [J, D] -> [n, D]
                dx = _add_dot((y * z1 * p).to(dtype), c2t, dx, PRECISION, EXACT)
                dx = _add_dot(dz1, w1t, dx, PRECISION, EXACT)
                dx = _add_dot(dz2, w2t, dx, PRECISION, EXACT)
            if SUM:
                xt = tl.trans(x)
                d1 = tl.dot(xt, dz1, d1, input_precision=PRECISION)  # [D, n] @ [n, J] -> [D, J]
                d2 = tl.dot(xt, dz2, d2, input_precision=PRECISION)
        if WRITE:
            dx *= u
            if ROTARY:
                dx = _turn(dx, cos, sin, first + start, m, h, w_, quarter, -1.0, BLOCK, D, DP)
            _write(dk, dk_n, dk_d, every, count - start, dx, BLOCK, D)
        k += BLOCK * k_n
        v += BLOCK * v_n
        dk += BLOCK * dk_n
        dv += BLOCK * dv_n
    if SUM:
        columns = column * J + tl.arange(0, J)
        sums += (bm * splits + split) * (2 * D * D)
        _store_matrix(sums, 0, columns, d1 * u, D, DP)
        _store_matrix(sums, D, columns, d2 * u, D, DP)
