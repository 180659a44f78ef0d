"""Whoever may send the data itself: images as gzip, PNG or JPEG, and the whole model trained on the server.

That is `sfl-replay` with nothing on the client: `whole` puts an empty block before the paper's network, so that the
smashed data of cut 1 are the images, and the formats below pack them. Samples, their order, the server's steps and the
count of bytes are then those of the schemes that it is compared with.

    message   low and step of every channel (fp32), then the images of a message as one file

Images are grids of up to 256 levels, x = low + step u. The images of a message are packed as one, because each alone
would bring a head along: for PNG and JPEG they stand below one another.
"""

import io
import math
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from splitcast.base.codec import EMPTY, Codec
from splitcast.base.errors import SplitcastError
from splitcast.base.rounding import Draw
from splitcast.model.cnn import paper_cnn, small_cnn

Pixels = NDArray[np.uint8]
"""(b, C, H, W)"""


def whole(input_shape: Sequence[int], classes: int) -> list[nn.Module]:
    """The paper's network behind an empty block."""
    return [nn.Identity(), *paper_cnn(input_shape, classes)]


def small(input_shape: Sequence[int], classes: int) -> list[nn.Module]:
    """The narrow one behind an empty block."""
    return [nn.Identity(), *small_cnn(input_shape, classes)]


class Images(Codec):
    """Images (b, C, H, W) as pixels, packed by a subclass."""

    varies: ClassVar[bool] = True

    @abstractmethod
    def packed(self, pixels: Pixels) -> bytes:
        """The images of a message."""

    @abstractmethod
    def unpacked(self, data: bytes, shape: Sequence[int]) -> Pixels:
        """The inverse, of whatever bytes."""

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.bound(shape) // 4

    def bound(self, shape: Sequence[int]) -> int:
        return 1024 + 8 * shape[1] + 2 * math.prod(shape)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        values = x.float().cpu()
        grids = [_grid(channel) for channel in values.transpose(0, 1)]
        low, step = (torch.tensor(part, device="cpu") for part in zip(*grids, strict=True))
        levels = (values - low.view(-1, 1, 1)) / step.view(-1, 1, 1)
        head = torch.stack([low, step]).float().view(torch.uint8).numpy().tobytes()
        data = head + self.packed(levels.round().to(torch.uint8).numpy())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        if not math.prod(shape):
            return torch.empty(*shape, device="cpu")
        size = 8 * shape[1]
        if len(payload) < size:
            raise SplitcastError("is too short for images")
        low, step = payload[:size].clone().view(torch.float32).view(2, -1, 1, 1)
        pixels = self.unpacked(payload[size:].numpy().tobytes(), shape)
        return torch.from_numpy(pixels.astype(np.float32)).mul_(step).add_(low)


def _grid(values: Tensor) -> tuple[float, float]:
    """Least value and least difference.

    >>> _grid(torch.tensor([0.5, 2.5, 1.0, 0.5]))
    (0.5, 0.5)
    """
    found = np.unique(values.numpy())
    step = float(np.diff(found).min()) if len(found) > 1 else 1.0
    levels = (found - found[0]) / step
    if levels[-1] > 255.5 or np.abs(levels - levels.round()).max() > 0.1:
        raise SplitcastError("uplink_codec: what is sent are no images of 8 bits a channel")
    return float(found[0]), step


class Gzip(Images):
    """DEFLATE at its best, over all images of a message."""

    name = "gzip"

    def packed(self, pixels: Pixels) -> bytes:
        return zlib.compress(pixels.tobytes(), 9)

    def unpacked(self, data: bytes, shape: Sequence[int]) -> Pixels:
        size = math.prod(shape)
        reader, plain = zlib.decompressobj(), b""
        try:
            plain = reader.decompress(data, size) + reader.decompress(reader.unconsumed_tail, 1)
        except zlib.error:
            plain = b""
        if len(plain) != size or not reader.eof or reader.unused_data:
            raise SplitcastError("is not what gzip makes of such images")
        return np.frombuffer(plain, np.uint8).reshape(*shape)


class Png(Images):
    """PNG, optimised."""

    name = kind = "png"
    options: ClassVar[dict[str, int | bool]] = {"optimize": True}

    def packed(self, pixels: Pixels) -> bytes:
        tall = pixels.transpose(0, 2, 3, 1).reshape(-1, pixels.shape[3], pixels.shape[1])
        file = io.BytesIO()
        Image.fromarray(tall[..., 0] if tall.shape[2] == 1 else tall).save(file, self.kind, **self.options)
        return file.getvalue()

    def unpacked(self, data: bytes, shape: Sequence[int]) -> Pixels:
        samples, channels, height, width = shape
        try:
            with Image.open(io.BytesIO(data), formats=[self.kind]) as image:
                if image.size != (width, samples * height) or len(image.getbands()) != channels:
                    raise SplitcastError(f"is no {self.kind} image of the size expected")
                pixels = np.asarray(image, np.uint8)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise SplitcastError(f"is no {self.kind} image") from None
        return pixels.reshape(samples, height, width, channels).transpose(0, 3, 1, 2)


class Jpeg(Png):
    """JPEG of quality 30, which 28 x 28 pixels bear."""

    name = kind = "jpeg"
    options: ClassVar[dict[str, int | bool]] = {"quality": 30, "optimize": True}
