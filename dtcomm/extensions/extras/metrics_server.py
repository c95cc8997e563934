"""An endpoint for Prometheus, from the standard library: it serves the metrics that were published last."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dtcomm.profiling.metrics import HasMetrics, prometheus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Serves ``http://address:port/metrics`` from a thread of its own.

    A scrape gets what the training loop published last, so it never touches what the loop changes. The server has
    neither encryption nor authentication: bind it to an address that only the monitoring reaches.

    Args:
        port: The port; 0: any free one, see the attribute. Default: 0.
        address: The address to listen on. Default: ``"127.0.0.1"``, this host alone.
        labels: Labels that are added to every sample, such as the rank or the job. Default: none.

    Attributes:
        port: The port.

    Raises:
        OSError: The port is in use.

    Example::

        server = dtcomm.extensions.extras.MetricsServer(9400 + local_rank, labels={"rank": str(rank)})
        for step in range(steps):
            ...
            monitor.step()
            if step % 20 == 0:
                server.publish(monitor)
        server.close()
    """

    def __init__(
        self, port: int = 0, address: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        self._labels = dict(labels or {})
        self._text = b""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] in ("/", "/metrics")
                body = server._text if found else b"the metrics are at /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A scrape every few seconds is no news."""

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="dtcomm-metrics", daemon=True)
        self._thread.start()

    def publish(self, state: HasMetrics) -> None:
        """Serve the metrics as they are now.

        Args:
            state: What has metrics: a `RunMonitor`, or the state of an integration.
        """
        self._text = prometheus(state, self._labels).encode()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
