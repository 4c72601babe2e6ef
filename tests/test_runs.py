"""Run folders: nothing is overwritten, and a run goes on only under the configuration it began with."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nlhf.errors import UserError
from nlhf.runs import check_run, environment, git_state, holds_run, open_run, plain, read_config


@dataclass
class Sampling:
    temperature: float = 1e-6
    stops: tuple[str, ...] = ("a", "ü")


CONFIG = {
    "model": {"name": "m"},
    "sampling": Sampling(),
    "path": Path("x/y"),
    "options": {},
    "seed": None,
    "resume": False,
}


def test_a_new_run_writes_configuration_and_environment(tmp_path):
    folder = open_run(tmp_path / "deep" / "run", CONFIG)
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "environment.json"]
    assert read_config(folder) == plain(CONFIG)
    assert read_config(folder)["sampling"] == {"temperature": 1e-6, "stops": ["a", "ü"]}
    written = json.loads((folder / "environment.json").read_text())
    assert {"time", "nlhf", "commit", "dirty", "python", "packages"} <= set(written)
    assert "numpy" in written["packages"]


def test_a_folder_with_a_run_is_refused(tmp_path):
    open_run(tmp_path / "run", CONFIG)
    with pytest.raises(UserError, match=r"already holds a run.*--resume true"):
        open_run(tmp_path / "run", CONFIG)


def test_a_folder_with_anything_else_is_refused_also_on_resume(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"not empty.*thesis\.tex"):
            open_run(tmp_path, CONFIG, resume=resume)
    assert not holds_run(tmp_path)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        open_run(tmp_path / "out", CONFIG)
    with pytest.raises(UserError, match="cannot"):
        open_run(tmp_path / "out" / "run", CONFIG)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write"):
        open_run(tmp_path / "run", CONFIG)


def test_resume_goes_on_under_an_equal_configuration(tmp_path):
    open_run(tmp_path / "run", CONFIG)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    again = {**CONFIG, "resume": True, "out": "elsewhere"}
    assert open_run(str(tmp_path / "run"), again, resume=True) == tmp_path / "run"
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    assert len(json.loads((tmp_path / "run" / "environment.json").read_text())["resumed"]) == 1


def test_resume_names_every_key_that_differs_with_both_values(tmp_path):
    open_run(tmp_path / "run", CONFIG)
    changed = {**CONFIG, "sampling": Sampling(temperature=0.5), "seed": 3, "extra": "new"}
    del changed["path"]
    with pytest.raises(UserError) as caught:
        open_run(tmp_path / "run", changed, resume=True)
    message = str(caught.value)
    assert "sampling.temperature: 1e-06 -> 0.5" in message
    assert "seed: None -> 3" in message
    assert "path: 'x/y' -> (absent)" in message
    assert "extra: (absent) -> 'new'" in message
    assert "stops" not in message


def test_resume_without_a_run_begins_one(tmp_path):
    assert holds_run(open_run(tmp_path / "run", CONFIG, resume=True))


def test_what_a_killed_start_left_behind_is_no_run(tmp_path):
    (tmp_path / ".config.yaml.abc").write_text("half")
    (tmp_path / "environment.json").write_text("{}")
    assert holds_run(open_run(tmp_path, CONFIG))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [", "did not find expected node content"),
        (b"\xe9: 1", "can't decode"),
        (b"[" * 5000, "nesting depth"),
        (b"- a", "got a list"),
    ],
    ids=["torn", "Latin-1", "deep", "list"],
)
def test_a_broken_configuration_is_named(tmp_path, text, message):
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(UserError, match=rf"config\.yaml: .*{message}"):
        open_run(tmp_path, CONFIG, resume=True)


def test_the_environment_needs_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_state() == {"commit": None, "dirty": None}
    assert json.dumps(environment())


def test_importing_runs_is_light():
    code = "import sys, nlhf.runs; print([m for m in ('torch', 'scipy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nested_settings_may_differ(tmp_path):
    allowed = ("sampling.temperature", "options")
    changed = {**CONFIG, "sampling": Sampling(temperature=1.0), "options": {"a": {"b": 1}}}
    open_run(tmp_path / "run", CONFIG)
    open_run(tmp_path / "run", changed, resume=True, may_differ=allowed)
    with pytest.raises(UserError, match=r"sampling\.stops"):
        open_run(tmp_path / "run", {**changed, "sampling": Sampling(1.0, ())}, resume=True, may_differ=allowed)


def test_checking_writes_nothing(tmp_path):
    check_run(tmp_path / "run", CONFIG)
    assert not (tmp_path / "run").exists()
    open_run(tmp_path / "run", CONFIG)
    with pytest.raises(UserError, match="already holds a run"):
        check_run(tmp_path / "run", CONFIG)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_libraries_refuse_is_refused_at_once(tmp_path, seed):
    with pytest.raises(UserError, match="seed must lie between 0 and 4294967295"):
        check_run(tmp_path / "run", {"seed": seed})
