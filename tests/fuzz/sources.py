"""Tables and folders of images."""

import io
import shutil

import numpy as np
import pandas
from PIL import Image

from fuzz.core import Subject, attempt, expect
from fuzz.values import NUMBERS, spoiled_bytes, spoiled_lines, text
from splitcast.base.sections import DataConfig
from splitcast.data import load

CELLS = ["1", "0", "2.5", "", "nan", "inf", "-inf", "1e999", "True", "yes", "no", '"a,b"', "2020-01-01", "NA", "0x10"]


def sound(made):
    """A data set that can be trained with."""
    for x, y in ((made.train_x, made.train_y), (made.test_x, made.test_y)):
        expect(0 < len(x) == len(y) and bool(x.isfinite().all()), f"{len(x)} rows, {len(y)} targets")
        expect(y.is_floating_point() or 0 <= int(y.min()) <= int(y.max()) < made.classes, "labels beyond the classes")


class Tables(Subject):
    """A .csv or .parquet file makes a data set, or is refused."""

    name = "table"

    def case(self, rng):
        rows, columns = rng.randrange(1, 12), rng.randrange(1, 5)
        names = [f"c{k}" for k in range(columns)]
        for _ in range(rng.choice([0, 0, 1])):
            names[rng.randrange(columns)] = rng.choice(["c0", "", text(rng)])
        kinds = [rng.choice([("1", "2"), ("0.5", "2"), ("yes", "no"), ("True", "False")]) for _ in names]
        cells = [[rng.choice(kind) for kind in kinds] for _ in range(rows)]
        for _ in range(rng.choice([0, 0, 1, 2])):
            rng.choice(cells)[rng.randrange(columns)] = rng.choice([*CELLS, str(rng.choice(NUMBERS)), text(rng)])
        lines = "\n".join(",".join(row) for row in [names, *cells]) + "\n"
        content = lines.encode("utf-8", "surrogatepass")
        if rng.random() < 0.3:
            content = rng.choice([spoiled_bytes, spoiled_lines])(rng, content)
        file = self.folder / "table.csv"
        file.write_bytes(content)
        if rng.random() < 0.3:
            file = self._parquet(rng, file) or file
        partition = rng.choice(["iid", "iid", "by:c1", "by:"])
        asked, _ = attempt(DataConfig, dataset=str(file), target=rng.choice(["c0", "c1", "x"]), partition=partition)
        made, _ = attempt(load, asked, task=rng.choice(["classification", "regression", "pixel"]))
        if made is None:
            return "refused"
        sound(made)
        return "taken"

    def _parquet(self, rng, file):
        try:
            packed = io.BytesIO()
            pandas.read_csv(file).to_parquet(packed)
        except Exception:  # what pandas itself cannot read or write
            return None
        content = packed.getvalue()
        made = file.with_suffix(".parquet")
        made.write_bytes(spoiled_bytes(rng, content) if rng.random() < 0.7 else content)
        return made


class Photos(Subject):
    """A folder of images makes a data set, or is refused by the name of what is wrong."""

    name = "photos"
    formats = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")

    def case(self, rng):
        folder = self.folder / "photos"
        shutil.rmtree(folder, ignore_errors=True)
        draws = np.random.default_rng(rng.randrange(2**32))
        spoiled = []
        for name in rng.choice([("a", "b"), ("a", "b", "c"), ("a",), ("train", "test")]):
            (folder / name).mkdir(parents=True)
            for k in range(rng.choice([0, 1, 3, 3])):
                shape = rng.choice([(4, 4), (4, 4), (4, 4, 3), (4, 4, 4), (1, 9)])
                form, packed = rng.choice(self.formats), io.BytesIO()
                image = Image.fromarray(draws.integers(0, 256, shape).astype(np.uint8))
                (image.convert("RGB") if form in ("JPEG", "PPM") else image).save(packed, form)
                content = packed.getvalue()
                if rng.random() < 0.2:
                    content = spoiled_bytes(rng, content)
                    spoiled.append(f"{k}.png")
                (folder / name / f"{k}.png").write_bytes(content)  # the name says little about what is in it
        made, said = attempt(load, DataConfig(dataset=str(folder), image_size=rng.choice([0, 4, 4])))
        if made is None:
            expect("cannot be read" not in said or any(name in said for name in spoiled), said)
            return "refused"
        sound(made)
        expect(made.train_x.abs().max() <= 1 and made.train_x.shape[1] in (1, 3), "pixels that are none")
        return "taken"
