"""Small networks as people write them: plain modules, none of them made for being cut."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """x + conv(norm(relu(conv(x))))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


class ResidualCNN(nn.Module):
    """Residual blocks with GroupNorm."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList([Residual(width), Residual(width)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = F.max_pool2d(layer(x), 2)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """For rows of a table."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(inputs, 32), nn.Linear(32, 32), nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))  # type: ignore[no-any-return]


class LSTM(nn.Module):
    """An image read row by row."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(width, 24, batch_first=True), nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x.squeeze(1))
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """`nn.TransformerEncoder` over the rows of an image."""

    def __init__(self, width: int, rows: int, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.into, self.place = nn.Linear(width, 16), nn.Parameter(torch.zeros(1, rows, 16))
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.into(x.squeeze(1)) + self.place).mean(1))  # type: ignore[no-any-return]


class TiedMLP(nn.Module):
    """Two of the layers share their matrix."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.into, self.a, self.b = nn.Linear(inputs, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.into(x.flatten(1)))
        return self.head(F.relu(self.b(F.relu(self.a(x)))))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """A frozen backbone and a head that learns."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()
        )
        self.body.requires_grad_(False).eval()
        self.neck, self.head = nn.Linear(256, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.neck(self.body(x).flatten(1))))  # type: ignore[no-any-return]


class Segmenter(nn.Module):
    """A class for every pixel: down, up, and one skip connection."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.norm = nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + self.up(F.relu(self.down(x)))
        return self.head(F.relu(self.norm(x)))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Next token with one matrix for the embedding and the output."""

    def __init__(self, tokens: int, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(tokens, width), nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, tokens, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.embedding(x))
        return self.output(out)  # type: ignore[no-any-return]
