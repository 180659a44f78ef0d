"""The best low-rank description of smashed-data gradients, G ~ C B: which basis, of which rank, and what it drops.

Rows of G (m, d) are samples, each with a weight; R = diag(sqrt(weights)). Of all rank-K descriptions the K leading
singular directions of R G have the least weighted error sum_i w_i ||g_i - (C B)_i||^2, and it is the sum of the other
eigenvalues of R G G^T R (Eckart and Young). Three ways there:

    m <= d         R G G^T R = U diag(e) U^T,      C = R^-1 U_K,       B = U_K^T R G
    d < m          G^T R^2 G = V diag(e) V^T,      C = G V_K / sigma,  B = sigma V_K^T
    both large     the first on the range Q (m, r) of (R G G^T R)^q R G Omega with Gaussian Omega (d, r):
                   Q^T R G G^T R Q = W diag(e) W^T, U = Q W (Halko, Martinsson and Tropp, SIAM Review 2011)

Coefficients are of order one whatever the scale of the gradients. At full rank C B = G to rounding, however small
the last eigenvalues are: U and V are orthogonal to rounding even where they are not accurate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GRAM_SIZE = 256
"""Up to this min(m, d) the Gram matrix is decomposed; beyond, the range finder is faster."""
OVERSAMPLING = 8
"""r = K + this."""
POWER = 2
"""q"""


@dataclass(frozen=True)
class Factors:
    """G ~ coefficients @ basis."""

    coefficients: Tensor
    """(m, K)"""
    basis: Tensor
    """(K, d): orthogonal rows, longest first; the greatest entry of each is positive"""
    energy: float
    """sum_i w_i ||g_i||^2"""
    dropped: float
    """sum_i w_i ||g_i - (C B)_i||^2"""


def factorise(g: Tensor, weights: Tensor, rank: int, budget: float = 0.0) -> Factors:
    """``rank`` directions of g (m, d), or with a ``budget`` the fewest that drop at most this share of the energy.

    ``weights`` (m,) are positive. Without room for the budget the answer has ``rank`` directions.

    >>> g = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    >>> found = factorise(g, torch.ones(3), rank=1)
    >>> found.dropped / found.energy, found.basis.tolist()
    (0.36, [[0.0, 4.0]])
    """
    root = weights.sqrt()[:, None]
    rank = min(rank, *g.shape)
    if min(g.shape) > max(GRAM_SIZE, 2 * rank + OVERSAMPLING):
        u = _range_finder(g, root, rank)
    elif g.shape[0] <= g.shape[1]:
        u = _leading(g @ g.T * root * root.T, rank)
    else:
        v = _leading(g.T @ (g * weights[:, None]), rank)
        sigma = torch.linalg.vector_norm(root * (g @ v), dim=0)
        sigma = sigma.clamp(min=torch.finfo(g.dtype).tiny)
        return _chosen(g @ (v / sigma), sigma[:, None] * v.T, g, weights, budget)
    return _chosen(u / root, (root * u).T @ g, g, weights, budget)


def fit(g: Tensor, basis: Tensor) -> Tensor:
    """The coefficients (m, K) of least error ||g - C B||^2 for any basis (K, d), rounded ones included.

    Rounding may leave directions without length or parallel ones; of the best coefficients these are the least.

    >>> fit(torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, 1.0]])).round(decimals=4).tolist()
    [[3.0]]
    """
    length = torch.linalg.vector_norm(basis, dim=1).clamp(min=torch.finfo(basis.dtype).tiny)
    unit = basis / length[:, None]
    noise = 10 * len(basis) * torch.finfo(basis.dtype).eps
    inverse: Tensor = torch.linalg.pinv((unit @ unit.T).double(), rtol=noise, hermitian=True).to(basis.dtype)
    fitted: Tensor = g @ unit.T @ inverse / length
    return fitted


def _chosen(coefficients: Tensor, basis: Tensor, g: Tensor, weights: Tensor, budget: float) -> Factors:
    """As many of the directions as the budget asks for, with their signs fixed."""
    kept = torch.linalg.vector_norm(basis, dim=1, dtype=torch.float64).square()
    energy = float(torch.linalg.vector_norm(g, dim=1, dtype=torch.float64).square() @ weights.double())
    left = (energy - kept.cumsum(0)).clamp(min=0)  # what ranks 1, 2, ... drop
    if budget:
        rank = min(int((left > budget * energy).sum()) + 1, len(kept))
        coefficients, basis, left = coefficients[:, :rank], basis[:rank], left[:rank]
    signs = basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
    signs = torch.where(signs == 0, 1, signs)
    return Factors(coefficients * signs.T, basis * signs, energy, float(left[-1]))


def _leading(gram: Tensor, rank: int) -> Tensor:
    """The leading eigenvectors as columns, greatest eigenvalue first.

    In double precision: in single, LAPACK's divide and conquer can answer NaN for a matrix of many zero rows.
    """
    vectors: Tensor = torch.linalg.eigh(gram.double()).eigenvectors
    return vectors[:, -rank:].flip(1).to(gram.dtype)


def _range_finder(g: Tensor, root: Tensor, rank: int) -> Tensor:
    """Nearly leading left singular vectors of R G, (m, K)."""
    fixed = torch.Generator().manual_seed(0)  # on the CPU: the same numbers for every device
    start = torch.randn(g.shape[1], rank + OVERSAMPLING, generator=fixed, dtype=g.dtype).to(g.device)
    q = _orthonormal(root * (g @ start))
    for _ in range(POWER):
        q = _orthonormal(root * (g @ (g.T @ (root * q))))
    small = (root * q).T @ g  # (r, d)
    return q @ _leading(small @ small.T, rank)


def _orthonormal(columns: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(columns).Q
    return q


def decomposition_flops(rows: int, columns: int, rank: int) -> float:
    """FLOPs of `factorise`, a multiply-add being two; an m x m eigendecomposition counts 9 m^3, a QR 4 m r^2."""
    rank = min(rank, rows, columns)
    small, passes = min(rows, columns), 2.0 * rows * columns
    if small <= max(GRAM_SIZE, 2 * rank + OVERSAMPLING):
        return passes * small + 9.0 * small**3 + passes * rank
    r = rank + OVERSAMPLING
    return passes * r * (2 + 2 * POWER) + (1 + POWER) * 4.0 * rows * r**2 + passes * rank
