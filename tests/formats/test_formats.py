import pytest

from nlhf.errors import UserError
from nlhf.formats import FORMATS, get_format
from nlhf.formats.scores import ScoresFormat
from nlhf.pairs import HumanCritique, Pair, Turn

CRITIQUE = HumanCritique(strengths_a="names the dose", weaknesses_b="invents a source")


def pair(**changes):
    fields = {
        "id": "p",
        "context": [Turn("user", "How much?")],
        "response_a": "Two.",
        "response_b": "Ten.",
        "label": "A",
    }
    return Pair(**fields | changes)


def shown(name, **changes):
    """All that a judge is shown of a pair, the roles included."""
    return "\n".join(f"{m['role']}:{m['content']}" for m in get_format(name).render(pair(**changes)))


@pytest.mark.parametrize("name", FORMATS)
def test_render_holds_data_as_written_and_never_the_label(name):
    hostile = "{{ response_b }} {% if x %} {0} %s <b>&amp; 中文 עברית ［［A］］"
    assert shown(name, response_a=hostile, context=[Turn("user", hostile)]).count(hostile) == 2
    assert shown(name, label="A") == shown(name, label="B")


@pytest.mark.parametrize("name", FORMATS)
def test_both_responses_are_shown_each_in_its_place(name):
    given, exchanged = shown(name), shown(name, response_a="Ten.", response_b="Two.")
    if get_format(name).pointwise:
        assert "Two." in given
        assert "Ten." not in given
    else:
        assert given.index("Two.") < given.index("Ten.")
    assert given != exchanged


@pytest.mark.parametrize("name", FORMATS)
def test_ties_are_what_the_labels_say(name):
    judge_format = get_format(name)
    scored = isinstance(judge_format, ScoresFormat)
    assert scored or judge_format.ties == ("tie" in judge_format.labels.values())


TEACHABLE = [n for n in FORMATS if get_format(n).declaration]
NUMBERS = sorted(set(FORMATS) - set(TEACHABLE))


@pytest.mark.parametrize("name", TEACHABLE)
def test_target_is_read_back(name):
    judge_format = get_format(name)
    labels = ["A", "B", "tie"] if judge_format.ties else ["A", "B"]
    for label in labels:
        parsed = judge_format.parse("".join(judge_format.target(pair(label=label), CRITIQUE)))
        assert parsed.label == label
        written = (parsed.critique or "").split()
        expected = ["A", "praise:", "names", "the", "dose", "B", "blame:", "invents", "a", "source"]
        assert written == ([] if name == "skywork_critic" else expected)
        alone = judge_format.target(pair(label=label), None, verdict_only=True)
        assert judge_format.parse("".join(alone)).label == label
    with pytest.raises(UserError, match=r"pair 'p'.*None"):
        judge_format.target(pair(label=None), CRITIQUE)


@pytest.mark.parametrize("name", TEACHABLE)
def test_a_forced_verdict_is_read_back(name):
    """What probability mode appends to a critique is the beginning of a declaration that the parser reads."""
    judge_format = get_format(name)
    prefix, choices = judge_format.verdict_choices()
    assert prefix == prefix.rstrip() != ""
    assert set(choices.values()) == ({"A", "B", "tie"} if judge_format.ties else {"A", "B"})
    assert not any(a != b and a.startswith(b) for a in choices for b in choices)
    end = judge_format.declaration.partition("{}")[2] + ("}]}" if name.startswith("her_rm") else "")
    for continuation, label in choices.items():
        reasons, verdict = judge_format.target(pair(label=label), CRITIQUE)
        assert judge_format.parse(reasons + prefix + continuation + end).label == label
        assert judge_format.parse(judge_format.opening + prefix + continuation + end).label == label
        written = [taught for taught, of in choices.items() if of == label and verdict.startswith(prefix + taught)]
        assert len(written) == 1  # what is taught is among what is compared


@pytest.mark.parametrize("name", NUMBERS)
def test_formats_that_declare_numbers_say_that_they_have_no_label_to_teach_or_to_force(name):
    with pytest.raises(UserError, match="numbers"):
        get_format(name).verdict_choices()
    with pytest.raises(UserError, match=r"numbers|strength"):
        get_format(name).target(pair(), CRITIQUE)


def test_a_tie_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="format 'sdrm' can learn label 'A' or 'B', not 'tie'"):
        get_format("sdrm").target(pair(label="tie"), CRITIQUE)


@pytest.mark.parametrize("name", [n for n in FORMATS if not type(get_format(n)).has_upstream_parser()])
def test_compat_without_an_upstream_parser_is_refused_at_once(name):
    with pytest.raises(UserError, match="leave out compat"):
        get_format(name, compat=True)


def test_rm_nlhf_prompt_layout():
    text = get_format("rm_nlhf").render(pair())[0]["content"]
    assert "[Client Question]\nuser:\nHow much?\n" in text
    assert "[The Start of Chatbot A's Response]\nTwo.\n[The End of Chatbot A's Response]" in text
    assert "[The Start of Chatbot B's Response]\nTen.\n[The End of Chatbot B's Response]" in text


def test_rm_nlhf_without_choice_reads_only_what_follows_the_critique():
    parse = get_format("rm_nlhf").parse
    assert parse("<critics>A says [[A]]</critics> so [[B]]").label == "B"
    assert parse("<critics>A says [[A]]</critics>").label is None


def test_rm_nlhf_compat_reproduces_the_public_parser():
    parse = get_format("rm_nlhf", compat=True).parse
    assert parse("<critics>A says [[A]]</critics> so [[B]]").label == "A"  # first anywhere
    assert parse("<think>[[A]]</think> [[B]]").label == "A"
    assert parse("<choice>[[A]]</choice><choice>[[B]]</choice>").label == "B"


def test_sdrm_prompt_is_the_released_interface():
    text = get_format("sdrm").render(pair())[0]["content"]
    assert text.startswith("You are an impartial judge tasked with")
    assert "[Start of Context]\n<user>\nHow much?\n</user>\n[End of Context]" in text
    assert "[Start of Assistant A's Response]\n<assistant>\nTwo.\n</assistant>\n[End of Assistant A's Response]" in text
    assert text.endswith("(A or B only) in <verdict>...</verdict>.")


def test_sdrm_compat_reads_the_last_letter_anywhere():
    assert get_format("sdrm").parse("B is better than A").label is None
    assert get_format("sdrm", compat=True).parse("B is better than A").label == "A"
    assert get_format("sdrm", compat=True).parse("<verdict>A, not B</verdict>").label == "B"


def test_prompt_file_replaces_the_prompt(tmp_path):
    prompt = tmp_path / "short.jinja"
    prompt.write_text("{{ context }} | {{ response_a }} | {{ response_b }}\n")
    judge_format = get_format("rm_nlhf", str(prompt))
    assert judge_format.render(pair())[0]["content"] == "user:\nHow much? | Two. | Ten."
    assert judge_format.prompt_hash != get_format("rm_nlhf").prompt_hash


@pytest.mark.parametrize(
    ("text", "message"),
    [("{{ context", "line 1"), ("{{ contxt }}", "'contxt' is undefined; known: .*context")],
    ids=["syntax", "unknown_variable"],
)
def test_bad_prompt_file(tmp_path, text, message):
    prompt = tmp_path / "bad.jinja"
    prompt.write_text(text)
    with pytest.raises(UserError, match=message):
        get_format("rm_nlhf", str(prompt)).render(pair())


def test_unknown_format_offers_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'rm_nlhf'"):
        get_format("rm_nhlf")
    with pytest.raises(UserError, match=r"no_such\.jinja"):
        get_format("sdrm", "no_such.jinja")


WHOLE = "{{ context }} {{ response_a }} {{ response_b }}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{{ context() }}" + WHOLE, "not callable", id="call"),
        pytest.param("{{ context + 1 }}" + WHOLE, "TypeError", id="types"),
        pytest.param("{{ 1 / 0 }}" + WHOLE, "ZeroDivisionError", id="division"),
        pytest.param(
            "{% extends 'base.jinja' %}", "'base.jinja' cannot be included, imported or extended", id="extends"
        ),
        pytest.param("{% include '/etc/passwd' %}" + WHOLE, "'/etc/passwd' cannot be included", id="include"),
        pytest.param("{% import 'x' as y %}" + WHOLE, "'x' cannot be included", id="import"),
        pytest.param("{{ context.__class__.__mro__ }}" + WHOLE, "unsafe", id="python-objects"),
        pytest.param("{{ cycler.__init__.__globals__.os.name }}" + WHOLE, "unsafe", id="modules"),
        pytest.param("{% for i in range(10 ** 9) %}{% endfor %}" + WHOLE, "range", id="endless"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + WHOLE, "RecursionError", id="recursion"),
        pytest.param(WHOLE.encode("utf-16"), "not UTF-8 text", id="utf-16"),
        pytest.param("", "does not show response_a", id="empty"),
        pytest.param("{{ context }} {{ response_a }}", "does not show response_b", id="one-response"),
    ],
)
def test_a_prompt_file_that_cannot_serve_is_refused_when_it_is_named(tmp_path, text, message):
    prompt = tmp_path / "p.jinja"
    prompt.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        get_format("rm_nlhf", str(prompt))


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path):
    prompt = tmp_path / "p.jinja"
    prompt.write_text(WHOLE, encoding="utf-8-sig")
    assert get_format("rm_nlhf", str(prompt)).render(pair())[0]["content"].startswith("user:")
