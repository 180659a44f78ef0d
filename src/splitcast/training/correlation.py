"""How much one set of vectors tells of another."""

import torch
from torch import Tensor


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """Distance correlation (Székely et al., Annals of Statistics 2007) of M pairs x (..., M, p), z (..., M, q):

        dCor^2 = sum_ij A_ij B_ij / sqrt(sum_ij A_ij^2 sum_ij B_ij^2),

    A and B the matrices of Euclidean distances with the means of rows and columns taken out. 1 where z is x up to
    scale, rotation and shift; 0 in the limit if and only if they are independent.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]])
    >>> round(float(distance_correlation(x, 5 - 2 * x)), 4)
    1.0
    """
    a, b = _centred(x), _centred(z)
    shared = (a * b).sum((-2, -1))
    sizes = ((a * a).sum((-2, -1)) * (b * b).sum((-2, -1))).sqrt()
    return (shared / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)).clamp(min=0).sqrt()


def _centred(x: Tensor) -> Tensor:
    # squared first: the gradient of a distance of 0 is not a number
    apart = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)
    distances = torch.where(apart > 0, apart.clamp(min=1e-30).sqrt(), 0.0)
    rows, columns = distances.mean(-1, keepdim=True), distances.mean(-2, keepdim=True)
    return distances - rows - columns + rows.mean(-2, keepdim=True)
