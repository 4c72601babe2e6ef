"""A server on loopback that streams scripted replies by OpenAI's chat protocol."""

import json

from tests.generation.loopback import Loopback, QuietHandler


class StreamingServer(Loopback):
    """Answers each request with the next entry of ``script``.

    An entry is

    - a text, sent in pieces of ``piece`` characters with the finish reason "stop";
    - a list, sent element by element: a text; a dict, the fields of a delta; "PAUSE", after which nothing comes until
      the server closes; "BREAK", which ends the connection; ("finish", reason) in the place of "stop";
    - a pair of a status and a message: an error.

    Attributes:
        bodies: The requests, in order of arrival.
    """

    def __init__(self, *script, piece=3):
        self.script, self.piece, self.bodies = list(script), piece, []
        server = self

        class Handler(QuietHandler):
            def do_POST(self):  # noqa: N802 - the name that http.server looks for
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                entry = server.script.pop(0)
                self.close_connection = True
                try:
                    if isinstance(entry, tuple):
                        self.refuse(*entry)
                    else:
                        self.answer(entry)
                except OSError:  # the client has left
                    pass

            def refuse(self, status, message):
                data = json.dumps({"error": {"message": message}}).encode()
                self.head(status, {}, len(data))
                self.wfile.write(data)

            def answer(self, entry):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                if isinstance(entry, str):
                    entry = [entry[i : i + server.piece] for i in range(0, len(entry), server.piece)]
                reason = "stop"
                for part in entry:
                    if part == "PAUSE":
                        server.closing.wait(30)
                        return
                    if part == "BREAK":
                        return
                    if isinstance(part, tuple):
                        reason = part[1]
                    else:
                        self.event(part if isinstance(part, dict) else {"content": part})
                self.event({}, reason)
                self.event(None)
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, delta, reason=None):
                choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
                usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10} if delta is None else None
                body = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
                data = json.dumps(body | {"choices": choices, "usage": usage})
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()

        super().__init__(Handler)
