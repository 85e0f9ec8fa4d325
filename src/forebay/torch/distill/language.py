"""The loss of a language model against the most likely tokens of a teacher.

The teacher's k tokens and the rest of the vocabulary are k + 1 classes:

    KL(p ‖ q) = Σ_k p_k · (log p_k − log q_k)  +  p_rest · (log p_rest − log q_rest)        p_rest = 1 − Σ_k p_k

It is at most the KL divergence over the whole vocabulary, and 0 only if the student has the teacher's probabilities.
Without the rest, a student would be free to move mass between the k tokens and all others.
"""

import torch
from torch import Tensor


def forward_kl_top_k(
    logits: Tensor, top_ids: Tensor, top_logps: Tensor, *, labels: Tensor | None = None, tail: bool = True
) -> Tensor:
    """Return the mean KL divergence of a student from a teacher, over the places that have the teacher's log-probs.

    `logits` are `[…, vocabulary]`; `top_ids` and `top_logps` `[…, k]`, as batches of `forebay.torch.PackedBatch` have
    them: NaN where there is none, also behind the last token of a place that has fewer than `k`. Places where `labels`
    is −100 do not count. `tail=False` leaves out the rest of the vocabulary. With no place at all, the loss and its
    gradient are 0.

    >>> teacher = torch.tensor([[0.7, 0.2, 0.1]]).log()
    >>> top = teacher.topk(2)
    >>> round(forward_kl_top_k(teacher, top.indices, top.values).item(), 6)
    0.0
    """
    _check(logits, top_ids, top_logps, labels)
    present = ~top_logps.isnan().all(dim=-1)
    if labels is not None:
        present = present & (labels != -100)
    # Absent values must not enter the arithmetic: their gradient would be NaN · 0 = NaN.
    logits, top_ids, log_p = logits[present].float(), top_ids[present].long(), top_logps[present].float()
    absent = log_p.isnan()
    top_ids = torch.where(absent, top_ids[:, :1], top_ids)  # the most likely token, which every place has
    log_q = logits.log_softmax(dim=-1)
    log_p = log_p.masked_fill(absent, 0)
    p = log_p.exp().masked_fill(absent, 0)
    losses = (p * (log_p - log_q.gather(-1, top_ids))).sum(dim=-1)
    if tail and top_ids.shape[-1] < logits.shape[-1]:
        p_rest = (1 - p.sum(dim=-1)).clamp(min=0)  # stored values are rounded
        log_q_rest = log_q.scatter(-1, top_ids, -torch.inf).logsumexp(dim=-1)
        losses = losses + torch.special.xlogy(p_rest, p_rest) - p_rest * log_q_rest
    return losses.sum() / max(1, len(losses))


def _check(logits: Tensor, top_ids: Tensor, top_logps: Tensor, labels: Tensor | None) -> None:
    if top_ids.shape != top_logps.shape or logits.shape[:-1] != top_ids.shape[:-1]:
        raise ValueError(
            f"logits, top_ids and top_logps must agree in all axes but the last, and the latter two in all (got "
            f"{tuple(logits.shape)}, {tuple(top_ids.shape)} and {tuple(top_logps.shape)})"
        )
    if labels is not None and labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels must have the shape {tuple(logits.shape[:-1])} (got {tuple(labels.shape)})")
