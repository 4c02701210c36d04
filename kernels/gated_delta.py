"""The gated delta rule: a state S [K, V] per value head decays, is corrected by keys and read by queries.

    S <- e^g S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

Two forms. recurrent_gated_delta walks row by row and is the definition. chunked_gated_delta takes 64 rows at
once: with c the running sum of g in a chunk and D_ij = e^(c_i - c_j) for i >= j, it solves (I +
strictly_lower(beta K K^T * D)) U = beta (V - e^c K S0) and reads O = e^c Q S0 + (Q K^T * D) U.

Chunks end at absolute positions that are multiples of 64, whatever the segment: a prompt cut at such
positions, in any way, runs through the same arithmetic.

Letters: T rows, G key heads, H value heads, K key dim, V value dim, C = 64, N chunks.
"""

from typing import Literal

import torch
from torch import Tensor

from strata_coord.kernels.norm import l2_normalize

CHUNK = 64

HeadOrder = Literal["grouped", "tiled"]


def expand_key_heads(x_TGK: Tensor, num_value_heads: int, order: HeadOrder) -> Tensor:
    """Repeat key heads so that value head h finds its own: h // r when grouped, h % G when tiled."""
    repeats = num_value_heads // x_TGK.shape[1]
    if repeats == 1:
        return x_TGK
    if order == "grouped":
        return x_TGK.repeat_interleave(repeats, dim=1)
    return x_TGK.repeat(1, repeats, 1)


def gated_delta(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor,
    *,
    first_position: int,
    order: HeadOrder,
) -> Tensor:
    """Run a segment's rows and return o [T, H, V]; state is updated in place.

    q and k are raw: they are normalised here and q is divided by sqrt(K). first_position is the absolute
    position of row 0. A row that is alone in its chunk so far, as in decode, takes the recurrent form,
    however the rows before it were cut.
    """
    heads = v_THV.shape[1]
    q_THK = expand_key_heads(l2_normalize(q_TGK) * q_TGK.shape[-1] ** -0.5, heads, order)
    k_THK = expand_key_heads(l2_normalize(k_TGK), heads, order)
    rows = v_THV.shape[0]
    lone_tail = rows > 1 and (first_position + rows) % CHUNK == 1
    split = 0 if rows == 1 else rows - lone_tail
    parts = []
    if split:
        parts.append(
            chunked_gated_delta(
                q_THK[:split],
                k_THK[:split],
                v_THV[:split],
                g_TH[:split],
                beta_TH[:split],
                state_HKV,
                offset=first_position % CHUNK,
            )
        )
    if split < rows:
        parts.append(
            recurrent_gated_delta(
                q_THK[split:], k_THK[split:], v_THV[split:], g_TH[split:], beta_TH[split:], state_HKV
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def recurrent_gated_delta(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> Tensor:
    """Run row by row; q and k are normalised and have one head per value head. state is updated in place."""
    out = torch.empty_like(v_THV)
    decay_TH = g_TH.exp()
    for row in range(v_THV.shape[0]):
        state_HKV.mul_(decay_TH[row, :, None, None])
        read = torch.bmm(k_THK[row].unsqueeze(1), state_HKV).squeeze(1)
        delta = (v_THV[row] - read) * beta_TH[row].unsqueeze(1)
        state_HKV.addcmul_(k_THK[row].unsqueeze(2), delta.unsqueeze(1))
        out[row] = torch.bmm(q_THK[row].unsqueeze(1), state_HKV).squeeze(1)
    return out


def _chunks(x: Tensor, offset: int, num_chunks: int) -> Tensor:
    """Return x [T, H, ...] as contiguous [N, H, C, ...], zeros before row 0 and after the last row."""
    padded = x.new_zeros((num_chunks * CHUNK, *x.shape[1:]))
    padded[offset : offset + x.shape[0]] = x
    return padded.view(num_chunks, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


def chunked_gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor,
    *,
    offset: int,
) -> Tensor:
    """Run whole chunks; q and k as in recurrent_gated_delta. offset is the place of row 0 in its chunk.

    Padding rows have k = 0, beta = 0 and g = 0, so they neither decay the state nor write to it.
    """
    rows = v_THV.shape[0]
    num_chunks = -(-(offset + rows) // CHUNK)
    q, k, v = (_chunks(x, offset, num_chunks) for x in (q_THK, k_THK, v_THV))
    g, beta = (_chunks(x, offset, num_chunks) for x in (g_TH, beta_TH))

    # Running sums reach -1000 and more where a head forgets fast. Their differences must keep the digits of a
    # single g, so sums and differences are taken in float64; everything after exp is float32.
    total = g.double().cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu_(1)
    # exp of a masked -inf is 0; above the diagonal the bare difference is positive and could overflow.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).float()
    decay = decay.masked_fill_(above, float("-inf")).exp_()
    from_start = total.float().exp_().unsqueeze(-1)
    to_end = (total[..., -1:] - total).float().exp_().unsqueeze(-1)
    whole = total[..., -1].float().exp_()[..., None, None]

    k_beta = k * beta.unsqueeze(-1)
    k_t = k.transpose(-1, -2)
    # The solver reads the strictly lower part only and takes the diagonal as ones.
    system = (k_beta @ k_t).mul_(decay)
    right = torch.cat((v * beta.unsqueeze(-1), k_beta.mul_(from_start)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u_v, u_k = (part.contiguous() for part in solved.split((v.shape[-1], k.shape[-1]), dim=-1))
    inside = (q @ k_t).mul_(decay)
    q_start = q.mul_(from_start)
    k_end_t = k.mul_(to_end).transpose(-1, -2)

    out = torch.empty_like(v)
    state = state_HKV
    for chunk in range(num_chunks):
        new = torch.baddbmm(u_v[chunk], u_k[chunk], state, alpha=-1)
        torch.baddbmm(torch.bmm(q_start[chunk], state), inside[chunk], new, out=out[chunk])
        state = torch.baddbmm(state * whole[chunk], k_end_t[chunk], new)
    state_HKV.copy_(state)
    return out.transpose(1, 2).flatten(0, 1)[offset : offset + rows]
