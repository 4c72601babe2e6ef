"""A server on loopback that speaks OpenAI's chat protocol, and does what real ones do on a bad day."""

import json
import threading
import time

from tests.generation.loopback import Loopback, QuietHandler


def completion(content="fine", finish_reason="stop", usage=(7, 3), **message):
    """A well-formed answer, or one with a field changed."""
    counts = None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    choice = {"index": 0, "message": {"role": "assistant", "content": content} | message}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice | {"finish_reason": finish_reason}],
        "usage": counts,
    }


class FaultyServer(Loopback):
    """Answers each request with the next entry of ``script``, or with ``default`` when that is empty.

    An entry is

    - an answer (dict), sent as JSON;
    - a status (int), or a status with headers, or a status with headers and a body;
    - bytes, sent as the whole body; a pair ("cut", bytes) announces more than it sends;
    - "drop": the connection is closed without an answer; "hang": no answer until the server closes;
    - "trickle": the answer comes a byte at a time, for ever;
    - a function of the request's body that returns any of these.

    Attributes:
        bodies: The requests, in order of arrival.
        times: When they came, in seconds of the monotonic clock.
        headers: Theirs.
    """

    def __init__(self):
        self.script, self.default = [], completion()
        self.bodies, self.times, self.headers = [], [], []
        self.delay, self.busy, self.most_busy = 0.0, 0, 0
        self.lock = threading.Lock()
        server = self

        class Handler(QuietHandler):
            def do_POST(self):  # noqa: N802 - the name that http.server looks for
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server.lock:
                    server.bodies.append(body)
                    server.times.append(time.monotonic())
                    server.headers.append(self.headers)
                    entry = server.script.pop(0) if server.script else server.default
                    server.busy += 1
                    server.most_busy = max(server.most_busy, server.busy)
                time.sleep(server.delay)
                try:
                    self.answer(entry(body) if callable(entry) else entry)
                except OSError:  # the client has given up waiting
                    self.close_connection = True
                finally:
                    with server.lock:
                        server.busy -= 1

            def answer(self, entry):
                if entry in ("drop", "hang"):
                    if entry == "hang":
                        server.closing.wait(30)
                    self.close_connection = True
                elif entry == "trickle":
                    self.head(200, {}, 10**6)
                    while not server.closing.wait(0.05):
                        self.wfile.write(b" ")
                        self.wfile.flush()
                elif isinstance(entry, bytes):
                    self.head(200, {}, len(entry))
                    self.wfile.write(entry)
                elif isinstance(entry, tuple) and entry[0] == "cut":
                    self.head(200, {}, len(entry[1]) + 100)
                    self.wfile.write(entry[1])
                    self.close_connection = True
                else:
                    status, headers, value = entry, {}, None
                    if isinstance(entry, dict):
                        status, value = 200, entry
                    elif isinstance(entry, tuple):
                        status, headers, value = (*entry, None)[:3]
                    data = json.dumps(value or {"error": {"message": f"status {status}"}}).encode()
                    self.head(status, headers, len(data))
                    self.wfile.write(data)

        super().__init__(Handler)
