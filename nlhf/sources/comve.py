"""ComVE as a **source**: two short statements, one against common sense, with three human reasons why it is.

SemEval-2020 task 4 (Wang et al., 2020, "Commonsense Validation and Explanation", CC BY-SA 4.0). The sensible statement
of subtask A wins; the reasons of subtask C blame the other one; the wrong options of subtask B are kept as hard
negatives for a critique scorer.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.sources.rows import check_split, csv_records, next_existing

QUESTION = "Which statement makes sense?"
_PUBLISHED = "https://github.com/wangcunxiang/SemEval2020-Task4-Commonsense-Validation-and-Explanation"
# Folder (ours, then the published name with its two blanks), ending of the data files, ending of the answer files.
_LAYOUT = {
    "train": (("train", "Training  Data", "Training Data"), "data_all", "answers_all"),
    "validation": (("dev", "Dev Data"), "dev_data", "gold_answers"),
    "test": (("test", "Test Data"), "test_data", "gold_answers"),
}


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read one split of ComVE; A and B are ``sent0`` and ``sent1``, in the order of the file.

    ``meta["confusing_reasons"]`` holds the texts of subtask B that do not explain the error: two, less any that the
    file leaves blank or gives as a reason as well (six in all, in train).

    Args:
        path: The folder that holds the three splits ("ALL data" of the published repository, or a copy with the folders
            train, dev and test).
        split: train, validation or test.
        drops: Not used: every row makes a pair.
        seed: Not used: the order is the file's.

    Raises:
        UserError: a file is missing or malformed, or the subtasks do not cover the same ids.
    """
    check_split(split, list(_LAYOUT), "comve")
    names, data, answers = _LAYOUT[split]
    folder = _folder(path, names)
    wrong = _table(folder / f"subtaskA_{answers}.csv", ("id", "answer"))
    options = _table(folder / f"subtaskB_{data}.csv", ("id", "FalseSent", "OptionA", "OptionB", "OptionC"))
    right_option = _table(folder / f"subtaskB_{answers}.csv", ("id", "answer"))
    reasons = _table(folder / f"subtaskC_{answers}.csv", ("id", "reason 1", "reason 2", "reason 3"))
    for key, (where, (first, second)) in _table(folder / f"subtaskA_{data}.csv", ("id", "sent0", "sent1")).items():
        loser = _lookup(wrong, key, where, {"0": "A", "1": "B"})
        option = _lookup(right_option, key, where, {"A": 0, "B": 1, "C": 2})
        explaining = [text for text in _row(reasons, key, where) if text.strip()]
        wrong_options = [text for i, text in enumerate(_row(options, key, where)[1:]) if i != option and text.strip()]
        field = f"weaknesses_{loser.lower()}"
        yield Pair(
            id=f"comve-{split}-{key}",
            context=[Turn("user", QUESTION)],
            response_a=first,
            response_b=second,
            label="B" if loser == "A" else "A",
            critiques=[HumanCritique(**{field: text}) for text in explaining],
            source="comve",
            meta={"confusing_reasons": [text for text in wrong_options if text not in explaining]},
        )


Table = dict[str, tuple[str, list[str]]]


def _folder(path: str | None, names: tuple[str, ...]) -> Path:
    if path is None or not Path(path).is_dir():
        missing = "no folder given" if path is None else f"{path}: no such folder"
        raise UserError(
            f"source 'comve': {missing}. Download the folder 'ALL data' of {_PUBLISHED} and name it with --data.path; "
            "expected files: train/subtask{A,B,C}_{data,answers}_all.csv, "
            "dev/subtask{A,B,C}_{dev_data,gold_answers}.csv, test/subtask{A,B,C}_{test_data,gold_answers}.csv"
        )
    return next_existing(Path(path), names, "this split of ComVE")


def _table(path: Path, columns: tuple[str, ...]) -> Table:
    """The records of one file by id: their place and what follows the id. Only the data files have a header."""
    if not path.exists():
        raise UserError(f"{path}: missing; ComVE is published at {_PUBLISHED} (folder 'ALL data')")
    table: Table = {}
    for number, record in csv_records(path):
        if len(record) != len(columns):
            raise UserError(f"{path}:{number}: expected {len(columns)} columns {list(columns)}, got {len(record)}")
        if record[0] == "id":
            continue
        if record[0] in table:
            raise UserError(f"{path}:{number}: the id {record[0]!r} occurs twice")
        table[record[0]] = f"{path}:{number}", record[1:]
    if not table:
        raise UserError(f"{path}: the file holds no rows")
    return table


def _row(table: Table, key: str, where: str) -> list[str]:
    if key not in table:
        file = next(iter(table.values()))[0].rsplit(":", 1)[0]
        raise UserError(f"{where}: the id {key!r} is missing in {file}; use files of one split and release")
    return table[key][1]


def _lookup(table: Table, key: str, where: str, meaning: dict):
    answer = _row(table, key, where)[0].strip()
    if answer not in meaning:
        raise UserError(f"{table[key][0]}: the answer must be one of {', '.join(meaning)}, got {answer!r}")
    return meaning[answer]
