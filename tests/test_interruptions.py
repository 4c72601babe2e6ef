"""What ends a run half-way (a kill, a full disk, a server that dies) costs nothing that was already judged."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nlhf.evaluate
import nlhf.judging
from nlhf.cli import main
from nlhf.generation.backends import GenerationFailed
from nlhf.judge import Reply

PAIRS = 40
SANDBOX = ["--model.name", "package:nlhf", "--format", "sandbox", "--sampling.max_new_tokens", "26"]


def lines(path: str) -> list[str]:
    """Whole lines of a file that may not be there yet."""
    if not Path(path).is_file():
        return []
    return [line for line in Path(path).read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -------------------------------------------------------------------------------------------------------------- kill -9


def kill_when_begun(arguments: list[str], file: str) -> list[str]:
    """Start a command in a process of its own, kill it when the file has some lines, and return those."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nlhf", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while len(lines(file)) < 4:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return lines(file)


@pytest.mark.slow
def test_kill_9_during_an_evaluation():
    """Real command, real model: killed amid the judging, it goes on where it was and ends as if nothing had been."""

    def arguments(out: str, batch: int) -> list[str]:
        data = ["--data.source", "sandbox", "--data.limit", str(PAIRS)]
        settings = ["--sampling.batch_size", str(batch), "--resamples", "20", "--ledger", "null", "--run_name", "r"]
        return ["evaluate", *SANDBOX, *data, *settings, "--out", out]

    kept = kill_when_begun(arguments("killed", 1), "killed/judgements.jsonl")
    assert len(kept) < 2 * PAIRS
    assert main([*arguments("killed", 64), "--resume", "true"]) == 0
    assert main(arguments("whole", 64)) == 0
    assert set(kept) <= set(lines("killed/judgements.jsonl"))
    for name in ("judgements.jsonl", "metrics.json"):
        assert Path("killed", name).read_bytes() == Path("whole", name).read_bytes()
    judged = sum(json.loads(line)["judgements"] for line in lines("killed/timing.jsonl"))
    assert judged <= 2 * PAIRS  # none was made twice


@pytest.mark.slow
def test_kill_9_during_a_stream():
    assert main(["data", "export", "--data.source", "sandbox", "--data.limit", str(PAIRS), "--out", "pairs.jsonl"]) == 0

    def arguments(out: str, batch: int) -> list[str]:
        return ["judge", "pairs.jsonl", *SANDBOX, "--output", out, "--sampling.batch_size", str(batch)]

    kept = kill_when_begun(arguments("killed.jsonl", 1), "killed.jsonl")
    assert len(kept) < PAIRS
    assert main(arguments("killed.jsonl", 64)) == 0
    assert lines("killed.jsonl")[: len(kept)] == kept
    assert main(arguments("whole.jsonl", 64)) == 0
    assert Path("killed.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


# ---------------------------------------------------------------------------------------------------------- a full disk


class Scripted:
    """Says A at some length, counts what it was asked, and dies after so many prompts."""

    def __init__(self, dies_at: int | None = None):
        self.prompts: list[str] = []
        self.dies_at = dies_at

    def generate(self, prompts, samples=1, progress=None):
        replies: list[list[Reply | None]] = []
        for [message] in prompts:
            if self.dies_at is not None and len(self.prompts) >= self.dies_at:
                replies.append([None])
                continue
            self.prompts.append(message["content"])
            replies.append([Reply(f"<critics>\n{'A is good. ' * 60}\n</critics><choice>[[A]]</choice>", False, 200)])
        if reasons := {i: "HTTP 503: overloaded" for i, group in enumerate(replies) if group == [None]}:
            raise GenerationFailed("http://localhost:8000/v1", replies, reasons, lost=True)
        return replies


@pytest.fixture
def generator(monkeypatch) -> Scripted:
    found = Scripted()
    for module in (nlhf.evaluate, nlhf.judging):
        monkeypatch.setattr(module, "make_generator", lambda *_: found)
    monkeypatch.setattr("nlhf.models.model_hash", lambda *_: "weights")
    rows = [{"id": f"p{i}", "context": f"q{i}", "response_a": "x", "response_b": "y"} for i in range(PAIRS)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@contextlib.contextmanager
def small_tmpfs(path: Path) -> Iterator[None]:
    """A file system of 96 KiB, which then grows."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount a file system; the limit on the size of files stands in for it")
    try:
        yield
        subprocess.run(["mount", "-o", "remount,size=16m", str(path)], check=True)
    except BaseException:
        subprocess.run(["umount", str(path)], check=True)
        raise


@contextlib.contextmanager
def small_files(path: Path) -> Iterator[None]:
    """No file may grow beyond 24 KB."""
    path.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


DISKS = pytest.mark.parametrize("small", [small_tmpfs, small_files])
FULL = ("No space left on device", "File too large", "the disk is full")
EVALUATE = ["evaluate", "--model.name", "package:nlhf", "--data.source", "jsonl", "--data.path", "pairs.jsonl",
            "--sampling.batch_size", "1", "--resamples", "20", "--ledger", "null", "--run_name", "r"]  # fmt: skip
JUDGE = ["judge", "pairs.jsonl", "--model.name", "package:nlhf", "--sampling.batch_size", "1"]


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    path = tmp_path / "disk"
    yield path
    if os.path.ismount(path):
        subprocess.run(["umount", str(path)], check=True)


def filled(capsys, small, disk: Path, arguments: list[str]) -> None:
    with small(disk):
        assert main(arguments) == 2
    message = capsys.readouterr().err
    assert any(reason in message for reason in FULL)
    assert "Traceback" not in message


@DISKS
def test_a_full_disk_during_an_evaluation(generator, capsys, small, disk):
    arguments = [*EVALUATE, "--out", str(disk / "run")]
    filled(capsys, small, disk, arguments)
    kept, asked = lines(disk / "run/judgements.jsonl"), len(generator.prompts)
    assert 0 < len(kept) < 2 * PAIRS
    assert main([*arguments, "--resume", "true"]) == 0
    after = lines(disk / "run/judgements.jsonl")
    assert after[: len(kept)] == kept
    assert len(after) == 2 * PAIRS
    assert len(generator.prompts) - asked == 2 * PAIRS - len(kept)  # what was kept was not asked again


@DISKS
def test_a_full_disk_during_a_stream(generator, capsys, small, disk):
    arguments = [*JUDGE, "--output", str(disk / "out.jsonl")]
    filled(capsys, small, disk, arguments)
    kept, asked = lines(disk / "out.jsonl"), len(generator.prompts)
    assert 0 < len(kept) < PAIRS
    assert main(arguments) == 0
    after = lines(disk / "out.jsonl")
    assert after[: len(kept)] == kept
    assert [json.loads(line)["id"] for line in after] == [f"p{i}" for i in range(PAIRS)]
    assert len(generator.prompts) - asked == 2 * (PAIRS - len(kept))


# --------------------------------------------------------------------------------------------------- a server that dies


@pytest.mark.parametrize("dies_at", [0, 1, 7, 33])
def test_a_server_that_dies_during_an_evaluation(generator, capsys, dies_at):
    generator.dies_at = dies_at
    assert main([*EVALUATE, "--out", "run"]) == 2
    message = capsys.readouterr().err
    assert message.count("nlhf: error: ") == 1
    assert "HTTP 503: overloaded" in message
    assert "--resume true" in message
    kept = lines("run/judgements.jsonl")
    assert len(kept) == dies_at
    generator.dies_at = None
    assert main([*EVALUATE, "--out", "run", "--resume", "true"]) == 0
    assert set(kept) <= set(lines("run/judgements.jsonl"))
    assert len(generator.prompts) == 2 * PAIRS == len(set(generator.prompts))
    assert main([*EVALUATE, "--out", "whole"]) == 0
    assert Path("run/judgements.jsonl").read_bytes() == Path("whole/judgements.jsonl").read_bytes()
