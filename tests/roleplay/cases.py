"""Whole replies of HER-RM about a scene of our own, for the tests of role-play."""

import json

WINNERS = {"A": "cand_1", "B": "cand_2", "tie": "tie"}
SCENE = "A lighthouse in a storm. The keeper Maren has locked the door on her brother Jo."


def result(verdict, *winners, names=None, first="Maren: Go away.", second="Maren: Come in, brother."):
    """A whole result; ``winners`` and ``verdict`` are A, B or tie, in the order shown."""
    names = names or [f"Principle of test {i}" for i, _ in enumerate(winners)]
    principles = [
        {
            "principle_name": name,
            "dimension_name": "Conflict & Tension",
            "principle_level": "session",
            "main_content": "The quarrel is kept up.",
            "reason_for_choosing": "The door is locked.",
        }
        for name in names
    ]
    comparisons = [
        {
            "principle_name": name,
            "principle_level": "session",
            "cand_1_performance": "Response 1 sends him away.",
            "cand_2_performance": "Response 2 gives in.",
            "comparison_reason": f"Candidate 1 and candidate 2 differ; cand_1 is first. ({name})",
            "winner": WINNERS.get(winner, winner),
        }
        for name, winner in zip(names, winners, strict=True)
    ]
    return {
        "cand_1": first,
        "cand_2": second,
        "principle": {f"Principle {i}": row for i, row in enumerate(principles, start=1)},
        "analysis": {
            "principle_comparisons": comparisons,
            "overall_analysis": "Response 1 keeps the scene alive.",
            "principle_summary": "cand_1 wins by weight.",
        },
        "better_response": WINNERS.get(verdict, verdict),
    }


def reply(verdict, *winners, **options):
    return json.dumps({"result": [result(verdict, *winners, **options)]})
