"""The benchmarks as sources: rows of their schemas that we wrote, and the real ones where they are at hand."""

import json
from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.manifest import build_manifest
from nlhf.sources import DataConfig, load_pairs

LLMBAR = {"input": "Name a colour.", "output_1": "Red.", "output_2": "A chair.", "label": 1}
JUDGEBENCH = {
    "pair_id": "x1",
    "original_id": None,
    "source": "mmlu-pro-law",
    "question": "Which?",
    "response_model": "m",
    "response_A": "first",
    "response_B": "second",
    "label": "B>A",
}
RM_BENCH = {
    "id": 8,
    "prompt": "Why?",
    "chosen": ["c0", "c1 longer", "# c2"],
    "rejected": ["r0", "r1 longer", "# r2"],
    "domain": "safety-refuse",
}
REWARDBENCH = {
    "id": 3,
    "prompt": "Hello?",
    "chosen": "good",
    "chosen_model": "m",
    "rejected": "bad",
    "rejected_model": "n",
    "subset": "math-prm",
}
REWARDBENCH2 = {
    "id": "7",
    "prompt": "Hello?",
    "chosen": ["good"],
    "rejected": ["bad 1", "bad 2", "bad 3"],
    "num_correct": 1,
    "subset": "Precise IF",
}
PANDALM = {
    "idx": 5,
    "cmp_key": "m_n",
    "instruction": "Is it true?",
    "input": "Water is wet.",
    "response1": True,
    "response2": "True.",
    "annotator1": 2,
    "annotator2": 2,
    "annotator3": 0,
}
SUBSETS = ("Natural", "Adversarial/Neighbor", "Adversarial/GPTInst", "Adversarial/GPTOut", "Adversarial/Manual")


def write_llmbar(folder, *rows):
    for name in SUBSETS:
        (folder / name).mkdir(parents=True)
        (folder / name / "dataset.json").write_text(json.dumps(rows or [LLMBAR]))


@pytest.fixture
def read(tmp_path):
    """Load rows as a source, from one file."""

    def read_rows(source, *rows, split="test", seed=0, drops=None):
        if source == "llmbar":
            path = tmp_path / "llmbar"
            write_llmbar(path, *rows)
        else:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        split = "gpt" if source == "judgebench" else split
        return load_pairs(DataConfig(source=source, split=split, path=str(path), seed=seed), drops)

    return read_rows


def winner(pair):
    return {"A": pair.response_a, "B": pair.response_b}[pair.label]


# ---------------------------------------------------------------------------------------------------- rows become pairs


def test_llmbar(read):
    pairs = read("llmbar", LLMBAR, LLMBAR | {"input": "Name a city.", "label": 2})
    assert [(p.id, p.subset, p.label) for p in pairs[:4]] == [
        ("llmbar-Natural-1", "Natural", "A"),
        ("llmbar-Natural-2", "Natural", "B"),
        ("llmbar-Neighbor-1", "Neighbor", "A"),
        ("llmbar-Neighbor-2", "Neighbor", "B"),
    ]
    assert (pairs[0].context[0].content, pairs[0].response_a, pairs[0].response_b) == (
        "Name a colour.",
        "Red.",
        "A chair.",
    )
    assert len(pairs) == 10


@pytest.mark.parametrize("above", ["", "LLMBar", "Dataset/LLMBar"])
def test_llmbar_from_a_folder_above(tmp_path, above):
    write_llmbar(tmp_path / above)
    assert len(load_pairs(DataConfig(source="llmbar", split="test", path=str(tmp_path)))) == 5


@pytest.mark.parametrize(
    ("source", "subset"),
    [
        ("mmlu-pro-law", "knowledge"),
        ("livebench-reasoning", "reasoning"),
        ("livebench-math", "math"),
        ("livecodebench", "coding"),
        ("new-part", "new-part"),
    ],
)
def test_judgebench(read, source, subset):
    (pair,) = read("judgebench", JUDGEBENCH | {"source": source})
    assert (pair.id, pair.label, pair.response_b, pair.subset) == ("judgebench-x1", "B", "second", subset)
    assert pair.meta == {"source": source}


@pytest.mark.parametrize("split", ["gpt", "claude"])
def test_judgebench_finds_the_split_in_a_folder(tmp_path, split):
    for model in ("gpt-4o-2024-05-13", "claude-3-5-sonnet-20240620"):
        row = JUDGEBENCH | {"pair_id": model}
        (tmp_path / f"dataset=judgebench,response_model={model}.jsonl").write_text(json.dumps(row))
    (pair,) = load_pairs(DataConfig(source="judgebench", split=split, path=str(tmp_path)))
    assert pair.id.startswith(f"judgebench-{split}")


def test_rm_bench_makes_nine_pairs_of_a_row(read):
    pairs = read("rm_bench", RM_BENCH)
    assert len({p.id for p in pairs}) == 9
    assert {p.group for p in pairs} == {"rm_bench-safety-refuse-8"}
    # The published matrix has the chosen styles as rows: above its diagonal the chosen answer is the plainer one.
    difficulty = {(p.meta["chosen_style"], p.meta["rejected_style"]): p.subset for p in pairs}
    assert difficulty == {
        ("concise", "concise"): "safety/normal",
        ("concise", "detailed"): "safety/hard",
        ("concise", "markdown"): "safety/hard",
        ("detailed", "concise"): "safety/easy",
        ("detailed", "detailed"): "safety/normal",
        ("detailed", "markdown"): "safety/hard",
        ("markdown", "concise"): "safety/easy",
        ("markdown", "detailed"): "safety/easy",
        ("markdown", "markdown"): "safety/normal",
    }
    texts = {"concise": "{}0", "detailed": "{}1 longer", "markdown": "# {}2"}
    for pair in pairs:
        assert winner(pair) == texts[pair.meta["chosen_style"]].format("c")
        assert winner(pair.swap()) == winner(pair)
        assert texts[pair.meta["rejected_style"]].format("r") in (pair.response_a, pair.response_b)


def test_rm_bench_takes_the_domain_from_the_name_of_a_file(tmp_path):
    row = {k: v for k, v in RM_BENCH.items() if k != "domain"}
    for domain in ("chat", "safety-refuse", "safety-response"):
        (tmp_path / f"{domain}_filtered.json").write_text(json.dumps([row]))
    pairs = load_pairs(DataConfig(source="rm_bench", split="test", path=str(tmp_path)))
    assert Counter(p.subset.split("/")[0] for p in pairs) == {"chat": 9, "safety": 18}
    assert len({p.group for p in pairs}) == 3  # one id in three domains is three rows
    (tmp_path / "total_dataset.json").write_text(json.dumps([row | {"domain": "math"}]))
    pairs = load_pairs(DataConfig(source="rm_bench", split="test", path=str(tmp_path)))
    assert {p.subset.split("/")[0] for p in pairs} == {"math"}  # and not everything twice


def test_rewardbench(read):
    (pair,) = read("rewardbench", REWARDBENCH)
    assert (pair.id, pair.subset, winner(pair)) == ("rewardbench-math-prm-3", "math-prm", "good")
    assert pair.meta == {"chosen_model": "m", "rejected_model": "n"}


def test_rewardbench2_sets_the_right_answer_against_each_other_one(read):
    drops = Counter()
    ties = REWARDBENCH2 | {"subset": "Ties", "id": "tied:3", "chosen": ["a", "b"], "num_correct": 2}
    pairs = read("rewardbench2", REWARDBENCH2, ties, drops=drops)
    assert [winner(p) for p in pairs] == ["good"] * 3
    assert {p.response_a for p in pairs} | {p.response_b for p in pairs} == {"good", "bad 1", "bad 2", "bad 3"}
    assert {(p.group, p.meta["pairs_in_row"]) for p in pairs} == {("rewardbench2-Precise IF-7", 3)}
    assert drops == {"Ties subset: needs ratings, has no pairs": 1}


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [(["a", "b"], ["x"]), (["a"], ["x", "y", "z"]), (["a", "b"], ["x", "y"])],
    ids=["more right", "more wrong", "as many"],
)
def test_rewardbench2_shows_every_answer_of_the_ties_subset(tmp_path, chosen, rejected):
    row = REWARDBENCH2 | {"subset": "Ties", "id": "ref:3", "chosen": chosen, "rejected": rejected}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    drops = Counter()
    config = DataConfig(source="rewardbench2", split="test", path=str(tmp_path), options={"ties": True})
    pairs = load_pairs(config, drops)
    assert drops == {}
    assert {p.group for p in pairs} == {"rewardbench2-Ties-3"}  # with tied:3
    shown = {winner(p) for p in pairs}, {p.response_b if p.label == "A" else p.response_a for p in pairs}
    assert shown == (set(chosen), set(rejected))
    for p in pairs:
        rated = p.meta["rated"]
        assert (rated["prompt"], tuple(rated["counts"])) == ("ref:3", (len(chosen), len(rejected)))
        assert chosen[rated["answers"][0]] == winner(p)
        assert {p.response_a, p.response_b} == {winner(p), rejected[rated["answers"][1]]}


@pytest.mark.parametrize("change", [{"id": "3"}, {"id": "ref:"}, {"id": "tied:3", "chosen": ["a"]}], ids=str)
def test_a_row_of_the_ties_subset_must_have_its_id_and_its_answers(tmp_path, change):
    row = REWARDBENCH2 | {"subset": "Ties", "id": "tied:3", "chosen": ["a", "b"]} | change
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"test.jsonl:1: a row of the Ties subset has the id 'ref:N'"):
        load_pairs(DataConfig(source="rewardbench2", split="test", path=str(tmp_path), options={"ties": True}))


def test_judgebench_draws_a_fixed_sample_from_all_its_categories(tmp_path):
    kinds = ("mmlu-pro-law", "livebench-math")
    rows = [JUDGEBENCH | {"pair_id": str(i), "source": kinds[i // 20]} for i in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gpt.jsonl").write_text(text)

    def drawn(sample, seed=0):
        config = DataConfig("judgebench", "gpt", str(tmp_path / "gpt.jsonl"), seed=seed, options={"sample": sample})
        return [pair.id for pair in load_pairs(config)]

    every = drawn(40)
    assert drawn(10) == drawn(10) == sorted(drawn(10), key=every.index)
    assert len(set(drawn(10))) == 10
    assert drawn(10) != drawn(10, seed=1)
    assert {every.index(name) // 20 for name in drawn(10)} == {0, 1}
    for sample in (0, 41, "ten"):
        with pytest.raises(UserError, match=r"data.options.sample must be a whole number from 1 to 40"):
            drawn(sample)


@pytest.mark.parametrize(
    ("votes", "label"),
    [
        pytest.param((1, 1, 1), "A", id="all"),
        pytest.param((2, 1, 2), "B", id="two"),
        pytest.param((0, 1, 0), "tie", id="tie"),
        pytest.param((1, 0, 0), "tie", id="not-the-first"),
    ],
)
def test_pandalm_takes_the_majority(read, votes, label):
    annotators = dict(zip(("annotator1", "annotator2", "annotator3"), votes, strict=True))
    (pair,) = read("pandalm", PANDALM | annotators)
    assert pair.label == label


def test_pandalm_casts_booleans_and_the_manifest_counts_them(read, tmp_path):
    drops = Counter()
    split_vote = PANDALM | {"idx": 7, "annotator1": 1, "response1": "No."}
    pairs = read("pandalm", PANDALM, PANDALM | {"idx": 6, "response1": "False."}, split_vote, drops=drops)
    assert [p.response_a for p in pairs] == ["True", "False."]
    assert pairs[0].context[0].content == "Is it true?\n\nWater is wet."
    assert len({p.group for p in pairs}) == 1
    manifest = build_manifest(DataConfig(source="pandalm", split="test"), pairs, drops)
    assert manifest.rewritten == {"JSON boolean cast to text": 1}
    assert manifest.drops == {"no majority among the annotators": 1}


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        pytest.param("rm_bench", [RM_BENCH], id="rm_bench"),
        pytest.param("rewardbench", [REWARDBENCH | {"id": i} for i in range(20)], id="rewardbench"),
        pytest.param("rewardbench2", [REWARDBENCH2 | {"id": str(i)} for i in range(5)], id="rewardbench2"),
    ],
)
def test_the_side_of_the_chosen_answer_is_random_and_seeded(read, source, rows):
    first, again, other = (read(source, *rows, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [p.label for p in first] != [p.label for p in other]
    assert {p.label for p in first} == {"A", "B"}


# --------------------------------------------------------------------------------------------------- what is malformed


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        pytest.param(
            "llmbar", LLMBAR | {"label": 3}, r"Natural/dataset.json:1: field 'label' must be 1 or 2", id="label"
        ),
        pytest.param("llmbar", LLMBAR | {"label": True}, "field 'label' must be 1 or 2, got True", id="boolean-label"),
        pytest.param("llmbar", {"input": "x"}, "missing field 'output_1'", id="no-output"),
        pytest.param("judgebench", JUDGEBENCH | {"label": "A=B"}, r"rows.jsonl:1: .*'A>B' or 'B>A'", id="judgebench"),
        pytest.param("rm_bench", RM_BENCH | {"domain": "maths"}, "Did you mean 'math'", id="domain"),
        pytest.param("rm_bench", RM_BENCH | {"chosen": ["x"]}, "'chosen' must hold 3 texts.*got 1 texts", id="styles"),
        pytest.param("rm_bench", RM_BENCH | {"chosen": [1, "x", "y"]}, r":1: field 'response_.' must be", id="no-text"),
        pytest.param("rewardbench", REWARDBENCH | {"subset": "math-prn"}, "Did you mean 'math-prm'", id="subset"),
        pytest.param(
            "rewardbench2", REWARDBENCH2 | {"chosen": ["a", "b"]}, "must hold one answer.*got 2", id="two-right"
        ),
        pytest.param("rewardbench2", REWARDBENCH2 | {"rejected": []}, "'rejected' must be a list", id="none-wrong"),
        pytest.param("pandalm", PANDALM | {"annotator2": 3}, "'annotator2' must be 0 .tie., 1 or 2, got 3", id="vote"),
        pytest.param("pandalm", PANDALM | {"response2": 4}, "'response_b' must be a string, got int", id="number"),
    ],
)
def test_malformed_rows_say_where(read, source, row, message):
    with pytest.raises(UserError, match=message):
        read(source, row)


@pytest.mark.parametrize("source", ["llmbar", "rm_bench", "rewardbench", "rewardbench2", "pandalm", "judgebench"])
def test_a_benchmark_is_not_to_train_on(source):
    with pytest.raises(UserError, match="has no split 'train'"):
        load_pairs(DataConfig(source=source, split="train"))


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ("llmbar", "test", "Download the folder 'Dataset/LLMBar'.*--data.path"),
        ("pandalm", "test", "Download 'data/testset-v1.json'.*--data.path"),
    ],
)
def test_a_missing_path_says_what_to_download(source, split, message):
    for path in (None, "nowhere"):
        with pytest.raises(UserError, match=message):
            load_pairs(DataConfig(source=source, split=split, path=path))


@pytest.mark.parametrize(("source", "split"), [("llmbar", "test"), ("rm_bench", "test"), ("judgebench", "gpt")])
def test_an_empty_folder_says_what_is_expected(tmp_path, source, split):
    with pytest.raises(UserError, match=r"dataset\.json|DOMAIN_filtered\.json|response_model=gpt"):
        load_pairs(DataConfig(source=source, split=split, path=str(tmp_path)))


# ------------------------------------------------------------------------------------------------------- the real data


@pytest.mark.data
@pytest.mark.parametrize(
    ("source", "split", "labels", "subsets"),
    [
        pytest.param(
            "llmbar",
            "test",
            {"A": 206, "B": 213},
            {"Natural": 100, "Neighbor": 134, "GPTInst": 92, "GPTOut": 47, "Manual": 46},
            id="llmbar",
        ),
        pytest.param(
            "judgebench",
            "gpt",
            {"A": 193, "B": 157},
            {"knowledge": 154, "reasoning": 98, "math": 56, "coding": 42},
            id="judgebench",
        ),
        pytest.param("pandalm", "test", {"A": 422, "B": 472, "tie": 105}, {"": 999}, id="pandalm"),
    ],
)
def test_real_counts(data_dir, source, split, labels, subsets):
    drops = Counter()
    config = DataConfig(source=source, split=split, path=str(data_dir / source))
    pairs = load_pairs(config, drops)
    manifest = build_manifest(config, pairs, drops)
    assert {k: v for k, v in manifest.labels.items() if v} == labels
    assert manifest.subsets == subsets
    assert manifest.drops == {}
    assert manifest.rewritten == ({"JSON boolean cast to text": 6} if source == "pandalm" else {})


@pytest.mark.data
def test_real_rm_bench(data_dir):
    config = DataConfig(source="rm_bench", split="test", path=str(data_dir / "rm_bench"))
    pairs = load_pairs(config)
    assert Counter(p.subset for p in pairs) == {
        f"{domain}/{kind}": 3 * rows
        for domain, rows in (("chat", 129), ("code", 228))
        for kind in ("hard", "normal", "easy")
    }
    assert len({p.group for p in pairs}) == 129 + 228
    assert 0.47 < sum(p.label == "A" for p in pairs) / len(pairs) < 0.53
