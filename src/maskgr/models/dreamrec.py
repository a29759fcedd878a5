"""DreamRec (Yang et al., 2023): diffusion generates the embedding of the next item.

A causal transformer reads the history; its last state guides a small network that takes Gaussian
noise from an embedding. Training noises the next item's embedding and asks for it back; ranking
starts from pure noise and orders items by their products with what it ends at.

As published the squared error trains the embeddings in which it is measured, too: they shrink, and
nothing brings together those of items that go together. The remedy, `contrasted`, follows DimeRec
(Li et al., 2024) and ADRec (Chen et al., 2025): a softmax over the catalogue trains the embeddings,
and the diffusion takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from maskgr.data.sequences import Sequences
from maskgr.data.splits import Holdout
from maskgr.decoding.orders import history_seeds
from maskgr.devices import pick_device
from maskgr.errors import RequestError
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.models.retrieval import rank_items, validation_recall
from maskgr.nn.gaussian import (
    GaussianDiffusion,
    Schedule,
    guided,
    seeded_noise,
    time_embedding,
)
from maskgr.nn.softmax import catalogue_cross_entropy
from maskgr.nn.transformer import Dropout, Encoder, Layout, TransformerConfig, causal_mask
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.settings import require_at_least, require_choice
from maskgr.training.fit import Batch, FitConfig, Trainable

WEIGHTS = "network.safetensors"
OWN_STD = 0.02  # of embeddings at the start, where their lengths do not matter

Embeddings = Literal["free", "contrasted"]


@dataclass(frozen=True)
class DreamRecConfig:
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    embeddings: Embeddings = "contrasted"
    """`free`, as published: trained by the squared error. `contrasted`: of equal length, trained by
    a cross-entropy over all items; the diffusion's predictions have one too."""
    temperature: float = 0.1
    """Divides the cosines of the cross-entropies where embeddings are contrasted."""
    schedule: Schedule = "exponential"
    """How noise grows."""
    diffusion_steps: int = 500
    """Steps of the noise, from almost none to almost nothing else."""
    null_share: float = 0.1
    """Probability with which training replaces the guidance by a learned null vector."""
    guidance: float = 2.0
    """How far a prediction is moved away from that without history; 0 leaves it alone."""
    sampling_steps: int = 20
    """Steps of DDIM with which an embedding is generated; 0: all steps of the noise, with new noise
    in each, as published."""

    def __post_init__(self) -> None:
        require_choice("embeddings", self.embeddings, Embeddings)
        require_choice("schedule", self.schedule, Schedule)
        require_at_least("diffusion_steps", self.diffusion_steps, 1)
        require_at_least("sampling_steps", self.sampling_steps, 0)
        if self.sampling_steps > self.diffusion_steps:
            raise RequestError(
                f"sampling_steps is {self.sampling_steps}, more than the {self.diffusion_steps} "
                "diffusion_steps; use as many at most"
            )
        if not self.temperature > 0:
            raise RequestError(f"temperature is {self.temperature}; use a number above 0")
        if not 0 <= self.null_share < 1:
            raise RequestError(f"null_share is {self.null_share}; use 0 or more, below 1")
        if not self.guidance >= 0:
            raise RequestError(f"guidance is {self.guidance}; use 0 or more")


@dataclass(frozen=True, eq=False)
class NoisyBatch(Batch):
    """A batch with the noise of its targets: every item of a sequence but the first."""

    times: Tensor  # (targets,) the step of the noise
    noise: Tensor  # (targets, width) standard
    unguided: Tensor  # (targets,) bool: the null vector instead of the history

    def part(self, rows: np.ndarray) -> NoisyBatch:
        histories = self.sequences.without_last()  # a target for each of their items
        kept = histories.select(rows)
        starts = np.repeat(histories.offsets[:-1][rows], kept.lengths)
        places = torch.from_numpy(starts + kept.places)
        return replace(
            self,
            sequences=self.sequences.select(rows),
            times=self.times[places],
            noise=self.noise[places],
            unguided=self.unguided[places],
        )


class Denoiser(nn.Module):
    """Predicts a clean embedding by one linear map of the noisy one, the guidance and the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.predict = nn.Linear(3 * width, width)

    def forward(self, noisy: Tensor, guidance: Tensor, times: Tensor) -> Tensor:
        """(rows, width) from `noisy` and `guidance` (rows, width) and `times` (rows,)."""
        when = self.time(time_embedding(times, noisy.shape[1]))
        predicted: Tensor = self.predict(torch.cat([noisy, guidance, when], dim=1))
        return predicted


class DreamRec(Trainable):
    """The network, and the model: it is trained by `fit` and ranks items."""

    about: ClassVar = "diffusion that generates the embedding of the next item"
    needs: ClassVar = "nothing"
    Config: ClassVar[type[Any]] = DreamRecConfig
    supports_ddp: ClassVar = True
    uses_sids: ClassVar = False
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(
        self,
        config: DreamRecConfig,
        counts: npt.NDArray[np.int64],
        history_limit: int = 10,
        seed: int = 0,
    ) -> None:
        """`counts` (items,): training events of each item. `seed`: of the noise of ranking."""
        super().__init__()
        self.config, self.counts = config, counts
        self.history_limit, self.seed = history_limit, seed
        width = config.transformer.width
        self.items = nn.Embedding(len(counts), width)
        nn.init.normal_(self.items.weight, std=1.0 if config.embeddings == "free" else OWN_STD)
        self.null = nn.Parameter(torch.randn(1, width))
        self.dropout = Dropout(config.transformer.dropout)
        self.encoder = Encoder(config.transformer)
        self.denoiser = Denoiser(width)
        self.query = nn.Linear(width, width) if config.embeddings == "contrasted" else None
        if self.query is not None:
            nn.init.eye_(self.query.weight)  # a history first asks for what is like its last item
            nn.init.zeros_(self.query.bias)
        self.diffusion = GaussianDiffusion(config.schedule, config.diffusion_steps)
        self._table: Tensor | None = None  # (items, width) while in evaluation mode

    @property
    def device(self) -> torch.device:
        return self.null.device

    @property
    def width(self) -> int:
        return self.config.transformer.width

    def train(self, mode: bool = True) -> Self:
        self._table = None
        return super().train(mode)

    # The network

    def vectors(self) -> Tensor:
        """(items, width) the embeddings of the whole catalogue. Where they are of equal length,
        their entries have a variance of 1, as those of the noise have."""
        if self.config.embeddings == "free":
            return self.items.weight
        scaled: Tensor = functional.normalize(self.items.weight, dim=1) * self.width**0.5
        return scaled

    def encode(self, histories: Sequences, table: Tensor) -> Tensor:
        """(items, width) hidden states of histories, none empty, shortest first: what is known
        after each item."""
        layout = Layout.of(histories.lengths.tolist(), self.device)
        masks = [causal_mask(length, self.device) for _, length in layout.groups]
        hidden: Tensor = self.encoder(
            self.dropout(functional.embedding(self._numbers(histories), table)), layout, masks
        )[0]
        return hidden

    def _numbers(self, sequences: Sequences) -> Tensor:
        return torch.from_numpy(sequences.values).to(self.device).long()

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> NoisyBatch:
        count = len(sequences.without_last().values)
        return NoisyBatch(
            sequences,
            float(max(count, 1)),
            times=torch.randint(self.diffusion.steps, (count,), generator=generator),
            noise=torch.randn(count, self.width, generator=generator),
            unguided=torch.rand(count, generator=generator) < self.config.null_share,
        )

    def forward(self, batch: NoisyBatch) -> Tensor:
        """() the summed loss of every item of the batch that has items before it."""
        rows = np.flatnonzero(batch.sequences.lengths > 1)
        if not len(rows):  # or more processes than sequences
            return 0 * sum((p.sum() for p in self.parameters()), self.null.sum())
        sequences, table = batch.sequences.select(rows), self.vectors()
        hidden = self.encode(sequences.without_last(), table)
        targets = self._numbers(sequences)[torch.from_numpy(sequences.places > 0)]
        guidance = torch.where(batch.unguided[:, None].to(self.device), self.null, hidden)
        if self.query is None:
            return self._squared_error(batch, guidance, table, targets)[0]
        history = catalogue_cross_entropy(self.queries(self.query(hidden)), table, targets)
        # The diffusion would teach embeddings to be far apart, so that little noise hides none.
        table = table.detach()
        error, predicted = self._squared_error(batch, guidance, table, targets)
        diffusion = catalogue_cross_entropy(self.queries(predicted), table, targets)
        return history + error + diffusion

    def _squared_error(
        self, batch: NoisyBatch, guidance: Tensor, table: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """() the squared error of an entry, summed over `targets` (targets,); and (targets, width)
        what is predicted."""
        clean, times = functional.embedding(targets, table), batch.times.to(self.device)
        noisy = self.diffusion.noised(clean, times, batch.noise.to(self.device))
        predicted: Tensor = self.denoiser(noisy, guidance, times)
        return (predicted - clean).square().mean(1).sum(), predicted

    def validate(self, holdout: Holdout) -> dict[str, float]:
        return validation_recall(self.rank, holdout, len(self.counts))

    @classmethod
    def learn(cls, training: Training) -> Self:
        config = training.config
        torch.manual_seed(config.seed)
        model = cls(config.model, training.counts, config.history_limit, config.seed)
        training.fit(model)
        return model.eval()

    # Retrieval

    @torch.no_grad()
    def rank(self, query: Query) -> Ranked:
        if self.training:
            self.eval()
        if self._table is None:
            self._table = self.vectors().detach()
        return rank_items(
            query,
            lambda histories: self.queries(self.generate(histories)),
            self._table,
            history_limit=self.history_limit,
        )

    def queries(self, embeddings: Tensor) -> Tensor:
        """(rows, width) whose products with `vectors` are logits: products with `embeddings`, as
        published, or their cosines over the temperature."""
        if self.config.embeddings == "free":
            return embeddings
        scaled: Tensor = functional.normalize(embeddings, dim=1) * self.width**-0.5
        return scaled / self.config.temperature

    def generate(self, histories: Sequences) -> Tensor:
        """(users, width) the generated embedding of the item after each history, shortest first.

        Its noise follows from the history: a user's answer does not depend on other users.
        """
        weight, recent = self.config.guidance, histories.last(self.history_limit)
        guidance = self.guide(recent)
        null = self.null.expand_as(guidance)

        def predict(noisy: Tensor, times: Tensor) -> Tensor:
            predicted: Tensor = self.denoiser(noisy, guidance, times)
            if not weight:
                return predicted
            return guided(predicted, self.denoiser(noisy, null, times), weight)

        noises = seeded_noise(history_seeds(recent, self.seed), self.width, self.device)
        start = next(noises)
        if self.config.sampling_steps:
            return self.diffusion.ddim(predict, start, self.config.sampling_steps)
        return self.diffusion.ancestral(predict, start, noises)

    def guide(self, histories: Sequences) -> Tensor:
        """(users, width) the hidden state after each history, shortest first; the null vector where
        there is none."""
        known = histories.select(np.flatnonzero(histories.lengths > 0))
        unknown = self.null.expand(len(histories) - len(known), -1)
        if not len(known):
            return unknown
        table = self._table if self._table is not None else self.vectors()
        hidden = self.encode(known, table)
        ends = torch.from_numpy(known.offsets[1:] - 1).to(self.device)
        return torch.cat([unknown, hidden.index_select(0, ends)])

    @torch.no_grad()
    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self.vectors()[torch.from_numpy(numbers).to(self.device)].float().cpu().numpy()

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        np.save(folder / COUNTS, self.counts)

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        model = cls(config.model, load_counts(folder), config.history_limit, config.seed)
        load_weights(model, folder / WEIGHTS)
        return model.to(pick_device(config.device)).eval()


DreamRec.presets = {
    "tiny": TrainConfig(
        "dreamrec",
        DreamRecConfig(TransformerConfig(layers=1, width=32, heads=2, hidden=64)),
        FitConfig(steps=200, token_budget=2048, learning_rate=3e-3, validations=4),
        history_limit=10,
    ),
    "cpu": TrainConfig(
        "dreamrec",
        DreamRecConfig(TransformerConfig(layers=1, width=64, heads=2, hidden=256, dropout=0.5)),
        FitConfig(minutes=40, token_budget=1600, learning_rate=1e-3),
        history_limit=10,
    ),
    # The authors' code (github.com/YangZhengyi98/DreamRec, README.md, YooChoose): one block, one
    # head, width 64, dropout 0.1, ten items; embeddings and null vector from N(0, 1); a linear map
    # as denoiser (mlp1), 500 steps, exponential schedule, the null vector for 0.1 of the samples,
    # w = 2, ancestral sampling; AdamW at 1e-3 without decay, batches of 256 samples, up to 1000
    # epochs. On KuaiRec: 2000 steps, a rate of 1e-4. Nothing is known of Beauty.
    # Ours differs in what it is built of: rotary (relative) positions instead of learned (absolute)
    # ones, GELU instead of ReLU, no dropout of attention weights, every position of a sequence
    # trained at once instead of one a sample, and a learning rate that falls by a cosine.
    "published": TrainConfig(
        "dreamrec",
        DreamRecConfig(
            TransformerConfig(layers=1, width=64, heads=1, hidden=64, dropout=0.1),
            embeddings="free",
            sampling_steps=0,
        ),
        FitConfig(minutes=40, token_budget=320, learning_rate=1e-3, weight_decay=0.0, ema=0.0),
        history_limit=10,
    ),
}
