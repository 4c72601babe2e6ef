"""Evaluate the format her_rm on the written pairs, with recorded replies in the place of a judge.

Beside the path of a pair: `nlhf evaluate` asks a server, and the server here, on this machine and for the time of the
evaluation, answers each prompt with the reply of ``replies.jsonl`` to that pair in that order. Options are those of
`nlhf evaluate`.

    python experiments/her_rm/written.py --out runs/her_rm/written
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nlhf.cli import main
from nlhf.files import read_jsonl
from nlhf.formats import get_format
from nlhf.judge import shown_pairs
from nlhf.sources import DataConfig, load_pairs

HERE = Path(__file__).resolve().parent


def recorded_replies() -> dict[str, dict[str, Any]]:
    """The row of ``replies.jsonl`` that answers each prompt."""
    rows = {(row["pair_id"], row["order"]): row for _, row in read_jsonl(HERE / "replies.jsonl")}
    pairs = load_pairs(DataConfig("jsonl", path=str(HERE / "pairs.jsonl")))
    judge_format = get_format("her_rm")
    return {judge_format.render(pair)[0]["content"]: rows[pair.id, order] for order, pair in shown_pairs(pairs)}


@contextmanager
def serve(replies: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A server that speaks OpenAI's chat protocol and knows these prompts alone; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            row = replies.get(asked["messages"][0]["content"])
            answer = completion(row) if row else {"error": {"message": "a prompt without a recorded reply"}}
            data = json.dumps(answer).encode()
            self.send_response(200 if row else 400)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(row: dict[str, Any]) -> dict[str, Any]:
    """A recorded reply as a server sends it; its length is in words, for there is no tokenizer."""
    words = len(row["reply"].split())
    message = {"role": "assistant", "content": row["reply"]}
    choice = {"index": 0, "message": message, "finish_reason": "length" if row["truncated"] else "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": words, "total_tokens": words}
    names = {"id": "recorded", "object": "chat.completion", "created": 0, "model": "recorded"}
    return {**names, "choices": [choice], "usage": usage}


if __name__ == "__main__":
    with serve(recorded_replies()) as url:
        here = ["--data.path", str(HERE / "pairs.jsonl"), "--backend.base_url", url]
        code = main(["evaluate", "--config", str(HERE / "written.yaml"), *here, *sys.argv[1:]])
    sys.exit(code)
