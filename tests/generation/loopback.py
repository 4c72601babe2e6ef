"""An HTTP server on loopback for tests, in threads of this process."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_):
        pass

    def head(self, status, headers, length):
        """Begin an answer of so many bytes, JSON unless the headers say otherwise."""
        self.send_response(status)
        for name, text in ({"content-type": "application/json"} | headers).items():
            self.send_header(name, text)
        self.send_header("content-length", str(length))
        self.end_headers()


class Loopback:
    """Serves until it is closed.

    Attributes:
        url: Where OpenAI's chat protocol is spoken.
        closing: Set when the server closes, for handlers that wait.
    """

    def __init__(self, handler):
        self.closing = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
