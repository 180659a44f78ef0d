"""A llama model in a GGUF file, as the folder that transformers reads: config.json, model.safetensors, tokenizer.json.

Weights are dequantised to float32. GGUF stores the rows of query and key so that rotary pairs are neighbours; here
they are half a head apart again. Where the file has no output matrix, it is the embedding.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3
"""The type of a token that no text holds."""


def convert(content: bytes, folder: Path) -> None:
    """Write the three files; ``content`` is a whole GGUF file whose checksum is known."""
    reader_of, safetensors = _libraries()
    folder.mkdir()
    file = folder / "model.gguf"
    file.write_bytes(content)
    reader = reader_of(file)
    said = {name: field.contents() for name, field in reader.fields.items()}
    config = configuration(said)
    safetensors.save_file(dict(tensors(reader, config)), folder / WEIGHTS, metadata={"format": "pt"})
    tokenizer(said).save(str(folder / TOKENIZER))
    names = {role: said["tokenizer.ggml.tokens"][config[f"{role}_id"]] for role in ("bos_token", "eos_token")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "pad_token": names["eos_token"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    file.unlink()


def is_converted(folder: Path) -> bool:
    """Whether a folder is what `convert` leaves; that the weights are as long as they say is checked on reading."""
    return all((folder / name).is_file() for name in (CONFIG, WEIGHTS, TOKENIZER))


def configuration(said: dict[str, Any]) -> dict[str, Any]:
    """The configuration of transformers, from the keys and values of a GGUF file."""
    kind = said["general.architecture"]
    if kind != "llama":
        raise SplitcastError(f"model: of the kind {kind!r}; only llama can be converted")
    heads = said["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": kind,
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "head_dim": said["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": round(said["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": said["llama.rope.freq_base"],
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,
    }


def tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Weights by the names of transformers."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        whole, _, kind = tensor.name.rpartition(".")
        if whole in WHOLE:
            config["tie_word_embeddings"] &= whole != "output"
            yield f"{WHOLE[whole]}.{kind}", value
            continue
        _, number, part = whole.split(".")
        if part in heads:
            value = unpermuted(value, heads[part])
        yield f"model.layers.{number}.{LAYER[part]}.{kind}", np.ascontiguousarray(value)


def unpermuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows (heads * d, n) of each head from the order 0, d/2, 1, d/2 + 1, ... to 0, 1, 2, ...

    >>> unpermuted(np.array([[0], [2], [1], [3]], dtype=np.float32), heads=1).ravel().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def tokenizer(said: dict[str, Any]) -> Any:
    """Byte-level BPE; in texts of SmolLM every digit is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := said["tokenizer.ggml.pre"]) != "smollm":
        raise SplitcastError(f"model: its tokenizer is of the kind {kind!r}; only smollm can be converted")
    tokens = said["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = said["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    )
    return made


def _libraries() -> tuple[Any, Any]:
    try:
        import safetensors.numpy
        import tokenizers  # noqa: F401
        from gguf import GGUFReader
    except ImportError as error:
        raise SplitcastError(f"model: {error.name} is not installed; pip install 'splitcast[llm]'") from None
    return GGUFReader, safetensors.numpy
