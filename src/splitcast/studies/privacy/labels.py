"""Labels from gradients: what labels at home do not hide. Gradients g_i (M, *d) are those of single samples.

norm         ranks samples of two classes by ||g_i||        Li et al., Label leakage, ICLR 2022
direction    the class of the most parallel known gradient  the same (cosine attack)
clusters     k-means of directions, named by known ones     Liu et al., Clustering label inference, 2022
update       the negative entry of the last bias' gradient  Zhao et al., iDLG, 2020 (one sample)
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def by_norm(grads: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve of ||g_i|| for two classes, ``positive`` (M,) of 0 and 1: 0.5 tells nothing, 1 all.
    Whoever ranks the other way gets the greater of a and 1 - a, which this is.

    >>> by_norm(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1]))
    1.0
    """
    size = torch.linalg.vector_norm(grads.flatten(1), dim=1)
    there, others = size[positive == 1], size[positive == 0]
    if not len(there) or not len(others):
        return 0.5
    wins = (there[:, None] > others).double() + 0.5 * (there[:, None] == others).double()
    area = float(wins.mean())
    return max(area, 1 - area)


def by_direction(grads: Tensor, known: Tensor, known_y: Tensor) -> Tensor:
    """Labels (M,) of the known gradients (K, *d) that gradients are most parallel to."""
    return known_y[(_directions(grads) @ _directions(known).T).argmax(1)]


def by_clusters(grads: Tensor, known: Tensor, known_y: Tensor, sweeps: int = 20) -> Tensor:
    """Labels (M,) by spherical k-means, which begins with one known gradient for every class."""
    directions, classes = _directions(grads), torch.tensor(sorted(set(known_y.tolist())))
    centres = torch.stack([normalize(_directions(known[known_y == c]).mean(0), dim=0) for c in classes])
    for _ in range(sweeps):
        member = (directions @ centres.T).argmax(1)
        for k in range(len(classes)):
            if bool((member == k).any()):
                centres[k] = normalize(directions[member == k].mean(0), dim=0)
    return classes[(directions @ centres.T).argmax(1)]


def from_update(bias_gradient: Tensor) -> int:
    """The label of a single sample from the gradient p - onehot(y) of the last layer's bias (classes,).

    >>> from_update(torch.tensor([0.2, -0.7, 0.5]))
    1
    """
    return int(bias_gradient.argmin())


def _directions(grads: Tensor) -> Tensor:
    made: Tensor = normalize(grads.flatten(1).float(), dim=1)
    return made
