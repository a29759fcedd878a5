"""A pre-norm transformer encoder over sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.config import NetworkConfig
from maskgr.diffusion.layout import Layout
from maskgr.errors import RequestError

Attention = Literal["full", "isolated", "causal"]


@lru_cache(maxsize=1024)
def attention_mask(
    kind: Attention, length: int, item: int, target: int, device: torch.device
) -> Tensor | None:
    """(length, length) which key (column) a query (row) may see; None where it sees all.

    An item has `item` tokens; the item or session being predicted is the last `target` tokens.
    """
    place = torch.arange(length, device=device)
    if kind == "isolated":
        is_target = place >= length - target
        return is_target[:, None] | ~is_target[None, :]
    if kind == "causal":
        return place[:, None] // item >= place[None, :] // item
    return None


def rotary(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(tokens, 1, 1, width) the cosines and signed sines that turn a head's vectors by position.

    Entry `i` is paired with entry `i + width / 2`; all `width / 2` frequencies are in use.
    """
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions.float()[:, None] * rates  # (tokens, width / 2)
    cosines = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sines = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cosines[:, None, None], sines[:, None, None]


def rotate(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """(tokens, ..., heads, width) turned so that products depend on the positions' difference."""
    cosines, sines = rotation
    return torch.addcmul(vectors * cosines, vectors.roll(vectors.shape[-1] // 2, -1), sines)


class Dropout(nn.Module):
    """Dropout that draws a byte, not a float, for each entry where that is what costs time.

    On a CPU torch draws one number an entry, about a tenth of a small network's step; here eight
    entries share a 64-bit draw. The rate is rounded to a multiple of 1/256, and what is kept is
    scaled by that rounded rate, so the expectation is exact.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.dropped = round(rate * 256)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped == 0:
            return x
        if x.device.type != "cpu":
            return functional.dropout(x, self.rate)
        draws = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = draws.view(torch.uint8)[: x.numel()].view(x.shape) >= self.dropped
        return x * (kept * (256 / (256 - self.dropped))).to(x.dtype)


class Block(nn.Module):
    """Attention, then two linear maps with a GELU between, each added to what came in.

    Dropout falls on the two branches, not on the GELU's output: for the paper's 3072 hidden
    entries a token, drawing the random numbers would cost as much as another matrix product on a
    CPU. GELU is the exact one: there, torch's tanh approximation is slower.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.hidden_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        rotation: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        rows: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """(tokens, width), or (rows, width) for the tokens `rows` alone: all that a last block
        needs, and most of its work is done after the attention."""
        attended = self.attend(self.attention_norm(x), layout, rotation, masks, memory)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        x = x + self.dropout(self.out(attended))
        hidden = functional.gelu(self.up(self.hidden_norm(x)))  # (tokens, hidden)
        out: Tensor = x + self.dropout(self.down(hidden))
        return out

    def attend(
        self,
        x: Tensor,
        layout: Layout,
        rotation: tuple[Tensor, Tensor],
        masks: Sequence[Tensor | None],
        memory: Memory | None = None,
    ) -> Tensor:
        """(tokens, width) what each token gathers from the tokens of its sequence."""
        qkv = self.qkv(x).unflatten(1, (3, self.heads, -1))  # (tokens, 3, heads, width of a head)
        queries_keys = rotate(qkv[:, :2], rotation)
        # One split, not a slice a group: the gradient of a slice is as large as the whole.
        parts = zip(
            layout.groups,
            torch.split(queries_keys, layout.sizes),
            torch.split(qkv[:, 2], layout.sizes),
            masks,
            strict=True,
        )
        gathered = []
        for group, ((count, length), both, values, mask) in enumerate(parts):
            q, k = both.view(count, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            v = values.view(count, length, self.heads, -1).transpose(1, 2)
            if memory is not None:
                k, v = memory(group, k, v)
            # (count, heads, length, width of a head). Plain batched products are a little faster
            # below 30 tokens and slower above 60: not worth a second path.
            attended = functional.scaled_dot_product_attention(q, k, v, mask)
            gathered.append(attended.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(gathered)


class Memory(Protocol):
    """Sees a block's keys and values, and may put others before them."""

    def __call__(self, group: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What to attend to, for and from (count, heads, length, width of a head)."""
        ...


class Encoder(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        if config.width % (2 * config.heads):
            raise RequestError(
                f"a width of {config.width} cannot be shared evenly by {config.heads} heads; use a "
                f"multiple of {2 * config.heads}"
            )
        self.head_width = config.width // config.heads
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Maps keep the scale of what they get; the branches of all blocks together add as much
        as comes in, whatever the depth."""
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                branch = name.endswith(("out.weight", "down.weight"))
                scale = (2 * len(self.blocks)) ** -0.5 if branch else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        masks: Sequence[Tensor | None],
        rows: Tensor | None = None,
        memories: Sequence[Memory] | None = None,
    ) -> Tensor:
        """(tokens, width) states, or (rows, width) those of the tokens `rows` alone.

        `masks` holds what `attention_mask` gives for each of the layout's groups; `memories` has
        one for each block.
        """
        rotation = rotary(layout.positions, self.head_width)
        x = self.dropout(x)
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            memory = None if memories is None else memories[i]
            x = block(x, layout, rotation, masks, rows if i == last else None, memory)
        out: Tensor = self.norm(x)
        return out
