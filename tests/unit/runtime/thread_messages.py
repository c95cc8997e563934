"""Messages between ranks that are threads of one process."""

import threading
from collections import defaultdict

from dtcomm.runtime.torchdist.transport import Transport


class Rendezvous:
    """Matches sends with receives. A send is complete only when its receive has been posted, as a backend may do."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.posted = defaultdict(list)  # (src, dst, tag) -> buffers
        self.sent = defaultdict(list)  # (src, dst, tag) -> (payload, event)

    def match(self, key) -> None:
        while self.posted[key] and self.sent[key]:
            buffer, arrived = self.posted[key].pop(0)
            payload, left = self.sent[key].pop(0)
            assert buffer.numel() == payload.numel()
            buffer.copy_(payload)
            arrived.set()
            left.set()


class Port:
    """The sends and receives of one rank."""

    def __init__(self, fabric: Rendezvous, rank: int) -> None:
        self.fabric, self.rank = fabric, rank

    def send(self, payload, peer, tag):
        return self.post(self.fabric.sent, (self.rank, peer, tag), payload)

    def receive(self, payload, peer, tag):
        return self.post(self.fabric.posted, (peer, self.rank, tag), payload)

    def post(self, table, key, payload):
        done = threading.Event()
        with self.fabric.lock:
            table[key].append((payload, done))
            self.fabric.match(key)
        return done

    def wait(self, handle, peer, doing) -> None:
        assert handle.wait(20), f"rank {self.rank} is stuck {doing} with rank {peer}"


class ThreadMessages(Transport):
    """The executor's transport over a rendezvous of threads."""

    name, blocks_host = "threads", True

    def __init__(self, fabric: Rendezvous, rank: int) -> None:
        self.port = Port(fabric, rank)

    def send_recv(self, sends, receives, checksum, context):
        handles = [(self.port.receive(*message), message.peer, context) for message in receives]
        return handles + [(self.port.send(*message), message.peer, context) for message in sends]

    def wait(self, handle) -> None:
        for message in handle:
            self.port.wait(*message)
