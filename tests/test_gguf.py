"""A language model out of a GGUF file: weights, configuration, tokenizer."""

import json

import numpy as np
import pytest
import torch

from splitcast import Config, SplitcastError, train, with_values
from splitcast.cli.main import main
from splitcast.data import fetch, stored_texts
from splitcast.data.sources import Source
from splitcast.data.text.gguf import configuration, convert, tokenizer
from splitcast.data.text.packages import ModelRecipe, lines
from splitcast.data.text.tokens import FromFile, find_tokenizer
from test_datasets import quiet
from test_sources import refused
from test_text import sha

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TOKENS = ["<|end|>", "<|start|>", *"abcdeĠ12", "ab", "Ġc"]
MERGES = ["a b", "Ġ c"]


def llama(tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def written_as_gguf(model, path, quantised=()):
    """As llama.cpp writes a model: with its names, and the rows of query and key permuted."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up")}
    names |= {"mlp.down_proj": "ffn_down"}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for long, short in {
            "model.embed_tokens": "token_embd",
            "model.norm": "output_norm",
            "lm_head": "output",
        }.items():
            name = name.replace(long, short)
        for long, short in names.items():
            name = name.replace(f".{long}.", f".{short}.")
        array = value.numpy().copy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for part, count in heads.items():
            if f".{part}." in name:
                half = array.reshape(count, 2, -1, array.shape[1])
                array = np.ascontiguousarray(half.swapaxes(1, 2)).reshape(array.shape)
        name = name.replace("model.layers", "blk")
        kind = gguf.GGMLQuantizationType.Q8_0 if any(part in name for part in quantised) else None
        writer.add_tensor(name, gguf.quants.quantize(array, kind) if kind else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_the_same(tmp_path, tied):
    model = llama(tied)
    convert(written_as_gguf(model, tmp_path / "m.gguf"), tmp_path / "m")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    x = torch.randint(0, len(TOKENS), (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(x).logits, again(x).logits)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_quantised_weights_are_near(tmp_path):
    model = llama(tied=True)
    convert(written_as_gguf(model, tmp_path / "m.gguf", quantised=("attn_q", "ffn_up")), tmp_path / "m")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    for name, value in model.state_dict().items():
        off = float((again[name] - value).abs().max())
        rounded = "q_proj" in name or "up_proj" in name
        assert (0 < off <= float(value.abs().max()) / 127 * 0.51) if rounded else off == 0, name


def test_the_tokenizer_splits_digits_and_merges(tmp_path):
    convert(written_as_gguf(llama(tied=True), tmp_path / "m.gguf"), tmp_path / "m")
    found = FromFile(tmp_path / "m" / "tokenizer.json")
    ids = found.encode(["ab c12"])[0].tolist()
    assert [TOKENS[k] for k in ids] == ["ab", "Ġc", "1", "2"]
    assert (found.decode([*ids, 0]), found.end, found.padding, found.size) == ("ab c12", 0, 0, len(TOKENS))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m")("ab c12")["input_ids"] == ids


def test_a_model_is_got_once_and_found_by_its_name(tmp_path):
    content = written_as_gguf(llama(tied=True), tmp_path / "m.gguf")
    recipe = ModelRecipe((Source("here", lambda *_: {"gguf": content}),), sha(content))
    cache = tmp_path / "cache"
    (cache / "smollm2").mkdir(parents=True)  # what a killed conversion of another kind might leave
    (cache / "smollm2" / "config.json").write_text("{}")
    assert stored_texts(cache)["smollm2"] == ""
    folder = fetch("smollm2", cache, recipe=recipe, report=quiet)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(TOKENS)
    nothing = ModelRecipe((Source("here", lambda *_: pytest.fail("asked again")),), "sha256:0")
    assert fetch("smollm2", cache, recipe=nothing, report=quiet) == folder
    assert find_tokenizer("auto", "smollm2", cache).size == len(TOKENS)
    assert stored_texts(cache)["smollm2"] == "a language model"
    assert [path.name for path in cache.iterdir()] == ["smollm2"]


def test_other_kinds_of_models_are_refused():
    with pytest.raises(SplitcastError, match="of the kind 'qwen2'; only llama"):
        configuration({"general.architecture": "qwen2"})
    with pytest.raises(SplitcastError, match="of the kind 'llama-bpe'; only smollm"):
        tokenizer({"tokenizer.ggml.pre": "llama-bpe"})


# Training with it


def folder_of_a_model(tmp_path):
    convert(written_as_gguf(llama(tied=True), tmp_path / "m.gguf"), tmp_path / "m")
    return tmp_path / "m"


SMALL = [
    "--task",
    "next-token",
    "--rounds",
    "2",
    "--batch",
    "2",
    "--sequence-length",
    "8",
    "--scheme",
    "sfl",
    "--quiet",
]
LORA = ["--lora.rank", "2", "--lora.modules", "q_proj,v_proj", "--optimizer", "adamw", "--lr", "0.01"]


def test_a_folder_with_weights_is_fine_tuned_and_reported(tmp_path, monkeypatch):
    folder = folder_of_a_model(tmp_path)
    for name in ("one", "two"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.txt").write_text("ab c ba 12 " * 20)
    out = tmp_path / "run"
    main(["train", *SMALL, *LORA, "--arch", f"hf:{folder}", "--dataset", f"{tmp_path}/texts", "--partition", "by:file",
          "--cut", "2", "--out", str(out)])  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert [sample["client"] for sample in summary["samples"]] == ["one.txt", "two.txt"]
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    adapters = 2 * (32 + 32) + 2 * (32 + 16)  # of rank 2, at q_proj and v_proj of the client's one layer
    half = 4 * (3 * adapters + 4)  # with the two moments of AdamW, and a count of steps for each of four tensors
    assert rounds[0]["kinds"]["up.model"] == 2 * half
    main(["train", "--resume", str(out), "--quiet"])
    main(["report", str(out)])
    assert "one.txt" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--arch", "smollm2"], "arch: smollm2 is not in"),
        (["--arch", "hf:nobody/nothing"], "arch: hf:nobody/nothing is not there; give a folder or a config.json"),
        (["--sequence-length", "65"], "sequence_length: 65; hf:"),
        (["--tokenizer", "bytes"], "dataset: has token 257; the model knows 0 to 11; choose the tokenizer that"),
        (["--lora.rank", "2"], "lora.modules: none given; choose from the linear layers q_proj"),
        (["--dataset", "mnist-mini"], "takes rows of tokens, as texts give"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, more, said):
    monkeypatch.setenv("SPLITCAST_DATA", str(tmp_path / "cache"))
    args = [*SMALL, "--arch", f"hf:{folder_of_a_model(tmp_path)}", "--dataset", "text-mini", *more]
    assert said in refused(capsys, tmp_path, "train", *args)


def test_a_folder_without_tokenizer_or_weights_is_refused(tmp_path, capsys):
    folder = folder_of_a_model(tmp_path)
    args = [*SMALL, "--arch", f"hf:{folder}", "--dataset", "text-mini"]
    (folder / "model.safetensors").rename(tmp_path / "weights")
    assert "has no model.safetensors; give a folder" in refused(capsys, tmp_path, "train", *args)
    (folder / "model.safetensors").write_bytes((tmp_path / "weights").read_bytes()[:-9])
    assert "makes no CausalLM model" in refused(capsys, tmp_path, "train", *args)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json; give one with --tokenizer" in refused(capsys, tmp_path, "train", *args)


def test_without_the_library_one_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    folder = folder_of_a_model(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused(capsys, tmp_path, "train", *SMALL, "--arch", f"hf:{folder}", "--dataset", "text-mini")
    assert "needs transformers, which is not installed; pip install 'splitcast[llm]'" in said


BERT = {"model_type": "bert", "vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 257, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}  # fmt: skip


def test_mail_is_classified_and_padding_is_not_read(tmp_path, capsys):
    (tmp_path / "bert.json").write_text(json.dumps(BERT))
    mail = [
        {"label": ("ham", "spam")[k % 2], "text": ("see you", "win now!!")[k % 2] + "." * (k % 5)} for k in range(60)
    ]
    (tmp_path / "mail.jsonl").write_bytes(lines(mail))
    config = with_values(
        Config(), arch=f"hf:{tmp_path}/bert.json", dataset=str(tmp_path / "mail.jsonl"), sequence_length=16, clients=2
    )
    config = with_values(config, scheme="sfl", cut=2, rounds=25, batch=8, optimizer="adamw", lr=0.01, eval_every=25)
    result = train(config)
    assert result.summary["accuracy"] == 1.0
    model, params = result.engine.model, result.engine.state.averaged(result.engine.weights)
    row = torch.full((1, 16), 257)
    row[0, :7] = torch.tensor(list(b"see you"))
    with model.evaluating(), torch.no_grad():
        long, short = (model.forward(params, each, 0, model.depth) for each in (row, row[:, :9]))
    assert torch.allclose(long, short, atol=1e-5)
    (tmp_path / "bert.json").write_text(json.dumps(BERT | {"pad_token_id": 0}))
    with pytest.raises(SplitcastError, match="fills up with token 257, but the model's pad_token_id is 0"):
        train(config)
