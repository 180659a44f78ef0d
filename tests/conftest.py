"""The order of the files: long ones begin first, so that no worker is left alone with one at the end.

Those that wait for FLARE stand between those that compute. `make test` keeps this order (`--no-loadscope-reorder`).
"""

FIRST = (
    "deploy_failures",
    "reproduce",
    "deploy_attacks",
    "deploy",
    "ddqn",
    "device",
    "examples",
    "sweep",
    "privacy",
    "docs",
    "language",
    "assign",
    "energy",
    "allocate",
    "release",
    "progress",
    "fuzz",
)


def pytest_collection_modifyitems(items):
    """A stable sort: within a file, and among the others, everything stays where it is."""
    rank = {f"test_{name}.py": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(FIRST)))
