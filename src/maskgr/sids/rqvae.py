"""RQ-VAE: residual codebooks in a space that is learnt together with them (TIGER's quantiser)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from maskgr.devices import pick_device
from maskgr.nn.optimizer import build_optimizer, clip_gradients, schedule
from maskgr.sids.config import QuantizerConfig
from maskgr.sids.kmeans import k_means, nearest, sample_rows
from maskgr.sids.vectors import Digits, Floats, chunks, normalise, require_distinct

WARMUP = 0.05  # of all steps
CLIP = 1.0
REVIVALS = 0.8  # of all steps: what comes later has too little learning rate left to settle
PATIENCE = 20  # steps without a use, after which a code is dead


class Rqvae:
    """A fitted RQ-VAE; it encodes and decodes on the CPU, wherever it was trained."""

    name: ClassVar[str] = "rqvae"

    def __init__(self, network: RqvaeNetwork) -> None:
        self.network = network.cpu().eval()

    @classmethod
    def fit(
        cls, vectors: npt.ArrayLike, config: QuantizerConfig, *, progress: bool = False
    ) -> Self:
        rows = normalise(vectors)
        require_distinct(rows, config.codes)
        with torch.random.fork_rng():  # the caller's random state is left as it was
            torch.manual_seed(config.seed)
            network = RqvaeNetwork(
                rows.shape[1],
                config.rqvae_hidden,
                config.rqvae_latent,
                config.levels,
                config.codes,
            )
            _start_codebooks(network, rows, config)
            _train(network.to(pick_device(config.device)), rows, config, progress)
        return cls(network)

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return tuple(book.num_embeddings for book in self.network.books)

    @torch.no_grad()
    def encode(self, vectors: npt.ArrayLike) -> Digits:
        rows = normalise(vectors)
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
        rows: Floats = self.network.decoder(latent).numpy()
        return rows

    def state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        tensors = {name: value.numpy() for name, value in self.network.state_dict().items()}
        return tensors, self.network.shape

    @classmethod
    def from_state(cls, tensors: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Self:
        network = RqvaeNetwork(
            settings["dimensions"],
            tuple(settings["hidden"]),
            settings["latent"],
            settings["levels"],
            settings["codes"],
        )
        network.load_state_dict({name: torch.from_numpy(t) for name, t in tensors.items()})
        return cls(network)


class RqvaeNetwork(nn.Module):
    """Encoder, codebooks, decoder."""

    def __init__(
        self, dimensions: int, hidden: tuple[int, ...], latent: int, levels: int, codes: int
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

    def loss(self, rows: Tensor, commitment: float, estimator: str) -> tuple[Tensor, Quantised]:
        """The reconstruction error, plus what draws codes and latents together."""
        latents = self.encoder(rows)  # (batch, latent)
        quantised = Quantised(latents, self.books)
        passed = ESTIMATORS[estimator](latents, quantised.total)
        error = (self.decoder(passed) - rows).square().sum(dim=1).mean()
        return error + quantised.codebook_loss + commitment * quantised.commitment_loss, quantised


class Quantised:
    """Latents as the codebooks see them, level by level."""

    def __init__(self, latents: Tensor, books: list[nn.Embedding]) -> None:
        self.residuals: list[Tensor] = []  # a (batch, latent) a level, before its code is taken off
        self.codes: list[Tensor] = []  # a (batch,) a level
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


def straight_through(latents: Tensor, quantised: Tensor) -> Tensor:
    """`quantised`, whose gradient is handed to `latents` unchanged."""
    return latents + (quantised - latents).detach()


def rotation(latents: Tensor, quantised: Tensor) -> Tensor:
    """`quantised` as a rotation and scaling of `latents`, through which the gradient turns too.

    The rotation trick of Fifty et al. (2024), section 4.2: points of a cell that are pushed
    apart by the gradient stay apart, where straight-through moves all of them alike.
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


ESTIMATORS = {"straight-through": straight_through, "rotation": rotation}


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
def _start_codebooks(network: RqvaeNetwork, rows: Floats, config: QuantizerConfig) -> None:
    """K-means on what the untrained encoder makes of the rows, so that no code starts dead."""
    sample = rows[sample_rows(len(rows), config.codes * config.sample, config.seed)]
    residuals = network.encoder(torch.from_numpy(sample)).numpy()
    for level, book in enumerate(network.books):
        centroids = k_means(residuals, config.codes, restarts=1, seed=config.seed + level)
        book.weight.copy_(torch.from_numpy(centroids))
        residuals = residuals - centroids[nearest(residuals, centroids)]


def _train(network: RqvaeNetwork, rows: Floats, config: QuantizerConfig, progress: bool) -> None:
    device = next(network.parameters()).device
    optimizer = build_optimizer(network, config.rqvae_learning_rate, config.rqvae_weight_decay)
    steps = config.rqvae_steps
    idle = torch.zeros(config.levels, config.codes, device=device)  # steps since a code was used
    batches = _batches(len(rows), config.rqvae_batch, config.seed)
    network.train()
    for step in _steps(steps, progress):
        for group in optimizer.param_groups:
            factor = schedule(step, steps, round(WARMUP * steps))
            group["lr"] = config.rqvae_learning_rate * factor
        batch = torch.from_numpy(rows[next(batches)]).to(device)
        loss, quantised = network.loss(batch, config.rqvae_commitment, config.rqvae_estimator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(network, CLIP)
        optimizer.step()
        if step < REVIVALS * steps:
            _revive(network, quantised, idle)


@torch.no_grad()
def _revive(network: RqvaeNetwork, quantised: Quantised, idle: Tensor) -> None:
    """Puts codes that no vector has used for a while where this batch's residuals are."""
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


def _steps(steps: int, progress: bool) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    yield from track(range(steps), "RQ-VAE", console=Console(stderr=True), disable=not progress)
