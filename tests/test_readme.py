"""The Python of the README runs as it stands, on little data."""

import re
from pathlib import Path

import splitcast

README = Path(__file__).parent.parent / "README.md"


def test_python_examples_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == 2
    names: dict[str, object] = {}
    for example in examples:
        exec(example.replace("rounds=20", 'rounds=1, arch="cnn-small", batch=4'), names)
    lines = capsys.readouterr().out.splitlines()
    assert 0 <= float(lines[0]) <= 1
    assert lines[1:] == ["1 0 784", "2 50240 64", "3 50240 64"]


def test_every_public_name_can_be_imported():
    assert all(getattr(splitcast, name) is not None for name in splitcast.__all__)
