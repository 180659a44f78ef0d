"""Which cases of a test run in `make test`; the others, which prove the same once more, run in `make test-long`."""

import pytest


def now(cases, *first):
    """The cases of a parameter, of which only the ``first`` are not long."""
    return [case if case in first else pytest.param(case, marks=pytest.mark.long) for case in cases]
