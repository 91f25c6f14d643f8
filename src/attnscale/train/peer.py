"""Peer: another rank of a run, written to and heard from without ever waiting for it longer than was asked."""

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch

FOREVER = timedelta(days=365)  # a wait that times out inside gloo closes all its connections
QUEUED = 2  # messages that wait for a rank to take them; of more, the oldest is out of date
GOODBYE = b""  # the last message: nothing comes after it


class Peer:
    """Messages to and from one rank of a group, in order, each on a thread that can be left behind."""

    def __init__(self, rank: int, group: Any, name: int) -> None:
        self._rank, self._group = rank, group
        self.name = name  # its rank among all of the job
        self._is_cut_off = False  # its connection is closed
        self._has_parted = False  # it said goodbye
        self._lock = threading.Lock()
        self._to_send: deque[bytes] = deque(maxlen=QUEUED)
        self._sender: threading.Thread | None = None
        self._receiver: threading.Thread | None = None
        self._received: list[bytes] = []

    @property
    def is_gone(self) -> bool:
        """For good."""
        return self._is_cut_off or self._has_parted

    def send(self, message: bytes) -> None:
        """Send it when the peer is there to take it."""
        if self._has_parted and message != GOODBYE:
            return
        with self._lock:
            self._to_send.append(message)
            if self._sender is None and not self._is_cut_off:
                self._sender = threading.Thread(target=self._send_all, daemon=True)
                self._sender.start()

    def receive(self, seconds: float) -> bytes | None:
        """The next message; None where none came within this time."""
        if self._receiver is None and not self.is_gone:
            self._receiver = threading.Thread(target=self._receive_one, daemon=True)
            self._receiver.start()
        if self._receiver is not None:
            self._receiver.join(max(0.0, seconds))
            if self._receiver.is_alive():
                return None
            self._receiver = None
        message = self._received.pop() if self._received else None
        self._has_parted = self._has_parted or message == GOODBYE
        return message or None

    def part(self, seconds: float) -> None:
        """Wait until the peer parts too, so that no thread is left; one that does not within this time is left.

        A thread that comes back from gloo while the interpreter ends would abort the process.
        """
        until = time.monotonic() + seconds
        while not self.is_gone and time.monotonic() < until:
            self.receive(until - time.monotonic())
        sender = self._sender
        if sender is not None:
            sender.join(max(0.0, until - time.monotonic()))

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._to_send or self._is_cut_off:
                    self._sender = None
                    return
                message = self._to_send.popleft()
            self._wait(self._group.send, torch.tensor([len(message)]), 0)
            if message != GOODBYE:
                self._wait(self._group.send, torch.frombuffer(bytearray(message), dtype=torch.uint8), 1)

    def _receive_one(self) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        if self._wait(self._group.recv, size, 0):
            body = torch.zeros(int(size), dtype=torch.uint8)
            if not len(body) or self._wait(self._group.recv, body, 1):
                self._received.append(body.numpy().tobytes())

    def _wait(self, exchange: Any, tensor: torch.Tensor, tag: int) -> bool:
        try:
            exchange([tensor], self._rank, tag).wait(FOREVER)
        except (RuntimeError, ValueError):  # the connection, or the group, is closed
            self._is_cut_off = True
        return not self._is_cut_off
