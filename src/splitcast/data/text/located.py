"""Where a model of transformers is: a file or folder of the user's, or a name on the hub of Hugging Face.

What a name stands for is looked for in the cache of Hugging Face and fetched into it by the library's own client, which
respects HF_HUB_OFFLINE, HF_HOME and who is logged in: configuration, tokenizer, and weights as safetensors; no code.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from splitcast.base.errors import SplitcastError, imported
from splitcast.data.text.gguf import CONFIG, TOKENIZER

HF = "hf:"
"""So begin the names of models of transformers."""
DESCRIPTION = [CONFIG, TOKENIZER, "tokenizer_config.json"]
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ABSENT = "is not there; give a folder or a config.json;"
_WHY = {
    "GatedRepoError": "is gated; ask its owners for access on huggingface.co, then log in with: hf auth login",
    "RepositoryNotFoundError": f"{_ABSENT} huggingface.co has no model of this name that you may read",
}


def located(arch: str, *, weights: bool) -> Path:
    """The file or folder that hf:... stands for, with or without weights; it need not be there unless it is a name of
    the hub."""
    name = arch.removeprefix(HF)
    path = Path(name).expanduser()
    if path.exists() or path.suffix == ".json" or not _NAME.fullmatch(name):
        return path
    if find_spec("huggingface_hub") is None:
        raise SplitcastError(f"arch: {arch} needs huggingface_hub, which is missing; pip install 'splitcast[llm]'")
    try:
        fetch = imported("arch", "huggingface_hub:snapshot_download", takes=1)
        return Path(fetch(name, allow_patterns=DESCRIPTION + (WEIGHTS if weights else [])))
    except SplitcastError:  # of a site that does not let others name what it fetches
        raise
    except Exception as error:  # of many kinds: the network, the hub, the disk
        raise SplitcastError(f"arch: {arch} {_why(error)}") from None


def _why(error: BaseException) -> str:
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _WHY:
            return _WHY[type(seen).__name__]
        seen = seen.__cause__
    return f"{_ABSENT} the cache of Hugging Face has no model of this name, and it cannot be fetched"
