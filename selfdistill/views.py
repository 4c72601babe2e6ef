"""What was measured, to look at: the U, the places, the words and the tokens. Beside the **trainer**, before it starts.

What a model or a data set wrote passes through Jinja's autoescape and shows as text, never as markup.
"""

import bisect
import csv
import functools
import io
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlhf.files import write_bytes
from selfdistill.judged import Judged
from selfdistill.profile import TAIL, Profile

if TYPE_CHECKING:
    import jinja2
    from IPython.display import HTML
    from matplotlib.figure import Figure

SHOWN = 20
"""Judgements on a page."""

# Okabe and Ito's palette, told apart also by the colour-blind.
_TAILS, _MIDDLE, _KEPT = "#d55e00", "0.65", "#0072b2"

# A word: what stands between blanks; in scripts without blanks every character.
_HAN_KANA = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_HAN_KANA}]|[^\s{_HAN_KANA}]+")


# ------------------------------------------------------------------------------------------------------------- figures


def divergence_figure(judged: Sequence[Judged], profile: Profile) -> "Figure":
    """The U: divergence per position in each decile of dH, and all positions by dH and divergence."""
    from matplotlib.colors import LogNorm

    figure, (left, right) = _canvas(9, 3.6, columns=2)
    means = [b.mean_kl or 0.0 for b in profile.deciles]
    numbers = range(1, len(means) + 1)
    colors = [_MIDDLE if TAIL < n <= len(means) - TAIL else _TAILS for n in numbers]
    left.bar(numbers, means, color=colors)
    left.set(xlabel="decile of dH, lowest first", ylabel="KL per position (nats)", xticks=numbers)
    left.set_title(profile.shape, fontsize=9)
    share = left.twinx()
    share.plot(numbers, [100 * (b.kept_share or 0.0) for b in profile.deciles], "o-", color=_KEPT, markersize=4)
    share.set(ylim=(-3, 103))
    share.set_ylabel("kept (%)", color=_KEPT)

    kl, dh = (np.concatenate([getattr(j, name) for j in judged]) for name in ("kl", "dh"))
    # The square root shows both the many small divergences and the few large ones.
    cells = right.hexbin(dh, np.sqrt(np.maximum(kl, 0)), gridsize=45, norm=LogNorm(), cmap="viridis", linewidths=0.2)
    ticks = _round_ticks(float(kl.max()))
    right.set_yticks(np.sqrt(ticks), [f"{t:g}" for t in ticks])
    right.set(xlabel="dH = H_S - H_T (nats)", ylabel="KL (nats, square-root scale)")
    right.axvline(0, color="0.5", linewidth=0.8, linestyle=":")
    right.set_title("all positions", fontsize=9)
    figure.colorbar(cells, ax=right, label="positions")
    return figure


def _round_ticks(top: float) -> np.ndarray:
    """0 and four values up to about ``top``, evenly spaced by their square roots."""
    return np.array([float(f"{top * (k / 4) ** 2:.1g}") for k in range(5)]) if top > 0 else np.zeros(1)


def places_figure(profile: Profile) -> "Figure":
    """Where in the reply the divergence and the positions kept lie."""
    figure, axes = _canvas(6, 3.4)
    centres = [50 * (b.low + b.high) for b in profile.places]
    axes.bar(centres, [b.mean_kl or 0.0 for b in profile.places], width=9, color=_MIDDLE)
    axes.set(xlabel="place in the reply (%)", ylabel="KL per position (nats)", xlim=(0, 100))
    share = axes.twinx()
    share.plot(centres, [100 * (b.kept_share or 0.0) for b in profile.places], "o-", color=_KEPT, markersize=4)
    share.axhline(100 * profile.kept_share, color=_KEPT, linewidth=0.8, linestyle=":")
    share.set(ylim=(-3, 103))
    share.set_ylabel("kept (%); dotted: of all", color=_KEPT)
    return figure


def _canvas(width: float, height: float, columns: int = 1) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def write_png(figure: "Figure", path: Path) -> None:
    """Write a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_bytes(path, buffer.getvalue())


# --------------------------------------------------------------------------------------------------------------- words


def word_rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Which words are kept: a row for each word, the most often kept first.

    A position belongs to the word in which its token begins. Fields: ``word``; ``occurrences``; ``positions``;
    ``kept``, positions kept; ``kept_share`` of its positions; ``mean_kl`` per position; ``kl_share`` of all divergence;
    ``mean_dh``.
    """
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(5))
    for j in judged:
        seen: set[int] = set()
        for (word, start), kl, dh, kept in zip(_words(j.tokens), j.kl, j.dh, j.kept, strict=True):
            sums[word] += (start not in seen, 1, kept, kl, dh)
            seen.add(start)
    total = sum(float(j.kl.sum()) for j in judged)
    rows = [
        {
            "word": word,
            "occurrences": int(occurrences),
            "positions": int(positions),
            "kept": int(kept),
            "kept_share": kept / positions,
            "mean_kl": kl / positions,
            "kl_share": kl / total if total else None,
            "mean_dh": dh / positions,
        }
        for word, (occurrences, positions, kept, kl, dh) in ((w, v.tolist()) for w, v in sums.items())
    ]
    return sorted(rows, key=lambda row: (-row["kept"], -row["positions"], row["word"]))


def _words(tokens: Sequence[str]) -> list[tuple[str, int]]:
    """The word that each token belongs to, and where in the reply it begins."""
    text = "".join(tokens)
    words = list(_WORD.finditer(text))
    starts = [match.start() for match in words]
    found, end = [], 0
    for token in tokens:
        # Where a token is a part of a character and adds no text, the character comes next.
        at, end = end + len(token) - len(token.lstrip()), end + len(token)
        i = bisect.bisect_right(starts, at) - 1
        if i < 0 or at >= words[i].end() or (token and not token.strip()):
            found.append(("(line break)" if "\n" in token else "(blank)", at))
        else:
            found.append((words[i][0].strip(".,;:!?\"'()*_") or words[i][0], starts[i]))
    return found


def words_csv(judged: Sequence[Judged]) -> str:
    """`word_rows` as CSV."""
    rows, buffer = word_rows(judged), io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------------------------- tokens


def tokens_page(judged: Sequence[Judged], title: str, limit: int = SHOWN) -> str:
    """Replies token by token as one HTML page that needs nothing else, dark or light; of each pair one sample first."""
    return _render(judged, limit, page=True, title=title)


def show_tokens(judged: Sequence[Judged], limit: int = SHOWN) -> "HTML":
    """The same for a notebook."""
    from IPython.display import HTML

    return HTML(_render(judged, limit, page=False, title=""))


def _render(judged: Sequence[Judged], limit: int, page: bool, title: str) -> str:
    chosen = sorted(judged, key=lambda j: j.sample)[:limit]
    scale = _full_shade(chosen)
    return _template().render(
        judgements=[_card(j, scale) for j in chosen],
        scale=scale,
        left_out=len(judged) - len(chosen),
        page=page,
        title=title,
    )


def _full_shade(judged: Sequence[Judged]) -> float:
    """The divergence that gets the full shade: 95 % of the positions that have any lie below."""
    kl = np.concatenate([j.kl for j in judged] or [np.zeros(0)])
    kl = kl[kl > 1e-6]
    return float(np.quantile(kl, 0.95)) if len(kl) else 1.0


def _card(j: Judged, scale: float) -> dict[str, Any]:
    total = float(j.kl.sum())
    values = zip(j.tokens, j.kl, j.student_entropy, j.teacher_entropy, j.kept, strict=True)
    return {
        "pair": j.pair,
        "sample": j.sample,
        "verdict": j.verdict,
        "feedback": j.feedback,
        "n": len(j.ids),
        "kept": int(j.kept.sum()),
        "kept_kl": f"{100 * float(j.kl[j.kept].sum()) / total:.1f} %" if total > 0 else "none",
        "mean_kl": total / len(j.ids),
        "tokens": [_token(text, max(0.0, kl), h_s, h_t, kept, scale) for text, kl, h_s, h_t, kept in values],
    }


def _token(text: str, kl: float, h_s: float, h_t: float, kept: bool, scale: float) -> dict[str, Any]:
    state = "kept" if kept else "masked"
    return {
        "text": text.replace("\n", "⏎\n") or "◦",  # something to point at
        "kept": bool(kept),
        "shade": f"{min(1.0, kl / scale):.2f}",
        "tip": f"KL  {kl:.4f}\ndH  {h_s - h_t:+.4f}\nH_S {h_s:.4f}\nH_T {h_t:.4f}\n{state}",
    }


@functools.cache
def _template() -> "jinja2.Template":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("tokens.html.jinja")
