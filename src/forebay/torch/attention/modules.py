"""Attention modules that mask documents and padding.

    PackedSelfAttention    packed rows: no token sees another document
    SeedAttention          a causal residual block that is initialised to the identity
    MaskedViTBlock         letterboxed images: no token sees a patch of padding; CLS is always seen

Each takes the mask of the batch as `mask=`, built once and passed to all layers: then a model compiles as one graph
(`fullgraph=True`). Without it a layer builds the mask itself, between two graphs; layers share masks if they are made
with the same `BlockMaskCache`.
"""

from collections.abc import Callable
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from forebay.masks.spans import DocumentKind
from forebay.torch.attention.backends import (
    Backend,
    attend_auto,
    attend_causal,
    attend_documents,
    attend_masked,
    attend_packed,
)
from forebay.torch.attention.block_mask import DEFAULT_BLOCK_SIZE, causal_block_mask, document_block_mask
from forebay.torch.attention.mask_cache import BlockMaskCache


class PackedSelfAttention(nn.Module):
    """Multi-head self-attention over packed rows.

        attention = PackedSelfAttention(dim=512, n_head=8)
        y = attention(x, batch["seq_lens"])                  # x, y: (rows, sequence_length, dim)
        y = attention(x, mask=mask)                          # mask = document_block_mask(batch["seq_lens"], …)

    `backend="auto"` uses FlexAttention where it can run, and SDPA elsewhere, with equal results. A kernel is compiled
    for each new shape of `x`, some seconds on a CPU: for rows of many lengths pass "dense" or "documents". Keep
    `seq_lens` on the CPU: the mask is made from it there, and sent to the device of `x`.
    """

    def __init__(
        self,
        dim: int,
        n_head: int,
        *,
        kind: DocumentKind = "causal",
        window: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        backend: Literal["auto"] | Backend = "auto",
        cache: BlockMaskCache | None = None,
    ) -> None:
        super().__init__()
        self.n_head = _checked_heads(dim, n_head)
        _check_backend(backend, ("auto", *get_args(Backend)))
        self.kind, self.window, self.block_size, self.backend = kind, window, block_size, backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.cache = cache if cache is not None else BlockMaskCache()

    def forward(self, x: Tensor, seq_lens: Tensor | None = None, *, mask: BlockMask | None = None) -> Tensor:
        query, key, value = _split_heads(self.qkv(x), self.n_head)
        if mask is None:
            lengths = _lengths_of(x, seq_lens)
            made = self._mask(lengths, x.shape[1], x.device)
            if self.backend == "auto":
                attended = attend_auto(query, key, value, made, lengths, self._sees())
            else:
                attended = attend_packed(query, key, value, made, lengths, self.backend, self._sees())
        elif self.backend == "documents":
            attended = attend_documents(query, key, value, mask, _lengths_of(x, seq_lens))
        else:
            attended = attend_masked(query, key, value, mask, self.backend)
        projected: Tensor = self.proj(_join_heads(attended))
        return projected

    def _sees(self) -> DocumentKind | None:
        """Return what a document sees of itself if that needs no mask; a window does."""
        return self.kind if self.window is None else None

    def _mask(self, seq_lens: Tensor, sequence_length: int, device: torch.device) -> BlockMask:
        return self.cache.get(
            document_block_mask,
            seq_lens,
            sequence_length,
            kind=self.kind,
            window=self.window,
            block_size=self.block_size,
            device=device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The model moves to another device or dtype: masks on the old device are not needed again.
        self.cache.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return self


class SeedAttention(nn.Module):
    """A causal residual attention block to add to a trained model.

    Its output projection is initialised to zero, so that the block starts as the identity. Sequences have no documents;
    one mask per length serves every batch size and dtype.
    """

    def __init__(
        self,
        dim: int,
        n_head: int,
        *,
        backend: Literal["auto", "flex", "dense"] = "auto",
        cache: BlockMaskCache | None = None,
    ) -> None:
        super().__init__()
        self.n_head = _checked_heads(dim, n_head)
        _check_backend(backend, ("auto", "flex", "dense"))
        self.backend = backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        self.cache = cache if cache is not None else BlockMaskCache(max_entries=8)

    def forward(self, x: Tensor, *, mask: BlockMask | None = None) -> Tensor:
        query, key, value = _split_heads(self.qkv(x), self.n_head)
        if mask is not None:
            attended = attend_masked(query, key, value, mask, self.backend)
        else:
            mask = self.cache.get(causal_block_mask, x.shape[1], device=x.device)
            attended = attend_causal(query, key, value, mask, self.backend)
        residual: Tensor = self.proj(_join_heads(attended))
        return x + residual

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.cache.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return self


class MaskedViTBlock(nn.Module):
    """A pre-norm transformer block for the tokens of letterboxed images.

        ignore = torch.from_numpy(token_ignore_mask(rectangles, (224, 224), 16)).flatten(1)
        y = block(x, ignore)             # x, y: (images, 1 + tokens, dim), x[:, 0] is CLS
        y = block(x, mask=mask)          # mask = image_block_mask(rectangles, (224, 224), 16)

    tokens     c 0 1 2 3
    ignore       . . 1 1      True = padding, as everywhere
    seen       1 1 1 . .      by every query; CLS always
    """

    def __init__(self, dim: int, n_head: int, *, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.n_head = _checked_heads(dim, n_head)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, ignore: Tensor | None = None, *, mask: BlockMask | None = None) -> Tensor:
        heads = _split_heads(self.qkv(self.norm1(x)), self.n_head)
        if mask is not None:
            attended = attend_masked(*heads, mask, "auto")
        elif ignore is not None:
            seen = kept_with_cls(ignore, images=x.shape[0], tokens=x.shape[1])
            attended = scaled_dot_product_attention(*heads, attn_mask=seen[:, None, None, :])
        else:
            raise TypeError("pass the ignored tokens of these images, or their mask")
        x = x + self.proj(_join_heads(attended))
        residual: Tensor = self.mlp(self.norm2(x))
        return x + residual


def kept_with_cls(ignore: Tensor, images: int, tokens: int) -> Tensor:
    """Return the keys that are seen, `[images, 1 + patches]`: CLS, and each patch that is not ignored."""
    if ignore.dtype != torch.bool or ignore.shape != (images, tokens - 1):
        raise ValueError(
            f"ignore must be bool [{images}, {tokens - 1}] for {images} images of {tokens} tokens with CLS "
            f"(got {ignore.dtype} {tuple(ignore.shape)}); flatten the token_ignore_mask of these images"
        )
    cls = ignore.new_ones(len(ignore), 1)
    return torch.cat((cls, ~ignore), dim=1)


def _lengths_of(x: Tensor, seq_lens: Tensor | None) -> Tensor:
    if seq_lens is None:
        raise TypeError("pass seq_lens, or, with a backend other than 'documents', the mask of this batch")
    if len(seq_lens) != len(x):
        raise ValueError(f"x has {len(x)} rows but seq_lens has {len(seq_lens)}; pass the lengths of this batch")
    return seq_lens


def _check_backend(backend: str, known: tuple[str, ...]) -> None:
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)} (got {backend!r})")


def _split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, S, 3 · dim) → three of (rows, n_head, S, head_dim)."""
    rows, length, width = qkv.shape
    query, key, value = qkv.view(rows, length, 3, n_head, width // (3 * n_head)).permute(2, 0, 3, 1, 4)
    return query, key, value


def _join_heads(attended: Tensor) -> Tensor:
    return attended.transpose(1, 2).flatten(2)


def _checked_heads(dim: int, n_head: int) -> int:
    if n_head < 1 or dim % n_head:
        raise ValueError(f"n_head must be at least 1 and divide dim {dim} (got {n_head})")
    return n_head
