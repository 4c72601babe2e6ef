"""Time and memory of the loss of one self-distillation step, forward and backward: ours against trl's three.

``python benchmarks/self_distillation_step.py`` prints the table for a vocabulary of 151,936 (Qwen3), hidden size
1,024, 1,024 and 2,048 positions, rho = 0.7. All get the same weights and hidden states of student and teacher, and end
with the gradients of the student's hidden states and head:

- ``ours``: `selfdistill`: entropies and divergence of all positions, the mask, the loss over the positions kept.
- ``trl top-k``: the loss of trl's SDFT and SDPO trainers, top-100 of the student and a tail, over all positions.
- ``trl full``: the same trainers' loss over the vocabulary.
- ``trl chunked``: the loss of trl's DistillationTrainer, from hidden states, over the vocabulary.

Each runs in a process of its own, one after the other. Memory is the highest resident set above the inputs (both heads,
all hidden states) and the gradient of the head, which all must hold. Time is the best of the repeats, by the clock and
by the processor, which on a busy machine is the one to believe. The last two columns say whether ours meets its goals;
the loss is printed so that a wrong run shows (trl's full and chunked losses must agree, and with rho = 0 ours is near
that of top-k).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

METHODS = ("ours", "trl_topk", "trl_full", "trl_chunked")
# At most these shares of the other's memory and time, at 2,048 positions.
GOALS = {"trl_topk": (1 / 12, 0.75), "trl_full": (1 / 12, 0.60), "trl_chunked": (1 / 5, 0.45)}
TOP_K = 100


def main() -> None:
    """Run every method at every length and print the table."""
    args = _arguments()
    if args.method:
        print(json.dumps(_measure(args)))
        return
    import torch

    print(
        f"vocabulary {args.vocab:,}, hidden size {args.hidden:,}, rho {args.rho}, chunks of {args.chunk}, "
        f"{args.threads} thread(s), torch {torch.__version__}, best of {args.repeats}\n"
    )
    print("| positions | method | loss | seconds | CPU s | peak MB | time, CPU share (goal) | memory share (goal) |")
    print("|---|---|---|---|---|---|---|---|")
    for positions in args.positions:
        ours = None
        for method in args.methods:
            result = _in_process(method, positions, args)
            ours = result if method == "ours" else ours
            print(_row(positions, method, result, ours), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rho", type=float, default=0.7)
    parser.add_argument("--chunk", type=int, default=256, help="positions whose logits ours holds at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)  # what a process of its own is told
    return parser.parse_args()


def _in_process(method: str, positions: int, args: argparse.Namespace) -> dict[str, float]:
    options = {"positions": positions, "vocab": args.vocab, "hidden": args.hidden, "rho": args.rho}
    options |= {"chunk": args.chunk, "repeats": args.repeats, "threads": args.threads, "method": method}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{method} at {positions} positions failed ({done.returncode}):\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _row(positions: int, method: str, result: dict[str, float], ours: dict[str, float] | None) -> str:
    time_share = memory_share = ""
    if ours and method in GOALS:
        memory_goal, time_goal = GOALS[method]
        share = {key: ours[key] / result[key] for key in ("seconds", "cpu", "memory")}
        time_share = f"{share['seconds']:.2f}, {share['cpu']:.2f} ({_verdict(share['cpu'], time_goal)})"
        memory_share = f"{share['memory']:.3f} ({_verdict(share['memory'], memory_goal)})"
    figures = f"{result['loss']:.6f} | {result['seconds']:.2f} | {result['cpu']:.2f} | {result['memory'] / 2**20:,.0f}"
    return f"| {positions:,} | {method.replace('_', ' ')} | {figures} | {time_share} | {memory_share} |"


def _verdict(share: float, goal: float) -> str:
    return f"{'meets' if share <= goal else 'misses'} {goal:.3g}"


def _measure(args: argparse.Namespace) -> dict[str, float]:
    """Time, memory and loss of one method, in this process."""
    import torch

    torch.set_num_threads(args.threads)
    (positions,) = args.positions
    step = _step(args.method, args.rho, args.chunk)
    tiny = _inputs(torch, 8, max(256, 2 * TOP_K), 16)
    step(*tiny)  # loads what is loaded at first use, so that it is not counted
    inputs = _inputs(torch, positions, args.vocab, args.hidden)
    hidden, weight = inputs[0], inputs[1]
    before = _resident("VmRSS")
    seconds, cpu = [], []
    for _ in range(args.repeats):
        hidden.grad = weight.grad = None
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(*inputs)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    peak = _resident("VmHWM")
    head_gradient = weight.numel() * weight.element_size()
    return {"seconds": min(seconds), "cpu": min(cpu), "memory": peak - before - head_gradient, "loss": loss}


def _inputs(torch, positions: int, vocab: int, hidden: int):
    """Logits with a standard deviation of about 3, and a teacher whose differ from them by about 0.5."""
    torch.manual_seed(0)
    states = torch.randn(positions, hidden)
    weight = torch.empty(vocab, hidden).normal_(std=3 / hidden**0.5)
    teacher_states = states + 0.15 * torch.randn(positions, hidden)
    return states.requires_grad_(), weight.requires_grad_(), teacher_states, weight.detach() * 1.01


def _resident(name: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at the most so far (VmHWM); Linux."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def _step(method: str, rho: float, chunk: int) -> Callable[..., float]:
    """A function (student states, student weight, teacher states, teacher weight) -> loss, backward included."""
    import torch

    def ours(hidden, weight, teacher_hidden, teacher_weight):
        from selfdistill.divergence import Objective, score, weighted_divergence
        from selfdistill.head import Head
        from selfdistill.selection import kept_count, select

        objective, head = Objective(top_k=TOP_K), Head(weight)
        scores = score(hidden, head, teacher_hidden, Head(teacher_weight), objective=objective, chunk=chunk)
        mask = torch.ones(1, len(hidden), dtype=torch.bool)
        h_s, h_t = scores.student_entropy[None], scores.teacher_entropy[None]
        keep = select("low_dh", rho, mask, student_entropy=h_s, teacher_entropy=h_t)[0]
        weights = torch.full((int(keep.sum()),), 1 / kept_count(len(hidden), rho))
        loss, _ = weighted_divergence(hidden[keep], head, scores.teacher[keep], weights, objective, chunk)
        return loss

    def trl_topk(*inputs):
        from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

        options = {"distillation_topk": TOP_K, "distillation_alpha": 1.0, "distillation_add_tail": True}
        return compute_topk_self_distillation_loss(*_logits(torch, *inputs), **options).mean()

    def trl_full(*inputs):
        from trl.experimental.sdpo.loss_utils import compute_full_logit_self_distillation_loss

        return compute_full_logit_self_distillation_loss(*_logits(torch, *inputs), distillation_alpha=1.0).mean()

    def trl_chunked(hidden, weight, teacher_hidden, teacher_weight):
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        arguments = (hidden, weight, None, teacher_hidden, teacher_weight, None, 1.0)
        return ChunkedDivergenceFunction.apply(*arguments)[0].mean()

    loss_of = {"ours": ours, "trl_topk": trl_topk, "trl_full": trl_full, "trl_chunked": trl_chunked}[method]

    def step(*inputs):
        loss = loss_of(*inputs)
        loss.backward()
        return loss.item()

    return step


def _logits(torch, hidden, weight, teacher_hidden, teacher_weight):
    """As trl's self-distillation trainers have them: the student's with gradient, the teacher's without."""
    student = torch.nn.functional.linear(hidden, weight)
    with torch.no_grad():
        teacher = torch.nn.functional.linear(teacher_hidden, teacher_weight)
    return student, teacher


if __name__ == "__main__":
    main()
