"""Traces, learned policies and .npz files."""

import io
import json
import struct
import zipfile

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fuzz.core import Subject, attempt, expect
from fuzz.values import NUMBERS, SMALL_NUMBERS, spoiled_bytes, spoiled_lines, text
from splitcast.cost.trace import Trace
from splitcast.cutting.ddqn import Agent, QNetwork
from splitcast.cutting.encoder import Encoder
from splitcast.data.datasets import ARRAYS, from_tensors
from splitcast.data.loading import stored
from splitcast.data.npz import TYPES, read_npz


class Traces(Subject):
    """`Trace.load` gives finite gains above 0 for every round and client, or refuses."""

    name = "trace"

    def case(self, rng):
        rounds, clients = rng.randrange(1, 6), rng.randrange(1, 5)
        rows = [[str(t + 1), str(n), repr(rng.random())] for t in range(rounds) for n in range(clients)]
        rng.shuffle(rows)
        for _ in range(rng.choice([0, 1, 1, 2])):
            row = rng.choice(rows)
            row[rng.randrange(3)] = rng.choice(
                [str(rng.choice(SMALL_NUMBERS)), str(10 ** rng.randrange(25)), text(rng)]
            )
        lines = ["round,client,gain", *(",".join(row) for row in rows)]
        content = "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")
        if rng.random() < 0.5:
            content = rng.choice([spoiled_bytes, spoiled_lines])(rng, content)
        file = self.folder / "trace.csv"
        file.write_bytes(content)
        made, _ = attempt(Trace.load, file, rng.choice([None, clients]))
        if made is None:
            return "refused"
        expect(made.gains.size <= len(content), f"{made.gains.shape} from {len(content)} bytes")
        expect(bool((np.isfinite(made.gains) & (made.gains > 0)).all()), "gains that are no gains")
        again = self.folder / "again.csv"
        made.save(again)
        expect(np.array_equal(Trace.load(again).gains, made.gains), "not the same after save")
        return "taken"


class Policies(Subject):
    """`Agent.load` gives a network that values every cut, or refuses."""

    name = "policy"

    def __init__(self, folder):
        super().__init__(folder)
        self.good = []
        for clients, cuts, shows in ((2, 4, True), (3, 2, False)):
            code = Encoder(np.full(clients, -9.0), np.ones(clients), 3.0, cuts, shows)
            Agent(QNetwork(code.size, 5, cuts), code, "0123456789abcdef").save(folder / "good.safetensors")
            self.good.append((folder / "good.safetensors").read_bytes())

    def case(self, rng):
        content = rng.choice(self.good)
        how = rng.randrange(4)
        if how == 0:
            content = spoiled_bytes(rng, content)
        elif how == 1:
            content = self._other_tensors(rng, content)
        elif how == 2:
            content = self._other_header(rng, content)
        elif rng.random() < 0.5:
            length = rng.choice([0, 1, 2**20, 10**8, 2**31, 2**63, 2**64 - 1])
            content = struct.pack("<Q", length) + content[8:]
        file = self.folder / "policy.safetensors"
        file.write_bytes(content)
        made, _ = attempt(Agent.load, file)
        if made is None:
            return "refused"
        code = made.encoder
        seen = code(np.full(len(code.mean), 1e-9), np.array(1.0), np.array(-1))
        expect(seen.shape == (code.size,) and bool(np.isfinite(seen).all()), "no observation comes of it")
        values = made.values(seen)
        expect(values.shape == (code.cuts,), f"values of shape {values.shape}")
        expect(0 <= int(made.act(seen)) < code.cuts, "an act that is no cut")
        return "taken"

    @staticmethod
    def _other_tensors(rng, content):
        length = int.from_bytes(content[:8], "little")
        facts = json.loads(content[8 : 8 + length])["__metadata__"]
        tensors = load_tensors(content)
        for _ in range(rng.choice([0, 1, 1, 2])):
            name = rng.choice(list(tensors))
            value = tensors[name]
            what = rng.randrange(7)
            if what == 0:
                del tensors[name]
            elif what == 1:
                tensors[rng.choice([f"{name}x", "network/x", "x", ""])] = value.clone()
            elif what == 2:
                kind = rng.choice([torch.float16, torch.float64, torch.int64, torch.bool, torch.float32])
                tensors[name] = value.to(kind)
            elif what == 3:
                tensors[name] = value.flatten()[: rng.randrange(value.numel() + 1)].clone()
            elif what == 4:
                tensors[name] = value[None].clone()
            elif what == 5:
                changed = value.clone().flatten()
                number = torch.tensor(float(rng.choice([n for n in NUMBERS if n != 10**400])), dtype=torch.float64)
                changed[rng.randrange(len(changed)) :][:1] = number.to(changed.dtype)
                tensors[name] = changed.view(value.shape)
            else:
                tensors[name] = value * rng.choice([0.0, -1.0, 1e30])
            if not tensors:
                break
        for _ in range(rng.choice([0, 0, 1, 2])):
            name = rng.choice([*facts, "x"])
            facts[name] = rng.choice([text(rng).replace("\udc80", ""), str(rng.choice(NUMBERS)), "1", "5"])
            if rng.random() < 0.2:
                del facts[name]
        return save_tensors(tensors, facts)

    @staticmethod
    def _other_header(rng, content):
        """The JSON at the start, changed in one place; its length follows."""
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        entry = header[rng.choice(list(header))]
        key = rng.choice(list(entry))
        offsets = [[0, 2**60], [5, 3], [-1, 4], [0, 0]]
        shapes = [[10**6, 10**6], [2**63, 2], [], [0], [1] * 100, -1]
        entry[key] = rng.choice([*offsets, *shapes, "F32", "F64", "X", None, 1, text(rng).replace("\udc80", ""), {}])
        raw = json.dumps(header).encode()
        if rng.random() < 0.1:
            raw = raw[:-1] + b"," + raw[1:]  # everything twice
        return struct.pack("<Q", len(raw)) + raw + content[8 + length :]


def npy(array):
    """An array as a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def packed(members, compression):
    """A .npz file of (name, content)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


KINDS = [*TYPES, "u8", "c8", "c16", "f16", "S3", "U2", "M8[s]", "m8[s]", ">f4", ">i8", "O"]


class Arrays(Subject):
    """`read_npz` gives what numpy reads, of plain types, or refuses; what it gives makes a data set, or is refused."""

    name = "npz"

    def case(self, rng):
        content = packed(
            self._members(rng), rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED])
        )
        if rng.random() < 0.25:
            content = spoiled_bytes(rng, content)
        if rng.random() < 0.1:
            content = self._other_sizes(rng, content)
        file = self.folder / "mnist.npz"
        file.write_bytes(content)
        full, _ = attempt(stored, "mnist", self.folder)
        if full is not None:
            expect(len(full.train_x) == len(full.train_y) and len(full.test_x) == len(full.test_y), "uneven rows")
            expect(all(int(y.max()) < full.classes for y in (full.train_y, full.test_y)), "labels beyond the classes")
        found, _ = attempt(read_npz, file, ARRAYS, rng.choice([10**4, 2**28]))
        if found is None:
            expect(full is None or full.train_x.numel() > 1000, "read as a data set, but not as arrays")
            return "refused"
        with np.load(file, allow_pickle=False) as known:
            for key, array in found.items():
                expect(array.dtype.str[1:] in TYPES and array.dtype.isnative, f"{key} is {array.dtype}")
                theirs = known[f"{key}.npy"]
                expect(np.array_equal(theirs, array, equal_nan=array.dtype.kind == "f"), f"{key} is not numpy's")
        made, _ = attempt(from_tensors, *(torch.from_numpy(found[key]) for key in ARRAYS))
        if made is None:
            return "refused as data"
        expect(bool(made.train_x.isfinite().all()) and 0 <= int(made.test_y.max()) <= 10**6, "bad rows")
        return "taken"

    @staticmethod
    def _members(rng):
        draws = np.random.default_rng(rng.randrange(2**32))
        members = []
        size = rng.choice([(1, 2, 2), (1, 2, 2), (3, 2, 2), (1, 3, 1)])
        for key in ARRAYS:
            n = rng.choice([4] * 20 + [3, 0])
            shape = (n, *size) if key.endswith("x") else (n,)
            array = draws.integers(0, 10, shape).astype(np.uint8)
            if rng.random() < 0.15:
                kind = rng.choice(KINDS)
                array = array.astype(kind) if kind[0] not in "Mm" else array.astype("i8").astype(kind)
            if rng.random() < 0.1 and array.dtype.kind in "fi" and array.size:
                big = rng.choice([n for n in NUMBERS if array.dtype.kind == "f" or isinstance(n, int)])
                if abs(big) < 2**63 or (array.dtype.kind == "f" and big != 10**400):
                    with np.errstate(all="ignore"):
                        array.flat[0] = np.array(big).astype(array.dtype)
            if rng.random() < 0.05:
                array = rng.choice([array.T, array[..., None], array.ravel(), array[:, ...].copy(order="F")])
            content = npy(array)
            if rng.random() < 0.08:
                content = Arrays._other_npy(rng, content)
            name = f"{key}.npy"
            members += [(name, content)] * rng.choice([1] * 20 + [0, 2])
        if rng.random() < 0.1:
            members.append((rng.choice(["../x", "x.npy", "train_x", " "]), b"x"))
        return members

    @staticmethod
    def _other_npy(rng, content):
        shape = rng.choice(
            ["(4,)", "(1000000, 1000000)", "(99999999999999999999,)", "()", "(-1,)", "(4, 1, 2, 2)", "4"]
        )
        descr = rng.choice(["'|u1'", "'|O'", "'<f4'", "'<U9'", "[('a', '<f4')]", "'<u8'", "'|V8'", "'x'", "1"])
        order = rng.choice(["False", "True", "1"])
        header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        kind = rng.randrange(4)
        if kind == 0:
            return spoiled_bytes(rng, content)
        if kind == 1:
            header = b"(" * rng.choice([100, 20000]) + header
        start = rng.choice([b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"\x93NUMPY\x09\x00"])
        width = "<H" if start[6] == 1 else "<I"
        return start + struct.pack(width, min(len(header), 65535)) + header + content[128:]

    @staticmethod
    def _other_sizes(rng, content):
        """Sizes in the directory of the archive that are not those of its members."""
        at, made = content.find(b"PK\x01\x02"), bytearray(content)
        if 0 <= at < len(made) - 46:
            field = rng.choice([20, 24, 28, 42, 10, 8])
            made[at + field : at + field + 4] = struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1, 10**9]))
        return bytes(made)
