"""A run that is stopped and goes on is the run that was never stopped."""

import pytest

from splitcast.run.loop import train
from splitcast.run.verify import verify


def resumes_exactly(config, folder, stop_at):
    """Train whole, train stopped after a round and resumed; returns the rounds, which are the same."""

    def stop(record):
        if record.round == stop_at:
            raise KeyboardInterrupt

    whole = train(config)
    with pytest.raises(KeyboardInterrupt):
        train(config, folder, on_round=stop)
    assert train(config, folder, resume=True).rounds == whole.rounds
    assert verify(folder) == []
    return whole.rounds
