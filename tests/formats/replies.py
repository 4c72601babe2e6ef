"""Replies in every format's own syntax, for the tests that hold in all of them."""

from nlhf.formats import JudgeFormat
from nlhf.verdict import Verdict

# What a row of the torture table declares: a label, a label in odd writing, two labels, a label that there is not.
CHOICES = ("A", "B", "b", "Ｂ", " A ", "A or B", "D", "tie")

_LETTERS = dict(zip(CHOICES, CHOICES, strict=True))
_NUMBERS = dict(zip(CHOICES, ("1", "2", "2", "２", " 1 ", "1 or 2", "4", "tie"), strict=True))
_COMPARISONS = ("A>B", "B>>A", "b>a", "Ｂ＞Ａ", " A > B ", "A>B or B>A", "A>D", "A=B")
_RATINGS = dict(zip(CHOICES, ("3", "8", "8.0", "８", " 3 ", "3 or 8", "11", "0"), strict=True))
_TWO = ((8, 3), (3, 8), (3, 8), ("３", "８"), (" 8 ", " 3 "), ("8 or 3", "3"), (11, 3), (6, 6))
_SCORES = dict(zip(CHOICES, _TWO, strict=True))


def reply(name: str, choice: str, critique: str = "A praise: good") -> str:
    """A reply of format ``name`` that declares ``choice``, one of `CHOICES`."""
    letter, number = _LETTERS[choice], _NUMBERS[choice]
    first, second = _SCORES[choice]
    match name:
        case "rm_nlhf" | "sandbox":
            return f"<critics>{critique}</critics>\n<choice>[[{letter}]]</choice>"
        case "sdrm":
            return f"{critique}\n<verdict>{letter}</verdict>"
        case "rewardbench" | "rewardbench2" | "skywork_critic":
            return f"{critique}\n[[{letter}]]"
        case "arena_hard":
            return f"{critique}\nMy final verdict is: [[{dict(zip(CHOICES, _COMPARISONS, strict=True))[choice]}]]"
        case "rm_r1":
            return f"<eval>{critique}</eval>\n<answer>[[{letter}]]</answer>"
        case "j1":
            return f"{critique}\n<score_A> 7.5 </score_A> <score_B> 4 </score_B>\n<answer> [[{letter}]] </answer>"
        case "think_rm":
            return f"{critique}\n<answer>{letter}</answer>"
        case "think_rm_strength":
            strengths = ("-2", "3", "+3", "３", " -2 ", "-2 or 3", "4", "0")
            return f"{critique}\n<answer>{dict(zip(CHOICES, strengths, strict=True))[choice]}</answer>"
        case "rrm":
            return f"{critique}\n\\boxed{{Assistant {number}}}"
        case "prometheus2":
            return f"{critique}\n[RESULT] {letter}"
        case "auto_j":
            decision = number if number == "tie" else f"Response {number}"
            return f"{critique}\nSo, the final decision is {decision}"
        case "llmbar":
            return f"{critique}\nOutput ({letter.lower()}) is better."
        case "judgelrm":
            return f"{critique}\n<answer>{first}</answer><answer>{second}</answer>"
        case "deepseek_grm":
            return f"{critique}\nScores: \\boxed{{{first}, {second}}}"
        case "nemotron_genrm":
            rankings = ("2", "6", "6.0", "６", " 2 ", "2 or 6", "7", "3.5")
            ranking = dict(zip(CHOICES, rankings, strict=True))[choice]
            return f"{critique}\n\\boxed{{3, 3}}\n\\boxed{{{ranking}}}"
        case "her_rm" | "her_rm_teacher":
            better = {"b": "CAND_2", "Ｂ": "cand_２", " A ": " cand_1 ", "A or B": "cand_1 or cand_2", "tie": "tie"}
            return her_reply(better.get(choice, f"cand_{number}"), critique)
        case "rewardbench2_ratings":
            return f"{critique}\nRating: {_RATINGS[choice]}"
        case "prometheus2_absolute":
            return f"{critique}\n[RESULT] {_RATINGS[choice].translate(str.maketrans('8８', '4４'))}"
    raise AssertionError(f"write a reply of format {name}")


def her_reply(better: str, critique: str = "A praise: good", **other: str) -> str:
    """HER-RM's whole contract."""
    import json

    comparison = {"principle_name": "Tone", "principle_level": "sentence", "winner": "cand_1", "comparison_reason": "x"}
    result = {
        **other,
        "principle": {"Principle 1": {"principle_name": "Tone", "dimension_name": "Overall Quality"}},
        "analysis": {"principle_comparisons": [comparison], "overall_analysis": critique},
        "better_response": better,
    }
    return json.dumps({"result": [result]}, ensure_ascii=False)


def outcome(judge_format: JudgeFormat, verdict: Verdict) -> str | None:
    """The label; of a rating the label that `reply` wrote it for."""
    if not judge_format.pointwise:
        return verdict.label
    assert verdict.label is None
    return {(3.0,): "A", (8.0,): "B", (4.0,): "B", None: None}[verdict.scores]
