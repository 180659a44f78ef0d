"""Whether a model knows the tokens of a data set."""

from torch import Tensor, nn

from splitcast.base.errors import SplitcastError
from splitcast.model.split import SplitModel


def check_tokens(model: SplitModel, *rows: Tensor) -> None:
    """Refuse rows of tokens (n, T) beyond the first table of embeddings of the first block."""
    table = next((part for part in model.blocks[0].modules() if isinstance(part, nn.Embedding)), None)
    for x in rows:
        if table is None or x.is_floating_point() or not x.numel():
            continue
        low, high = (int(bound) for bound in x.aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise SplitcastError(
                f"dataset: has token {low if low < 0 else high}; the model knows 0 to {table.num_embeddings - 1}; "
                "choose the tokenizer that it was made with"
            )


def check_padding(model: SplitModel, padding: int) -> None:
    """Refuse a model of transformers that reads whole rows and takes another token for padding than the tokenizer."""
    shell = getattr(model.blocks[0], "shell", None)
    own = getattr(shell, "padding", None)
    if shell is not None and own != padding:
        raise SplitcastError(
            f"tokenizer: fills up with token {padding}, but the model's pad_token_id is {own}; make them agree"
        )
