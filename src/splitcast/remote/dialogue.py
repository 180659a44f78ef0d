"""A scheme's program on a site: it runs until it has to wait for the server, and goes on when messages arrive.

The server calls, the site answers. So the program runs in a thread of its own, which stops wherever a message is
needed that is not there yet; what it wants to send by then is the answer to the call.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from splitcast.remote.wire import Packed, Refused


class Abandoned(BaseException):
    """Raised inside a program that nobody waits for any more."""


class Dialogue:
    """One run of a program. At any time either the program or its caller runs, never both."""

    def __init__(self, program: Callable[["Dialogue"], None]) -> None:
        self._program = program
        self._inbox: deque[Packed] = deque()
        self._outbox: list[Packed] = []
        self._error: BaseException | None = None
        self._closing = False
        self._programs_turn, self._callers_turn = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False
        self.turns = 0
        """how often the program waited"""
        self._thread = threading.Thread(target=self._run, daemon=True, name="program")
        self._thread.start()

    def go_on(self, messages: list[Packed]) -> list[Packed]:
        """Let the program have messages and run until it waits or ends; returns what it sends."""
        if self.ended:
            raise Refused("messages: the round has ended here")
        self._inbox.extend(messages)
        self._programs_turn.release()
        self._callers_turn.acquire()
        if self._error is not None:
            raise self._error
        sent, self._outbox = self._outbox, []
        if self.ended and self._inbox:
            raise Refused(f"messages: {len(self._inbox)} more than the round takes")
        return sent

    def close(self) -> None:
        """End the program wherever it is."""
        if not self.ended:
            self._closing = True
            self._programs_turn.release()
            self._thread.join()

    # on the program's side

    def send(self, message: Packed) -> None:
        """Have a message sent with the next answer."""
        self._outbox.append(message)

    def receive(self) -> Any:
        """The next message; waits for it."""
        while not self._inbox:
            self.wait()
        return self._inbox.popleft()

    def wait(self) -> None:
        """Let the caller have what was sent, until its next call."""
        self.turns += 1
        self._callers_turn.release()
        self._programs_turn.acquire()
        if self._closing:
            raise Abandoned

    def _run(self) -> None:
        self._programs_turn.acquire()
        try:
            if not self._closing:
                self._program(self)
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.ended = True
            self._callers_turn.release()
