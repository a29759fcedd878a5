"""A pre-norm transformer encoder over sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.config import NetworkConfig
from maskgr.errors import RequestError
from maskgr.nn.layout import Layout


@lru_cache(maxsize=1024)
def isolated_mask(length: int, target: int, device: torch.device) -> Tensor:
    """(length, length) which key (column) a query (row) may see: all but the last `target` tokens,
    which only these themselves see."""
    is_target = torch.arange(length, device=device) >= length - target
    return is_target[:, None] | ~is_target[None, :]


@lru_cache(maxsize=1024)
def causal_mask(items: int, unit: int, copy: int, device: torch.device) -> Tensor:
    """(length, length) the same for a start, the history of `unit` tokens an item, and a `copy` of
    this many masked tokens for each of the `items`, of which the last is no history.

    A token of the history sees the history up to its own item, a copy what comes before its item,
    and itself. `copy` = 0: the history alone.
    """
    numbers = torch.arange(items, device=device)
    start = torch.full((1,), -1, device=device)
    past = torch.cat([start, numbers[:-1].repeat_interleave(unit)])
    owners = torch.cat([past, numbers.repeat_interleave(copy)])  # (length,)
    is_copy = torch.arange(len(owners), device=device) >= len(past)
    query, key = owners[:, None], owners[None, :]
    sees_history = ~is_copy[None, :] & (key <= query - is_copy[:, None].long())
    return sees_history | (is_copy[:, None] & is_copy[None, :] & (key == query))


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


class Tap(NamedTuple):
    """Where states are wanted on the way."""

    layer: int  # after so many layers
    rows: Tensor  # (rows,) of these tokens


class Encoder(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        if config.width % (2 * config.heads):
            raise RequestError(
                f"a width of {config.width} cannot be shared evenly by {config.heads} heads; use a "
                f"multiple of {2 * config.heads}"
            )
        self.head_width = config.width // config.heads
        self.history_blocks = nn.ModuleList(Block(config) for _ in range(config.history_layers))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Maps keep the scale of what they get; the branches of all blocks together add a tenth
        of what comes in, whatever the depth: a state starts as what its token is."""
        depth = len(self.history_blocks) + len(self.blocks)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                branch = name.endswith(("out.weight", "down.weight"))
                scale = 0.1 * (2 * depth) ** -0.5 if branch else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)

    def history(self, x: Tensor, layout: Layout, masks: Sequence[Tensor | None]) -> Tensor:
        """(tokens, width) what the history is before the masked digits join it."""
        if len(self.history_blocks):
            rotation = rotary(layout.positions, self.head_width)
            for block in self.history_blocks:
                x = block(x, layout, rotation, masks)
        return x

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        masks: Sequence[Tensor | None],
        rows: Tensor | None = None,
        memories: Sequence[Memory] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, width) states, or (rows, width) those of the tokens `rows` alone; and what is
        tapped, before the last norm.

        `masks` has what a token may see for each of the layout's groups (None: everything);
        `memories` has one for each block.
        """
        rotation = rotary(layout.positions, self.head_width)
        last, tapped = len(self.blocks) - 1, None
        for i, block in enumerate(self.blocks):
            memory = None if memories is None else memories[i]
            picked = rows if i == last else None
            if tap is None or tap.layer != i + 1:
                x = block(x, layout, rotation, masks, picked, memory)
            elif picked is None:
                x = block(x, layout, rotation, masks, None, memory)
                tapped = x.index_select(0, tap.rows)
            else:
                picked = torch.cat([picked, tap.rows])
                x = block(x, layout, rotation, masks, picked, memory)
                x, tapped = torch.split(x, [len(picked) - len(tap.rows), len(tap.rows)])
        out: Tensor = self.norm(x)
        return out, tapped
