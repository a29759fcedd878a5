"""CaDiRec (Cui et al., 2024): SASRec, with contrastive views that a diffusion model generates.

Some items of each training sequence are noised, and a bidirectional transformer that sees the
others predicts them: the diffusion loss. With these items replaced by items near the predictions,
twice at random, there are two views of the sequence that fit its context. The contrastive loss
draws the backbone's states after the two views together, and away from those of other sequences.
Both losses are for training alone: ranking is SASRec's.
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

from maskgr.data.sequences import Counts, Sequences
from maskgr.data.splits import Holdout
from maskgr.devices import pick_device
from maskgr.evaluation.ranking import Query, Ranked
from maskgr.models.base import TrainConfig, Training
from maskgr.models.sasrec import SASRec, SASRecConfig
from maskgr.nn.gaussian import GaussianDiffusion, time_embedding
from maskgr.nn.scoring import best_items
from maskgr.nn.softmax import catalogue_cross_entropy
from maskgr.nn.transformer import Dropout, Encoder, Layout, TransformerConfig
from maskgr.nn.weights import COUNTS, load_counts, load_weights, save_weights
from maskgr.settings import require_choice, require_numbers
from maskgr.training.fit import Batch, FitConfig, Trainable

WEIGHTS = "network.safetensors"

Loss = Literal["bce", "softmax"]


@dataclass(frozen=True)
class CaDiRecConfig:
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    loss: Loss = "bce"
    """The backbone's loss: binary with one negative (published), or a softmax over all items."""
    denoiser_layers: int = 2
    """Layers of the bidirectional transformer that predicts noised items; it is as wide as the
    backbone."""
    denoiser_dropout: float = 0.2
    """Share of its entries that are dropped in training."""
    noised_share: float = 0.1
    """Probability that an item of a sequence is noised, and replaced in the views (rho)."""
    diffusion_steps: int = 1000
    """Steps of the noise, from almost none to nothing else."""
    nearest: int = 10
    """A view takes one of this many items nearest to a prediction, at random."""
    diffusion_weight: float = 0.2
    """Weight of the diffusion loss beside the backbone's (beta)."""
    contrast_weight: float = 0.1
    """Weight of the contrastive loss beside the backbone's (alpha)."""
    temperature: float = 1.0
    """Divides the products of states in the contrastive loss."""

    def __post_init__(self) -> None:
        require_choice("loss", self.loss, Loss)
        require_numbers(
            self,
            denoiser_layers=(1, 1000),
            denoiser_dropout=(0, 0.99),
            noised_share=(0, 0.99),
            diffusion_steps=(1, 100_000),
            nearest=(1, 100_000),
            diffusion_weight=(0, 1000),
            contrast_weight=(0, 1000),
            temperature=(1e-4, 100),
        )

    @property
    def denoiser(self) -> TransformerConfig:
        own, layers = self.transformer, self.denoiser_layers
        return replace(own, layers=layers, dropout=self.denoiser_dropout)


@dataclass(frozen=True, eq=False)
class ViewBatch(Batch):
    """A batch with its noise and the choices of its views.

    The inputs are the sequences' items less the last of each, which is a target alone.
    """

    targets: Batch  # the same, with what the backbone's loss draws for them
    chosen: Tensor  # (inputs,) bool: noised, and replaced in the views
    times: Tensor  # (sequences,) the step of the noise
    noise: Tensor  # (inputs, 2, width) standard: of the embedding, and of the diffusion
    picks: Tensor  # (inputs, 2) which of the nearest items each view takes
    noised_weight: float  # of a noised item's loss, where a target's is 1
    view_weight: float  # of a view's loss

    def part(self, rows: np.ndarray) -> ViewBatch:
        inputs = self.sequences.without_last()
        kept = inputs.select(rows)
        starts = np.repeat(inputs.offsets[:-1][rows], kept.lengths)
        places = torch.from_numpy(starts + kept.places)
        return replace(
            self,
            sequences=self.sequences.select(rows),
            targets=self.targets.part(rows),
            chosen=self.chosen[places],
            times=self.times[torch.from_numpy(rows)],
            noise=self.noise[places],
            picks=self.picks[places],
        )


class Denoiser(nn.Module):
    """Predicts the vectors of noised items from all items of their sequences."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.time = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config)

    def forward(self, vectors: Tensor, layout: Layout, times: Tensor, rows: Tensor) -> Tensor:
        """(rows, width) predictions for the tokens `rows`; `vectors` (tokens, width), noised or
        not, `times` (sequences,)."""
        when = self.time(time_embedding(times, vectors.shape[1])).index_select(0, layout.sequences)
        embedded = self.dropout(self.norm(vectors + when))
        everything = [None] * len(layout.groups)
        predicted: Tensor = self.encoder(embedded, layout, everything, rows=rows)[0]
        return predicted


class CaDiRec(Trainable):
    """The network, and the model: it is trained by `fit`, and its backbone ranks items."""

    about: ClassVar = "causal transformer over item IDs, with contrastive views made by diffusion"
    needs: ClassVar = "nothing"
    Config: ClassVar[type[Any]] = CaDiRecConfig
    supports_ddp: ClassVar = True
    weighs_events = True  # in the backbone's loss; the other two are about context
    uses_sids: ClassVar = False
    presets: ClassVar[Mapping[str, TrainConfig]]

    def __init__(self, config: CaDiRecConfig, counts: Counts, history_limit: int = 20) -> None:
        """`counts` (items,): training events of each item."""
        super().__init__()
        self.config, self.counts = config, counts
        backbone = SASRecConfig(config.transformer, loss=config.loss)
        self.backbone = SASRec(backbone, counts, history_limit=history_limit)
        self.denoiser = Denoiser(config.denoiser)
        self.diffusion = GaussianDiffusion("sqrt", config.diffusion_steps)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    # Training

    def prepare(self, sequences: Sequences, generator: torch.Generator) -> ViewBatch:
        """Draws noise, picks and, for the binary loss, negatives.

        The losses are the means that the paper adds up: the backbone's a mean over the targets, the
        contrastive one over the views, the diffusion loss a mean over the noised items, times the
        share of sequences that have one.
        """
        targets = self.backbone.prepare(sequences, generator)
        inputs, width = sequences.without_last(), self.config.transformer.width
        count = len(inputs.values)
        chosen = torch.rand(count, generator=generator) < self.config.noised_share
        with_input = int((inputs.lengths > 0).sum())
        with_chosen = len(np.unique(inputs.owners[chosen.numpy()]))
        each = targets.weight / max(with_input, 1)  # what a sequence's mean stands for
        return ViewBatch(
            sequences,
            targets.weight,
            targets,
            chosen=chosen,
            times=torch.randint(self.diffusion.steps, (len(sequences),), generator=generator),
            noise=torch.randn(count, 2, width, generator=generator),
            picks=torch.randint(self._nearest, (count, 2), generator=generator),
            noised_weight=each * with_chosen / max(int(chosen.sum()), 1),
            view_weight=each / 2,
        )

    def forward(self, batch: ViewBatch) -> Tensor:
        """() the summed losses of the targets, the noised items and the views.

        A view is contrasted with those of the same part of a batch: of one process.
        """
        targets = replace(batch.targets, sequences=batch.sequences)
        rows = np.flatnonzero(batch.sequences.lengths > 1)
        if not len(rows):  # items alone, without context, or more processes than sequences
            unused = (p.sum() for p in self.denoiser.parameters())
            loss: Tensor = self.backbone(targets) + 0 * sum(unused, self.backbone.start.sum())
            return loss
        inputs = batch.sequences.select(rows).without_last()
        items = torch.from_numpy(inputs.values).to(self.device).long()
        chosen = batch.chosen.to(self.device)
        places = chosen.nonzero().squeeze(1)
        table = self.backbone.items()
        times = batch.times[torch.from_numpy(rows)].to(self.device)
        predicted = self.predict(table[items], inputs, places, times, batch.noise.to(self.device))
        noised = catalogue_cross_entropy(predicted, table, items[places])
        replaced = self.replaced(items, places, predicted, table, batch.picks.to(self.device))
        views = info_nce(self.view_states(inputs, replaced), self.config.temperature)
        weights = self.config.diffusion_weight, self.config.contrast_weight
        loss = self.backbone(targets) + weights[0] * batch.noised_weight * noised
        return loss + weights[1] * batch.view_weight * views

    def predict(
        self, vectors: Tensor, inputs: Sequences, places: Tensor, times: Tensor, noise: Tensor
    ) -> Tensor:
        """(places, width) predictions for the items at `places`, whose products with item vectors
        are logits.

        `vectors` (inputs, width), `noise` (inputs, 2, width). As in Diffusion-LM an item's vector
        is the mean of x_0, which has the variance of the first step, and x_0 is what is noised; the
        context is not noised further.
        """
        layout = Layout.of(inputs.lengths.tolist(), self.device)
        first = (1 - self.diffusion.alpha_bar[0]).sqrt()
        clean = vectors + first * noise[:, 0]
        noised = self.diffusion.noised(
            clean[places], times[layout.sequences[places]], noise[places, 1]
        )
        mixed = clean.index_put((places,), noised)
        scale = vectors.shape[1] ** -0.5
        predicted: Tensor = self.denoiser(mixed, layout, times, places) * scale
        return predicted

    @torch.no_grad()
    def replaced(
        self, items: Tensor, places: Tensor, predicted: Tensor, table: Tensor, picks: Tensor
    ) -> Tensor:
        """(inputs, 2) the items of the two views: `items` (inputs,), but at `places` one of those
        nearest to what is `predicted` there, as `picks` (inputs, 2) says."""
        nearest, _ = best_items(predicted, table, self._nearest)
        both = items[:, None].repeat(1, 2)
        both[places] = nearest.gather(1, picks[places])
        return both

    @property
    def _nearest(self) -> int:
        return min(self.config.nearest, len(self.counts))

    def view_states(self, inputs: Sequences, replaced: Tensor) -> Tensor:
        """(2 sequences, width) the backbone's states after the views of each sequence, which come
        in pairs. The views' item vectors are read, not taught."""
        pairs = inputs.select(np.repeat(np.arange(len(inputs)), 2))
        source, view = pairs.owners // 2, pairs.owners % 2
        numbers = replaced.cpu()[inputs.offsets[source] + pairs.places, view]
        views = replace(pairs, values=numbers.int().numpy())
        vectors = self.backbone.items(numbers.to(self.device)).detach()
        hidden, _ = self.backbone.encode(views, vectors)
        ends = torch.from_numpy(np.cumsum(views.lengths + 1) - 1)
        return hidden.index_select(0, ends.to(self.device))

    def validate(self, holdout: Holdout) -> dict[str, float]:
        return self.backbone.validate(holdout)

    @classmethod
    def learn(cls, training: Training) -> Self:
        torch.manual_seed(training.config.seed)
        config = training.config
        model = cls(config.model, training.counts, config.history_limit)
        training.fit(model)
        return model.eval()

    # Retrieval

    def rank(self, query: Query) -> Ranked:
        return self.backbone.rank(query)

    def item_vectors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self.backbone.item_vectors(numbers)

    def save(self, folder: Path) -> None:
        save_weights(self, folder / WEIGHTS)
        np.save(folder / COUNTS, self.counts)

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> Self:
        model = cls(config.model, load_counts(folder), config.history_limit)
        load_weights(model, folder / WEIGHTS)
        return model.to(pick_device(config.device)).eval()


def info_nce(states: Tensor, temperature: float) -> Tensor:
    """() sum over rows of -log softmax(products with all other rows)[the other view].

    `states` (2 sequences, width): rows 2 i and 2 i + 1 are two views of sequence i.
    """
    states = states.float()
    numbers = torch.arange(len(states), device=states.device)
    scores = (states @ states.T) / temperature
    scores = scores.masked_fill(numbers[:, None] == numbers, -torch.inf)
    return functional.cross_entropy(scores, numbers ^ 1, reduction="sum")


CaDiRec.presets = {
    "tiny": TrainConfig(
        "cadirec",
        CaDiRecConfig(TransformerConfig(layers=1, width=32, heads=2, hidden=64), denoiser_layers=1),
        FitConfig(steps=200, token_budget=2048, learning_rate=3e-3, validations=4),
    ),
    # The backbone of the preset `cpu` of `sasrec`, with its loss.
    "cpu": TrainConfig(
        "cadirec",
        CaDiRecConfig(
            TransformerConfig(layers=2, width=64, heads=2, hidden=256, dropout=0.5), loss="softmax"
        ),
        FitConfig(minutes=40, token_budget=1600, learning_rate=1e-3),
    ),
    # The authors' code (github.com/ziqiangcui/CaDiRec, configs/cadirec_config_beauty.py): two
    # layers, two heads, width 64, 128 hidden entries, dropout 0.5, 50 items; a denoiser (DeBERTa)
    # of two layers and dropout 0.2; rho 0.1, 1000 steps, sqrt schedule, alpha 0.1, beta 0.2,
    # temperature 1; 400 epochs of batches of 256 sequences (about seven items each), Adam at 1e-3.
    # On MovieLens: dropout=0.1, denoiser_layers=1, diffusion_weight=0.1, history_limit=200.
    # Ours differs in what it is built of: norms before the branches instead of after them, rotary
    # (relative) positions in the backbone (published: learned), no dropout of attention weights,
    # normalised item vectors, a start token, a linear map from states to queries, negatives that
    # are not the target (published: no item of the user), a learning rate that falls by a cosine,
    # and a diffusion loss in which each noised item counts alike, instead of each sequence.
    "published": TrainConfig(
        "cadirec",
        CaDiRecConfig(TransformerConfig(layers=2, width=64, heads=2, hidden=128, dropout=0.5)),
        FitConfig(steps=35_000, token_budget=1760, learning_rate=1e-3, weight_decay=0.0, ema=0.0),
        history_limit=50,
    ),
}
