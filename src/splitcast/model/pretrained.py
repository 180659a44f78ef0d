"""Models of transformers with their weights: out of a folder, by a name of the hub, or got by `splitcast data get`.

Weights are read as safetensors, which hold numbers and nothing that is run; code that a model brings stays unread.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from splitcast.base.errors import SplitcastError, imported
from splitcast.data.text.gguf import CONFIG, WEIGHTS
from splitcast.data.text.located import HF
from splitcast.model.hub import HEADS, is_described, needed, refuse_long, source_of


def is_pretrained(arch: str) -> bool:
    """Whether a name is of a model that comes with its weights."""
    file = Path(arch.removeprefix(HF)).expanduser()
    return is_described(arch) and file.suffix != ".json" and not file.is_file()


def pretrained(arch: str, input_shape: Sequence[int], classes: int, task: str) -> tuple[nn.Module, Tensor]:
    """The model with its weights and the head of the task, and an example; a head that it lacks is drawn."""
    needed("transformers", arch, "pip install 'splitcast[llm]'")
    head = HEADS.get(task, "SequenceClassification")
    maker = imported("arch", f"transformers:AutoModelFor{head}", takes=0)
    folder = source_of(arch, weights=True)
    for name in (CONFIG, WEIGHTS):
        if not any(folder.glob(name.replace("model.", "model*."))):
            raise SplitcastError(f"arch: {folder} has no {name}; give a folder of transformers, with safetensors")
    if len(input_shape) != 1:
        raise SplitcastError(f"input_shape: {tuple(input_shape)}; {arch} takes rows of tokens, as texts give")
    labels = {} if head in HEADS.values() else {"num_labels": classes}
    try:
        with _quietly():
            made = maker.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                **labels,
            )
    except Exception as error:  # of many kinds: the files are anybody's
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SplitcastError(f"arch: {folder} makes no {head} model: {said[:300]}") from None
    config = made.config.get_text_config()
    refuse_long(config, input_shape, arch)
    return made.train(), torch.full((1, *input_shape), config.vocab_size - 1)


@contextmanager
def _quietly() -> Iterator[None]:
    """Within, transformers neither draws bars nor warns."""
    logging = importlib.import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
