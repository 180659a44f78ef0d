"""A language model in two halves: a tiny GPT-2 of transformers.

Needs the extra `models`. The text is Python's own source, byte by byte. Run: python llm.py
"""

import inspect
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from splitcast import Config, from_tensors, train, with_values
from splitcast.training.positions import next_tokens

LENGTH = 32
TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 128, "n_positions": LENGTH}
TINY |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}  # tied weights cannot be cut apart


def main(rounds: int = 40) -> None:
    """Perplexity before and after."""
    text = [min(byte, 127) for byte in inspect.getsource(random).encode()]
    whole = torch.tensor(text[: len(text) // LENGTH * LENGTH]).view(-1, LENGTH)  # (n, T)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    train_x, test_x = whole[order[:-100]], whole[order[-100:]]
    data = from_tensors(train_x, next_tokens(train_x), test_x, next_tokens(test_x), name="python")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.json"
        file.write_text(json.dumps(TINY))
        config = with_values(
            Config(),
            arch=f"hf:{file}",
            task="next-token",
            scheme="sfl",
            cut=2,
            clients=4,
            batch=8,
            optimizer="adam",
            lr=0.01,
            rounds=rounds,
            eval_every=max(1, rounds // 4),
        )
        result = train(config, dataset=data)
    for record in result.rounds:
        if "test_perplexity" in record.metrics:
            print(
                f"round {record.round}: perplexity {record.metrics['test_perplexity']:.1f}, {record.bytes / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
