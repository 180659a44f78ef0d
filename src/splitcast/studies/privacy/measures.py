"""How close a reconstruction comes: images x, z (M, C, H, W), a number for each of the M pairs."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

WINDOW, SIGMA = 11, 1.5
"""Of the structural similarity, in pixels."""


def mse(x: Tensor, z: Tensor) -> Tensor:
    """Mean squared error of every pair (M,)."""
    return (x - z).flatten(1).square().mean(1)


def psnr(x: Tensor, z: Tensor, span: float) -> Tensor:
    """Peak signal-to-noise ratio 10 log10(span^2 / mse), in dB (M,); ``span`` is the range of pixels.

    >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1), span=1.0).round(decimals=3).tolist()
    [20.0]
    """
    return 10 * torch.log10(span**2 / mse(x, z).clamp(min=1e-12 * span**2))


def ssim(x: Tensor, z: Tensor, span: float) -> Tensor:
    """Mean structural similarity (Wang et al., TIP 2004) of every pair (M,), 1 for equal images:

        (2 m_x m_z + c_1)(2 v_xz + c_2) / ((m_x^2 + m_z^2 + c_1)(v_x + v_z + c_2)),

    means m and (co)variances v under a Gaussian window, c_1 = (0.01 span)^2, c_2 = (0.03 span)^2. The window is smaller
    where the image is.
    """
    size = min(WINDOW, x.shape[-1], x.shape[-2])
    size -= 1 - size % 2
    at = torch.arange(size, dtype=x.dtype, device=x.device) - size // 2
    bell = torch.exp(-(at**2) / (2 * SIGMA**2))
    window = torch.outer(bell, bell) / bell.sum() ** 2
    kernel = window.expand(x.shape[1], 1, size, size)

    def smooth(values: Tensor) -> Tensor:
        made: Tensor = conv2d(values, kernel, groups=x.shape[1])
        return made

    mean_x, mean_z = smooth(x), smooth(z)
    var_x, var_z = smooth(x * x) - mean_x**2, smooth(z * z) - mean_z**2
    both = smooth(x * z) - mean_x * mean_z
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    alike = (2 * mean_x * mean_z + c1) * (2 * both + c2)
    similar = alike / ((mean_x**2 + mean_z**2 + c1) * (var_x + var_z + c2))
    return similar.flatten(1).mean(1)


def feature_distance(x: Tensor, z: Tensor) -> Tensor:
    """||x - z|| / ||x|| of features (M, *d), a number each (M,)."""
    size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp(min=torch.finfo(x.dtype).tiny)
    apart: Tensor = torch.linalg.vector_norm((x - z).flatten(1), dim=1)
    return apart / size
