"""Section III-B of the paper: how the bound of Theorem 1 changes with the number of clients."""

import math
from dataclasses import dataclass

from splitcast.base.errors import SplitcastError
from splitcast.theory.bounds import at_least, largest_lr


@dataclass(frozen=True)
class Scaling:
    """Theorem 1 for N equal clients with uncorrelated noise at eta = sqrt(N / (tau T)), by how it grows with N."""

    clients: int
    lr: float
    initialisation: float
    """falls: 4 (F(w_1) - F*) / sqrt(tau N T)"""
    averaged_noise: float
    """falls: 4 L sigma^2 / sqrt(tau N T)"""
    local_steps: float
    """rises: L^2 (tau-1) (5 sigma^2 / tau + 15 Gamma + 15 zeta^2) N / T"""
    floor: float
    """stays: 4 Gamma, the M of the paper"""

    @property
    def total(self) -> float:
        """The bound."""
        return self.initialisation + self.averaged_noise + self.local_steps + self.floor


@dataclass(frozen=True)
class Scalability:
    """How the bound of Theorem 1 depends on the number of clients N, at eta = sqrt(N / (tau T)).

    >>> curve = Scalability(smoothness=1.0, variance=1.0, gap=1.0, gamma=0.0, steps=4, rounds=10_000)
    >>> curve.best(), curve.most
    (14, 222)
    """

    smoothness: float
    variance: float
    gap: float
    gamma: float
    steps: int
    rounds: int
    heterogeneity: float = 0.0

    def __post_init__(self) -> None:
        for name in ("variance", "gap", "gamma", "heterogeneity"):
            at_least(name, getattr(self, name), 0)
        at_least("rounds", self.rounds, 1)

    @property
    def most(self) -> int:
        """The largest N whose eta the theorem allows."""
        allowed = largest_lr(self.smoothness, self.steps)
        clients = int(self.steps * self.rounds * allowed**2 * (1 + 1e-12))  # rounding must not lose a client
        if clients < 1:
            raise SplitcastError(
                f"rounds: {self.rounds} make lr = sqrt(N / (steps * rounds)) = {self._lr(1):.4g} for one client, above "
                f"the largest allowed {allowed:.4g}; choose at least {math.ceil(1 / (self.steps * allowed**2))}"
            )
        return clients

    def at(self, clients: int) -> Scaling:
        """The terms for N clients."""
        if not 1 <= clients <= self.most:
            raise SplitcastError(
                f"clients: {clients} make lr = sqrt(N / (steps * rounds)) = {self._lr(clients):.4g}, above the largest "
                f"allowed {largest_lr(self.smoothness, self.steps):.4g}; choose 1..{self.most}"
            )
        root = math.sqrt(self.steps * clients * self.rounds)
        return Scaling(
            clients,
            self._lr(clients),
            4 * self.gap / root,
            4 * self.smoothness * self.variance / root,
            self._rise() * clients,
            4 * self.gamma,
        )

    def best(self) -> int:
        """The N with the least bound: a/sqrt(N) + b N is convex with its minimum at (a / 2b)^(2/3).

        For tau = 1 nothing rises (b = 0), and more clients are always better.
        """
        if self._rise() == 0:
            return self.most
        fall = 4 * (self.gap + self.smoothness * self.variance) / math.sqrt(self.steps * self.rounds)
        ideal = int((fall / (2 * self._rise())) ** (2 / 3))
        return min((min(max(n, 1), self.most) for n in (ideal, ideal + 1)), key=lambda n: self.at(n).total)

    def _lr(self, clients: int) -> float:
        return math.sqrt(clients / (self.steps * self.rounds))

    def _rise(self) -> float:
        spread = 5 * self.variance / self.steps + 15 * (self.gamma + self.heterogeneity)
        return self.smoothness**2 * (self.steps - 1) * spread / self.rounds
