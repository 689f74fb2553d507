"""The transducer loss in plain PyTorch, for training on a CPU, where NeMo's own loss takes several times as long.

Forward variables over the lattice of frames and tokens, one anti-diagonal at a time (A. Graves, "Sequence
transduction with recurrent neural networks", 2012, eq. 16 to 18); the gradient comes from autograd."""

from __future__ import annotations

import torch

NEVER = -1e9


def transducer_loss(
    logits: torch.Tensor, targets: torch.Tensor, frames: torch.Tensor, tokens: torch.Tensor, blank: int
) -> torch.Tensor:
    """Sum of the negative log-likelihoods, divided by the number of tokens.

    logits: [B, T, U+1, V+1]; targets: [B, U]; frames, tokens: valid lengths [B].
    """
    batch, width, height, _ = logits.shape
    log_probs = logits.log_softmax(-1)
    stay = log_probs[..., blank]  # [B, T, U+1]: to the next frame
    index = targets[:, None, :, None].expand(-1, width, -1, -1)
    emit = log_probs[:, :, :-1].gather(3, index)[..., 0]  # [B, T, U]: to the next token
    emit = torch.nn.functional.pad(emit, (0, 1), value=NEVER)
    # Row u of the sheared planes holds frame d - u at column d, so that an anti-diagonal is one column.
    columns = torch.arange(width + height - 1)[:, None] - torch.arange(height)[None]
    inside = (columns >= 0) & (columns < width)
    at = columns.clamp(0, width - 1).T[None].expand(batch, -1, -1)
    stay = stay.transpose(1, 2).gather(2, at).masked_fill(~inside.T, NEVER)  # [B, U+1, D]
    emit = emit.transpose(1, 2).gather(2, at).masked_fill(~inside.T, NEVER)
    alpha = torch.full((batch, height), NEVER)
    alpha[:, 0] = 0.0
    diagonals = [alpha]
    for d in range(1, width + height - 1):
        along = alpha + stay[:, :, d - 1]
        up = torch.nn.functional.pad((alpha + emit[:, :, d - 1])[:, :-1], (1, 0), value=NEVER)
        alpha = torch.logaddexp(along, up).clamp(min=NEVER)
        diagonals.append(alpha)
    last = frames + tokens - 1
    row = torch.arange(batch)
    final = torch.stack(diagonals, dim=2)[row, tokens, last] + stay[row, tokens, last]
    return -final.sum() / tokens.sum()
