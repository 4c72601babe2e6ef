"""Student and teacher sharded by FSDP2 over two CPU processes: loss, gradient and average are those of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What accelerate does with a model under experiments/accelerate/fsdp2.yaml, which on a CPU it does not offer itself.
SCRIPT = """
import copy, os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from trl.models.utils import _ForwardRedirection

from nlhf.models import ModelConfig, load_model
from selfdistill.settings import SDRMSettings
from selfdistill.teacher import EMATeacher
from selfdistill.trainer import SDRMTrainer

dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ.setdefault("FSDP_TRANSFORMER_CLS_TO_WRAP", "Qwen3DecoderLayer")
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
    cpu_ram_efficient_loading=False,
)
accelerator = SimpleNamespace(
    state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=torch.device("cpu"),
    is_main_process=not rank, num_processes=2, autocast=lambda: torch.autocast("cpu", enabled=False),
)  # fmt: skip


def trainer(student, teacher, sharded):
    fake = SimpleNamespace(
        settings=SDRMSettings(rho=0.5, support_size=6, teacher="ema"), temperature=1.0, teacher=teacher, _is_vlm=False,
        accelerator=accelerator, _dist=SimpleNamespace(is_fsdp=sharded), _forward_redirection=_ForwardRedirection(),
        model_kwarg_keys=["logits_to_keep"], args=SimpleNamespace(seed=0, report_to=[]),
        state=SimpleNamespace(global_step=0), model=student, _metrics=None, _sums=0,
    )  # fmt: skip
    for name in ("_compute_loss", "_look", "_states", "_get_last_hidden_state"):
        setattr(fake, name, getattr(SDRMTrainer, name).__get__(fake))
    return fake


def rollouts(seed):
    g = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(4, 60, (2, n), generator=g)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    return {
        "prompt_ids": ids(6), "prompt_mask": torch.ones(2, 6, dtype=torch.long),
        "teacher_prompt_ids": ids(9), "teacher_prompt_mask": torch.ones(2, 9, dtype=torch.long),
        "completion_ids": ids(7), "completion_mask": mask, "feedback": torch.tensor([True, seed == 0]),
        "num_items_in_batch": torch.tensor(4 + 3 + 4),
    }  # fmt: skip


start = load_model(ModelConfig("package:nlhf"), "cpu").train()
plain, plain_teacher = copy.deepcopy(start), None
plain_teacher = EMATeacher(plain, "ema", 0.25)
one = trainer(plain, plain_teacher, False)
accelerator.num_processes = 1
expected = 0
for seed in (0, 1):
    loss, _, _ = one._compute_loss(plain, rollouts(seed), None)
    loss.backward()
    expected += loss.item()
accelerator.num_processes = 2

student = copy.deepcopy(start)
teacher = EMATeacher(student, "ema", 0.25)
teacher.model = fsdp2_prepare_model(accelerator, teacher.model).eval()
student = fsdp2_prepare_model(accelerator, student)
two = trainer(student, teacher, True)
loss, _, _ = two._forward_redirection(student, student, two._compute_loss, student, rollouts(rank), None)
loss.backward()
total = loss.detach().clone()
dist.all_reduce(total)
assert abs(total.item() / 2 - expected) < 1e-5 * expected, (total.item() / 2, expected)
wanted = {n: p.grad for n, p in plain.named_parameters()}
for name, p in student.named_parameters():
    assert torch.allclose(p.grad.full_tensor(), wanted[name], atol=1e-5), name

for model in (plain, student):
    torch.optim.SGD(model.parameters(), 0.1).step()
plain_teacher.update()
teacher.update()
ids = rollouts(0)["completion_ids"]
with torch.no_grad():
    new, old = (m(ids).logits for m in (plain_teacher.model, start.eval()))
    assert torch.allclose(teacher.model(ids).logits, new, atol=1e-4)
    assert not torch.allclose(new, old, atol=1e-3)
teacher.rate, rate = 1e-9, teacher.rate
teacher.update()  # while the last parameters are whole
teacher.rate = rate
for state in (teacher.state_dict(), teacher.state_dict(keep=not rank)):
    assert bool(state["weights"]) or rank
    for name, value in state["weights"].items():
        assert torch.allclose(value, plain_teacher.state_dict()["weights"][name], atol=1e-6), name
saved = {**teacher.state_dict(), "weights": {n: w.clone() for n, w in teacher.state_dict()["weights"].items()}}
teacher.update()
teacher.load_state_dict(saved)
for name, value in teacher.state_dict()["weights"].items():
    assert torch.equal(value, saved["weights"][name]), name
print("equal", flush=True)
dist.barrier()  # a process that leaves takes the other's connections with it
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_shards_equal_the_whole(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("equal") == 2
