"""What a page of KV is: its shape, its bytes, and the digest by which two instances know that they agree."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from shared.bounds import Size

KvDtype = Literal["float32", "bfloat16"]

ITEM_BYTES: dict[KvDtype, int] = {"float32": 4, "bfloat16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one shard's KV pages, HND inside a page: `[k/v][head][token][dim]`, K first; "mla": `[head][token][dim]`, one
    head, whose vector is the latent and the rotated part of the key.

    A region of `num_pages` pages is `[layer][page][k/v][head][token][dim]`, C-contiguous, so that one page of one
    layer is one contiguous run of `page_bytes`, and so is one head range of K or of V in it.

    A model may have another beside it that proposes tokens (`draft`): its layers follow, in the same region and of the same
    pages, with heads of their own. The layers of each are a *group*; what is said here of a page without naming a layer is of
    the first group, the model's own.
    """

    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    page_size: Size
    """Tokens in a page."""
    dtype: KvDtype
    kind: Literal["gqa", "mla"] = "gqa"
    draft: KvLayout | None = None

    def __post_init__(self) -> None:
        if self.draft is not None:
            if self.draft.draft is not None:
                raise ValueError("a draft's layout has no draft of its own")
            if (self.draft.page_size, self.draft.dtype) != (self.page_size, self.dtype):
                raise ValueError("the layouts of model and draft differ in page_size or dtype")

    @property
    def groups(self) -> list[KvLayout]:
        """The layout of each group alone."""
        return [self] if self.draft is None else [msgspec.structs.replace(self, draft=None), self.draft]

    @property
    def all_layers(self) -> int:
        """Over all groups."""
        return sum(group.num_layers for group in self.groups)

    def group_of(self, layer: int) -> int:
        return 0 if layer < self.num_layers else 1

    def first_layer(self, group: int) -> int:
        return self.num_layers if group else 0

    @property
    def parts(self) -> int:
        """A page is so many parts, one after another, each `[head][token][dim]`: K and V, or the latents. A range of heads is
        one contiguous run in each. With `head_bytes` this is all that anybody needs to know of the order inside a page."""
        return 2 if self.kind == "gqa" else 1

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one part of a page."""
        return self.page_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, K and V, of the first group."""
        return self.parts * self.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return sum(group.num_layers * group.page_bytes for group in self.groups) // self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens; 0 for 0."""
        return -(-tokens // self.page_size)

    def layer_stride(self, num_pages: int) -> int:
        """Bytes from a page of one layer to the same page of the next of its group, in a region of `num_pages` pages."""
        return num_pages * self.page_bytes

    def region_bytes(self, num_pages: int) -> int:
        return sum(group.num_layers * group.layer_stride(num_pages) for group in self.groups)

    def offset(self, layer: int, page: int, num_pages: int) -> int:
        """Byte offset of a page of a layer in a region of `num_pages` pages."""
        if self.draft is not None and layer >= self.num_layers:
            begin = self.num_layers * self.layer_stride(num_pages)
            return begin + self.draft.offset(layer - self.num_layers, page, num_pages)
        return layer * self.layer_stride(num_pages) + page * self.page_bytes

    def digest(self) -> int:
        """64 bits that are equal exactly where the layouts are; carried in every tail context."""
        return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest(), "big")
