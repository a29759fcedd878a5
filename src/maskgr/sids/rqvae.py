"""RQ-VAE: residual codebooks in a latent space learnt together with them (TIGER's quantiser)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from maskgr.devices import pick_device
from maskgr.nn.optimizer import build_optimizer
from maskgr.sids.config import FitOptions, QuantizerConfig
from maskgr.sids.kmeans import k_means, nearest
from maskgr.sids.progress import steps
from maskgr.sids.vectors import Digits, Floats, chunks, fillable_codes, prepare, sample_rows

HIDDEN = (512, 256)  # widths of the encoder's hidden layers; the decoder mirrors them
BATCH = 1024  # vectors per step
LEARNING_RATE = 1e-3  # peak, after warm-up
WEIGHT_DECAY = 1e-4  # on matrices
COMMITMENT = 0.25  # weight of the loss that keeps latents close to their codes
WARMUP = 0.05  # share of the steps
CLIP = 1.0
REVIVALS = 0.8  # share of the steps; after it the learning rate is too low for new codes to settle
PATIENCE = 20  # steps without a use, after which a code is dead


class Rqvae:
    """A fitted RQ-VAE; it encodes and decodes on the CPU, wherever it was trained."""

    name: ClassVar[str] = "rqvae"

    def __init__(self, network: RqvaeNetwork, *, normalise: bool, scale: float) -> None:
        self.network = network.cpu().eval()
        self.normalise = normalise
        self.scale = scale  # vectors are divided by it, so that one learning rate suits all

    @classmethod
    def fit(cls, vectors: npt.ArrayLike, config: QuantizerConfig, options: FitOptions) -> Self:
        rows = prepare(vectors, normalise=options.normalise)
        config = replace(config, codes=max(2, fillable_codes(rows, config.codes)))
        scale = 1.0 if options.normalise else float(np.sqrt(np.square(rows).sum(axis=1).mean()))
        rows /= scale
        with torch.random.fork_rng():  # the caller's random state is left as it was
            torch.manual_seed(options.seed)
            network = RqvaeNetwork(
                rows.shape[1], HIDDEN, config.rqvae_latent, config.levels, config.codes
            )
            _start_codebooks(network, rows, options.seed)
            _train(network.to(pick_device(options.device)), rows, config.rqvae_steps, options)
        return cls(network, normalise=options.normalise, scale=scale)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return tuple(book.num_embeddings for book in self.network.books)

    @torch.no_grad()
    def encode(self, vectors: npt.ArrayLike) -> Digits:
        rows = prepare(vectors, normalise=self.normalise) / self.scale
        digits = np.empty((len(rows), len(self.codebook_sizes)), np.int32)
        for part in chunks(len(rows)):
            residuals = self.network.encoder(torch.from_numpy(rows[part]))
            for level, book in enumerate(self.network.books):
                codes = closest(residuals, book.weight)
                residuals = residuals - book(codes)
                digits[part, level] = codes.numpy()
        return digits

    @torch.no_grad()
    def decode(self, digits: Digits, levels: int | None = None) -> Floats:
        codes = torch.from_numpy(digits.astype(np.int64))
        latent = torch.zeros(len(codes), self.network.latent)
        for level, book in enumerate(self.network.books[:levels]):
            latent += book(codes[:, level])
        rows: Floats = self.network.decoder(latent).numpy() * self.scale
        return rows

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors = {name: value.numpy() for name, value in self.network.state_dict().items()}
        network = self.network.shape
        return tensors, {"network": network, "normalise": self.normalise, "scale": self.scale}

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        network = RqvaeNetwork(**settings["network"])
        network.load_state_dict({name: torch.from_numpy(t) for name, t in tensors.items()})
        return cls(network, normalise=settings["normalise"], scale=settings["scale"])


class RqvaeNetwork(nn.Module):
    """Encoder, codebooks, decoder."""

    def __init__(
        self, dimensions: int, hidden: Sequence[int], latent: int, levels: int, codes: int
    ) -> None:
        super().__init__()
        self.latent = latent
        self.shape = {
            "dimensions": dimensions,
            "hidden": list(hidden),
            "latent": latent,
            "levels": levels,
            "codes": codes,
        }
        widths = (dimensions, *hidden, latent)
        self.encoder = _perceptron(widths)
        self.decoder = _perceptron(widths[::-1])
        self.codebooks = nn.ModuleList(nn.Embedding(codes, latent) for _ in range(levels))

    @property
    def books(self) -> list[nn.Embedding]:
        return [book for book in self.codebooks if isinstance(book, nn.Embedding)]

    def loss(self, rows: Tensor) -> tuple[Tensor, Quantised]:
        """The reconstruction error plus the losses that draw codes and latents together."""
        latents = self.encoder(rows)  # (batch, latent)
        quantised = Quantised(latents, self.books)
        passed = rotation(latents, quantised.total)
        error = (self.decoder(passed) - rows).square().sum(dim=1).mean()
        return error + quantised.codebook_loss + COMMITMENT * quantised.commitment_loss, quantised


class Quantised:
    """Latents quantised level by level, with the losses of the codebooks."""

    def __init__(self, latents: Tensor, books: list[nn.Embedding]) -> None:
        self.residuals: list[Tensor] = []  # per level (batch, latent), its code not yet subtracted
        self.codes: list[Tensor] = []  # per level (batch,)
        self.total = torch.zeros_like(latents)
        self.codebook_loss = latents.new_zeros(())
        self.commitment_loss = latents.new_zeros(())
        residual = latents
        for book in books:
            codes = closest(residual.detach(), book.weight.detach())
            chosen = book(codes)
            self.residuals.append(residual.detach())
            self.codes.append(codes)
            self.total = self.total + chosen.detach()
            self.codebook_loss = self.codebook_loss + _gap(chosen, residual.detach())
            self.commitment_loss = self.commitment_loss + _gap(residual, chosen.detach())
            residual = residual - chosen.detach()


def rotation(latents: Tensor, quantised: Tensor) -> Tensor:
    """`quantised` as a rotation and scaling of `latents`, through which gradients flow back.

    The rotation trick of Fifty et al. (2024), section 4.2: points of a cell that are pushed
    apart by the gradient stay apart, where a straight-through estimator moves all of them alike.
    """
    with torch.no_grad():
        length = latents.norm(dim=1, keepdim=True).clamp_min(1e-6)
        target = quantised.norm(dim=1, keepdim=True).clamp_min(1e-6)
        source_unit, target_unit = latents / length, quantised / target
        middle = nn.functional.normalize(source_unit + target_unit, dim=1)
        scale = target / length
    reflected = latents - 2 * middle * (latents * middle).sum(dim=1, keepdim=True)
    turned = reflected + 2 * target_unit * (latents * source_unit).sum(dim=1, keepdim=True)
    result: Tensor = scale * turned
    return result


def closest(points: Tensor, codes: Tensor) -> Tensor:
    """(n,) the index of the code closest to each point."""
    distances = codes.square().sum(dim=1) - 2 * points @ codes.T  # (n, codes), |point|² left out
    return distances.argmin(dim=1)


def _perceptron(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _gap(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(dim=1).mean()


@torch.no_grad()
def _start_codebooks(network: RqvaeNetwork, rows: Floats, seed: int) -> None:
    """K-means on the latents of the untrained encoder, so that no code starts dead."""
    codes = network.books[0].num_embeddings
    sample = rows[sample_rows(len(rows), codes, seed)]
    residuals = network.encoder(torch.from_numpy(sample)).numpy()
    for level, book in enumerate(network.books):
        centroids = k_means(residuals, codes, seed=seed + level, restarts=1)
        book.weight.copy_(torch.from_numpy(centroids))
        residuals = residuals - centroids[nearest(residuals, centroids)]


def _train(network: RqvaeNetwork, rows: Floats, total: int, options: FitOptions) -> None:
    device = next(network.parameters()).device
    optimizer = build_optimizer(network, LEARNING_RATE, WEIGHT_DECAY)
    warmup = max(1, round(WARMUP * total))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / total)),
    )
    books = network.books
    idle = torch.zeros(len(books), books[0].num_embeddings, device=device)  # steps without a use
    batches = _batches(len(rows), BATCH, options.seed)
    network.train()
    for step in steps(total, "RQ-VAE", shown=options.progress):
        loss, quantised = network.loss(torch.from_numpy(rows[next(batches)]).to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        rates.step()
        if step < REVIVALS * total:
            _revive(network, quantised, idle)


@torch.no_grad()
def _revive(network: RqvaeNetwork, quantised: Quantised, idle: Tensor) -> None:
    """Moves codes that no vector has used for `PATIENCE` steps onto residuals of this batch."""
    idle += 1
    for level, book in enumerate(network.books):
        idle[level, quantised.codes[level]] = 0
        dead = torch.nonzero(idle[level] > PATIENCE)[:, 0]
        residuals = quantised.residuals[level]
        dead = dead[: len(residuals)]
        if len(dead):
            rows = torch.randperm(len(residuals))[: len(dead)].to(residuals.device)
            book.weight[dead] = residuals[rows]
            idle[level, dead] = 0


def _batches(count: int, size: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers, epoch after epoch, each in a new order."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(count)
        yield from (order[start : start + size] for start in range(0, count, size))
