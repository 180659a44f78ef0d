"""Integers of few bits as bytes, side by side; where they divide a byte, a word at a time."""

import math

import torch
from torch import Tensor


def pack(levels: Tensor, bits: int) -> Tensor:
    """Integers below 2^bits (n,), uint8, as ceil(n bits / 8) bytes; the first is in the lowest bits.

    >>> pack(torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8), bits=2).tolist()
    [57, 2]
    """
    each = 8 // math.gcd(8, bits)  # so many fill whole bytes
    missing = -len(levels) % each
    padded = torch.nn.functional.pad(levels, (0, missing)) if missing else levels
    if each * bits == 8:
        words = padded.view(_WORDS[each])
        for shift in _folds(bits):
            words = (words >> shift).bitwise_or_(words)
        return words.to(torch.uint8)
    columns = padded.view(-1, each).long()  # up to 56 bits together
    words = columns[:, 0].clone()
    for k in range(1, each):
        words |= columns[:, k] << (bits * k)
    packed = torch.stack([(words >> (8 * k)) & 255 for k in range(each * bits // 8)], 1).to(torch.uint8)
    return packed.flatten()[: -(-bits * len(levels) // 8)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack` for ``count`` integers."""
    width = bits // math.gcd(8, bits)
    if bits == 8:
        return packed[:count]
    if width == 1:
        each = 8 // bits
        words = packed.to(_WORDS[each])
        for shift in reversed(_folds(bits)):
            words.bitwise_or_(words << shift)
        spread = words.bitwise_and_(int.from_bytes(bytes([2**bits - 1] * each), "little"))
        return spread.view(torch.uint8)[:count]
    parts = torch.nn.functional.pad(packed, (0, -len(packed) % width)).view(-1, width).long()
    together = (parts << torch.arange(0, 8 * width, 8, device=packed.device)).sum(1)
    shifts = torch.arange(0, 8 * width, bits, device=packed.device)
    levels: Tensor = (together[:, None] >> shifts) & (2**bits - 1)
    return levels.flatten()[:count].to(torch.uint8)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _folds(bits: int) -> list[int]:
    """Shifts that bring integers of so many bits, one in every byte of a word, together in its lowest byte.

    >>> _folds(4), _folds(2), _folds(1)
    ([4], [6, 12], [7, 14, 28])
    """
    return [(8 - bits) << k for k in range((8 // bits).bit_length() - 1)]
