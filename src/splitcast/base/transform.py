"""Transform coding of what is sent: decorrelate, quantise coarsely, spend bits where the energy is.

`base.coefficients` has the equations, and `base.spectrum` the search of the step where a rate is given instead.

    message   0x00, fp32 values              where coding would take more, or is not possible
              anything else                  coefficients
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import EMPTY, FP32, Codec
from splitcast.base.coefficients import LARGEST, Coefficients, Parts, Shape, orthonormal, parsed, rebuilt
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.rounding import Draw
from splitcast.base.spectrum import Spectrum, sparsity, squares

__all__ = ["Rate", "Shape", "Spectrum", "Transform"]

CODER = 80.0
"""Operations of the entropy coder for a byte: about 1.3 levels, each with the zeros before it, two numbers of 30."""
PROBES, PROBE = 8.0, 8.0
"""Steps that are tried in a search, and operations of each for a value."""
EXPECTED_BITS = 0.2
"""Bits per value that plans expect of a step, where only data can tell; about what 2.5 takes on the paper's CNN at cut
1. Of an error e they expect 1/2 log2(1/e), what a white Gaussian takes."""
CAREFUL, FOLLOW = 0.75, 0.7
"""Of coding alike: the share of the rate at which the first step aims, and the power of what a message took, of the
rate, by which the next step is coarser. Bytes are about the step to the power of -1.4."""
UNLIKE = 4.0
"""Times the rate: a message that takes more with the common step is coded by itself, whoever told that step."""
RAW = 0
_TOP = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Rate:
    """How coarse: by the step, by bytes per sample, or by the squared error relative to what is sent."""

    by: Literal["step", "bytes", "error"]
    first: float
    last: float
    rounds: int = 1
    """rounds from the first value to the last, evenly on a log scale"""
    expected: float = 0.0
    """bytes per sample that plans count; 0 where none are stated"""

    @staticmethod
    def parse(text: str, field: str) -> "Rate":
        """
        >>> Rate.parse("140B", "codec"), Rate.parse("4..2@100", "codec").at(50)
        (Rate(by='bytes', first=140.0, last=140.0, rounds=1, expected=0.0), 2.8284271247461903)
        """
        found, bad = _RATE.fullmatch(text), shown(f"transform:{text}")
        if not found or bool(found["last"]) != bool(found["rounds"]):
            raise SplitcastError(
                f"{field}: {bad} cannot be read; give, below 1e9, transform:2.5 (step), :140B (per sample), :5% "
                "(squared error), :80..160B@60 (from one to the other in 60 rounds), or :2.5~160B (what plans expect)"
            )
        first, last = float(found["first"]), float(found["last"] or found["first"])
        by: dict[str, Literal["step", "bytes", "error"]] = {"": "step", "B": "bytes", "%": "error"}
        scale = 0.01 if found["unit"] == "%" else 1.0
        rounds, expected = int(found["rounds"] or 1), float(found["expected"] or 0)
        if min(first, last) <= 0 or (found["expected"] and not expected):
            raise SplitcastError(f"{field}: {bad} must be above 0")
        if scale < 1 and max(first, last) > 100:
            raise SplitcastError(f"{field}: {bad} must be at most 100 %")
        return Rate(by[found["unit"]], scale * first, scale * last, rounds, expected)

    def at(self, t: int) -> float:
        """The value in round ``t``, counted from 1."""
        share = min(1.0, max(0, t) / self.rounds)
        return self.first if self.first == self.last else self.first * (self.last / self.first) ** share


_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_RATE = re.compile(
    rf"(?P<first>{_NUMBER})(?:\.\.(?P<last>{_NUMBER}))?(?P<unit>[B%]?)"
    rf"(?:@(?P<rounds>[1-9][0-9]{{0,8}}))?(?:~(?P<expected>{_NUMBER})B)?"
)


class Transform(Codec):
    """Messages as above; decoding needs no rate, so that whoever receives knows none."""

    varies: ClassVar[bool] = True
    common: tuple[Tensor, float] | None = None
    """Q (C, r) and the step of all clients, where they code alike"""

    def __init__(self, rate: Rate, name: str, value: float | None = None) -> None:
        self.rate, self.name = rate, name
        self.value = rate.at(1) if value is None else value

    @staticmethod
    def named(text: str, field: str = "codec") -> "Transform":
        """transform:RATE, without the first part."""
        return Transform(Rate.parse(text, field), f"transform:{text}")

    def at(self, t: int) -> "Transform":
        if self.rate.rounds == 1 or self.common:
            return self
        return Transform(self.rate, self.name, self.rate.at(t))

    def phase(self, t: int) -> int:
        told = self.rate.by != "step" and not self.rate.expected and self.rate.first != self.rate.last
        return min(t, self.rate.rounds) if told else 0

    def learned(self, x: Tensor, before: tuple[float, float] | None = None) -> tuple[Tensor, float] | None:
        """Columns of Q (r, C) and a step for all to code alike with, from decoded samples x (b, *d) as if they were one
        message; None if that has no columns. For bytes per sample, ``before``: the last step, and what it took.

        Decoded samples do not tell what a finer step would take, since what it would show was lost. So the first step
        aims at `CAREFUL` of the rate, and later ones follow what messages took."""
        at = self
        if self.rate.by == "bytes":
            step = before[0] * (before[1] / self.value) ** FOLLOW if before else 0.0
            rate = Rate("step", step, step) if step else self.rate
            at = Transform(rate, self.name, step or CAREFUL * self.value)
        parts = at._sent(x)[1]
        if parts is None or not len(parts.columns):
            return None
        return torch.from_numpy(parts.columns * np.exp2(-parts.exponents)[:, None]).float(), parts.step

    def alike(self, columns: Tensor, step: float) -> "Transform":
        """The format with Q from these columns (r, C), as they arrived, and this step; 0: each message by itself."""
        if step and not 2.0**-100 <= step <= LARGEST:  # whoever says so could be anybody
            raise SplitcastError(f"step: {step:g}; must be 0, or from 2^-100 to 2^50")
        made = Transform(self.rate, self.name, self.value)
        made.common = orthonormal(columns), step
        return made

    def nbytes(self, shape: Sequence[int]) -> int:
        each = self.rate.expected or (self.value if self.rate.by == "bytes" else 0)
        samples, values = shape[0] if shape else 1, math.prod(shape)
        bits = -0.5 * math.log2(self.value) if self.rate.by == "error" else EXPECTED_BITS
        told = math.ceil(each * samples if each else bits * values / 8)
        return min(max(1, told), self.bound(shape))

    def bound(self, shape: Sequence[int]) -> int:
        values = math.prod(shape)
        return 1 + 4 * values if values else 0

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        """Both ways KLT and DCT of the channels that may be sent as multiply-adds, 8 operations a value for levels and
        their places, and `CODER` for every byte. On some of the samples the KLT is learned (a Gram matrix, and 9 C^3
        for its eigenvectors) and, unless the step is given, that is searched by `PROBES` times `PROBE` operations a
        value; then one message in ten is made twice."""
        lay = Shape.of(shape)
        sent = self.common[0].shape[1] if self.common and lay.klt else lay.channels
        dct = 2.0 * (lay.height + lay.width) if lay.height * lay.width > 1 else 0.0

        def turned(channels: int) -> float:
            return (2.0 * lay.channels * (channels if lay.klt else 0) + channels * dct) * lay.places

        both = turned(sent) + 8.0 * sent * lay.places + CODER * self.nbytes(shape)
        if self.common:
            return both, both
        some, values = 1.0 / sparsity(lay.samples), float(math.prod(shape))
        gram = 2.0 * lay.channels * values * some + 9.0 * lay.channels**3 if lay.klt else 0.0
        searched = PROBES * PROBE * values * some + 0.1 * both if self.rate.by != "step" else 0.0
        return both + gram + some * turned(lay.channels) + searched, both

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return torch.frombuffer(bytearray(self._sent(x)[0]), dtype=torch.uint8) if x.numel() else EMPTY

    def measured(self, x: Tensor, draw: Draw | None = None) -> tuple[Tensor, list[int]]:
        if not x.numel():
            return x, [0] * len(x)
        sent = [self._sent(one) for one in x]  # one by one: a message is the same whoever else sends
        lay = Shape.of(x.shape[1:])
        seen = [
            one.detach().to("cpu", torch.float32).clamp(-_TOP, _TOP)
            if parts is None
            else rebuilt(parts, lay, one.shape, self._shared)
            for one, (_, parts) in zip(x, sent, strict=True)
        ]
        return torch.stack(seen).to(x), [len(payload) for payload, _ in sent]

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        if not math.prod(shape):
            return torch.empty(*shape, device=payload.device)
        data = payload.cpu().numpy().tobytes()
        if data[:1] == bytes([RAW]):
            if len(data) != self.bound(shape):
                raise SplitcastError(f"has {len(data)} bytes, not {self.bound(shape)}")
            return payload[1:].clone().view(torch.float32).view(*shape)
        lay = Shape.of(shape)
        return rebuilt(parsed(data, lay, self._shared), lay, shape, self._shared)

    @property
    def _shared(self) -> Tensor | None:
        return self.common[0] if self.common else None

    def _sent(self, x: Tensor) -> tuple[bytes, Parts | None]:
        """A message, and what it says; None if the values as they are."""
        x = x.detach().to("cpu", torch.float32)
        low, high = float(x.amin()), float(x.amax())
        if max(-low, high) < LARGEST:  # not so if there is a NaN
            found = self._coded(x, clamped=low >= 0)
            if found and len(found[0]) < self.bound(x.shape):
                return found
        return bytes([RAW]) + FP32.encode(x).numpy().tobytes(), None

    def _coded(self, x: Tensor, *, clamped: bool) -> tuple[bytes, Parts] | None:
        """As above, at the rate; None where levels would be too large."""
        if self.common and self.common[1]:
            found = Coefficients(x, clamped=clamped, common=self.common[0]).message(self.common[1])
            if self.rate.by != "bytes" or (found and len(found[0]) <= UNLIKE * self.value * x.shape[0]):
                return found
        spectrum = Spectrum(x, clamped=clamped)
        if self.rate.by == "step":
            return spectrum.message(self.value)
        if self.rate.by == "bytes":
            return spectrum.within_bytes(self.value * x.shape[0])
        return spectrum.within_error(x, self.value * squares(x))
