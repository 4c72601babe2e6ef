"""The page in a real browser: from the file system, by mouse and by keys, wide and narrow, and never running a text."""

import dataclasses
import itertools
import os
import shutil

import pytest

from nlhf.critique.matching import CritiqueMatch
from nlhf.evaluation.figures import flipped, lucky, with_twins
from nlhf.evaluation.results import Evaluation, Run
from nlhf.files import write_text
from nlhf.pairs import HumanCritique, Turn
from nlhf.report import build_report
from tests.report.runs import make_run

pytestmark = pytest.mark.browser

HIT = "window.hit = (window.hit || 0) + 1"
PAYLOADS = {
    "script": f"<script>{HIT}</script>",
    "end_of_script": f"</script><script>{HIT}</script>",
    "comment": f"<!--<script>{HIT}//--></script><script>{HIT}</script>",
    "image": f'"><img src=x onerror="{HIT}">',
    "svg": f"<svg/onload={HIT}>",
    "details": f"<details open ontoggle='{HIT}'>",
    "link": f"<a href='javascript:{HIT}'>click</a> javascript:{HIT}",
    "style": "<style>*{display:none!important}</style><link rel=stylesheet href=//x><base href=//x>",
    "frame": f"<iframe srcdoc='<script>parent.{HIT}</script>'></iframe><object data='javascript:{HIT}'></object>",
    "attribute": f"' autofocus onfocus='{HIT}' x=\" onmouseover=\"{HIT}",
    "line_end": f"\u2028{HIT}\u2029//",
    "entity": "&lt;b&gt; &amp;",
}


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium or Chrome of the system, without a network."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'nlhf[dev]'")
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(names)}: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []  # root has none
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def show(chromium, tmp_path):
    """Opens the report of runs as a file; whatever the console says fails the test in the end."""
    contexts, said = [], []

    def open_page(*runs: Run, width: int = 1300, height: int = 900, scheme: str = "light"):
        write_text(tmp_path / "report.html", build_report(runs).html)
        size = {"width": width, "height": height}
        context = chromium.new_context(offline=True, viewport=size, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file://") or said.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        open_page.said = said
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def edited(run: Run, change) -> Run:
    """The run with ``change(index, record)`` for each of its records."""
    records = [change(i, record) for i, record in enumerate(run.records)]
    return dataclasses.replace(run, evaluation=Evaluation.of(records, resamples=0))


def mixed(n: int = 30) -> Run:
    """A run with every outcome and flag, each with a number of its own."""

    def change(i, record):
        verdict = None if i % 10 == 9 else "B" if i % 5 == 1 else record.verdict
        match = dataclasses.replace(record.match, f1=0.1) if i % 3 == 0 else record.match
        return dataclasses.replace(record, verdict=verdict, match=match, truncated=i % 20 == 9, reply=f"reply {i} [x]")

    return edited(make_run(n=n), change)


def rows(page) -> list[str]:
    return page.locator(".row .id").all_inner_texts()


def count(page) -> str:
    return page.locator("#count").inner_text()


def settle(page) -> None:
    """Wait until a change of the search has been answered."""
    page.wait_for_timeout(300)


# ------------------------------------------------------------------------------------------------- list and filters


def test_the_page_opens_with_a_list_and_the_first_judgement(show):
    page = show(make_run(n=3))
    assert rows(page) == ["0 plain", "0 plain", "1 plain", "1 plain", "2 plain", "2 plain"]
    assert page.locator("#detail h3").inner_text() == "0 plain"
    assert page.locator("svg").count() == 4
    assert page.locator("noscript").is_hidden()


def test_filters_leave_what_they_name(show):
    run = mixed()
    page = show(run)
    expected = {
        "right": sum(r.correct for r in run.records),
        "wrong": sum(r.verdict is not None and not r.correct for r in run.records),
        "unparsed": sum(r.verdict is None for r in run.records),
        "flipped": sum(flipped(r, twin) for r, twin in with_twins(run.records)),
        "lucky": sum(lucky(r, 0.5) for r in run.records),
        "truncated": sum(r.truncated for r in run.records),
    }
    assert len(set(expected.values()) - {0}) >= 5
    for tag, n in expected.items():
        choice = page.locator(f'fieldset label:has(input[value="{tag}"])')
        choice.click()
        settle(page)
        assert str(n) in choice.inner_text().split(), tag
        assert count(page) == f"1–{min(n, 50)} of {n} (60 in all)", tag
        assert page.locator(".row").count() == min(n, 50), tag
        page.locator('label:has(input[name="outcome"][value=""])').click()
        if choice.locator("input").get_attribute("type") == "checkbox":
            choice.click()
    both = [r for r, twin in with_twins(run.records) if flipped(r, twin) and r.correct]
    page.locator('label:has(input[value="flipped"])').click()
    page.locator('label:has(input[value="right"])').click()
    settle(page)
    assert rows(page) == [r.pair_id for r in both]


def test_subset_and_run_are_filters(show):
    page = show(make_run("first", n=4), make_run("second", n=4))
    assert len(rows(page)) == 16
    page.get_by_label("Subset", exact=True).select_option("s1 plain")
    settle(page)
    assert rows(page) == ["1 plain"] * 4 + ["3 plain"] * 4
    page.get_by_label("Run", exact=True).select_option("second")
    settle(page)
    assert rows(page) == ["1 plain"] * 2 + ["3 plain"] * 2
    assert all("second" in text for text in page.locator(".row .dim").all_inner_texts())


@pytest.mark.parametrize(
    ("query", "n"),
    [
        ("<12>", 1),
        ("REPLY <1", 11),
        ("  question   human ", 60),
        ("[x]", 60),
        ("(a+", 0),
        (".", 0),
        ("\\d", 0),
        ("nowhere", 0),
    ],
    ids=["a reply", "any case", "two words", "brackets", "half a pattern", "a dot", "a class", "nothing"],
)
def test_search_takes_words_as_they_are(show, query, n):
    page = show(edited(make_run(n=30), lambda i, record: dataclasses.replace(record, reply=f"reply <{i}> [x]")))
    page.get_by_role("searchbox").fill(query)
    settle(page)
    whole = {0: "nothing found (60 in all)", 60: "1–50 of 60"}
    assert count(page) == whole.get(n, f"1–{n} of {n} (60 in all)")
    assert page.locator(".row").count() == min(n, 50)
    assert page.locator("#detail:empty").count() == (n == 0)


def test_what_was_searched_for_is_marked(show):
    page = show(make_run(n=2))
    page.get_by_role("searchbox").fill("QUESTION other")
    settle(page)
    assert page.locator("#detail mark").all_inner_texts()[:1] == ["question"]
    assert "other" in page.locator("#detail .panel mark").all_inner_texts()


def test_the_list_is_drawn_by_pages(show):
    page = show(make_run(n=260))
    assert count(page) == "1–50 of 520"
    assert page.locator("#browser *").count() < 1500
    assert page.get_by_role("button", name="Previous page").is_disabled()
    for _ in range(10):
        page.get_by_role("button", name="Next page").click()
    assert count(page) == "501–520 of 520"
    assert page.get_by_role("button", name="Next page").is_disabled()
    assert rows(page)[0] == "250 plain"
    page.locator(".row").last.click()
    assert page.locator("#detail h3").inner_text() == "259 plain"
    assert page.get_by_role("button", name="Next", exact=True).is_disabled()


# ------------------------------------------------------------------------------------------------------------ detail


def test_a_judgement_stands_beside_its_twin_and_the_human(show):
    run = make_run(n=2)

    def change(_, record):
        return dataclasses.replace(record, probability=0.8 if record.order == "AB" else 0.4)

    page = show(edited(run, change))
    page.locator(".row").nth(1).click()
    detail = page.locator("#detail")
    assert detail.locator("h3").inner_text() == "0 plain"
    assert detail.locator("> .columns .text").all_inner_texts() == ["b plain", "a plain"]  # as the judge saw them
    assert "better" in detail.locator("> .columns h4").nth(1).inner_text()
    assert detail.locator("> .text").inner_text() == "question plain"
    first, second = detail.locator(".panel").all()
    assert "Order BA: as shown above" in first.inner_text()
    assert "judge A / human B" in first.inner_text()
    assert "40.0 %" in first.inner_text()
    assert "80.0 %" in second.inner_text()
    assert "each other's place" in second.inner_text()
    assert first.locator("li.matched").all_inner_texts() == ["1A praise: argument plain"] * 2
    assert first.locator("li:not(.matched)").all_inner_texts() == ["A praise: other"]
    page.get_by_role("button", name="Other order").click()
    assert detail.locator("> .columns .text").all_inner_texts() == ["a plain", "b plain"]
    assert detail.locator(".reply .text").first.is_hidden()
    detail.locator(".reply summary").first.click()
    assert detail.locator(".reply .text").first.inner_text() == "reply plain"


def test_a_judgement_without_a_score_shows_both_critiques_as_they_are(show):
    run = make_run(n=1, scorer=False)
    pair = dataclasses.replace(
        next(iter(run.pairs.values())),
        critiques=[HumanCritique(text="Response A is right."), HumanCritique(weaknesses_b="Vague.")],
    )
    page = show(dataclasses.replace(run, pairs={pair.id: pair}))
    page.locator(".row").nth(1).click()
    first, second = page.locator(".panel").all()
    assert "critique plain" in first.inner_text()
    assert first.locator("li").all_inner_texts() == ["Response B is right.", "A blame: Vague."]
    assert second.locator("li").all_inner_texts() == ["Response A is right.", "B blame: Vague."]


def test_all_judgements_on_a_pair_are_one_press_away(show):
    page = show(make_run("first"), make_run("second", verdict="B"))
    others = page.locator(".siblings button")
    assert others.all_inner_texts() == [
        f"{order} · s0 plain · {run}: {verdict}"
        for run, verdict in (("first", "A"), ("second", "B"))
        for order in ("AB", "BA")
    ]
    others.nth(2).click()
    assert "second" in page.locator("#detail > .dim").first.inner_text()


def test_every_step_can_be_done_by_keys(show):
    page = show(make_run(n=60))
    title, focused = page.locator("#detail h3"), page.locator(":focus")
    page.locator(".row").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert title.inner_text() == "1 plain"
    assert focused.inner_text() == "1 plain"
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert title.inner_text() == "2 plain"
    page.keyboard.press("k")
    assert title.inner_text() == "1 plain"
    order = page.locator("#detail > .dim").first
    assert order.inner_text().startswith("BA")
    page.keyboard.press("o")
    assert order.inner_text().startswith("AB")
    page.keyboard.press("r")
    assert page.locator("#detail .reply .text").first.is_visible()
    page.keyboard.press("j")
    assert page.locator("#detail .reply .text").first.is_visible()  # stays open from one to the next
    page.keyboard.press("n")
    assert count(page) == "51–100 of 120"
    page.keyboard.press("p")
    assert count(page) == "1–50 of 120"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "row"
    page.keyboard.press("/")
    page.keyboard.type("jkonpr/")
    assert page.get_by_role("searchbox").input_value() == "jkonpr/"
    assert page.evaluate("document.activeElement.name") == "text"


def test_a_step_beyond_the_page_turns_it(show):
    page = show(make_run(n=60))
    page.locator(".row").nth(49).click()
    page.keyboard.press("j")
    assert count(page) == "51–100 of 120"
    assert page.locator('.row[aria-current="true"]').count() == 1


# ------------------------------------------------------------------------------------------------ untrusted text


def poisoned(text: str) -> tuple[Run, Run]:
    """Two runs with ``text`` in every field that comes from a model, a data set or a user."""
    first, second = make_run(f"a {text}", text=text), make_run(f"b {text}", text=text, scorer=False)
    failure = CritiqueMatch(0, 0, 0, failure=text)
    first = edited(first, lambda i, r: dataclasses.replace(r, match=failure) if i % 4 == 2 else r)
    meta = {"model": f"qwen {text}"}
    human = [HumanCritique(text, text, text, text, text, annotator=text)]
    runs = []
    for run in (first, second):
        pairs = {
            key: dataclasses.replace(pair, meta=meta, critiques=human, context=[Turn(text, text), Turn(text, text)])
            for key, pair in run.pairs.items()
        }
        config = run.config | {"model": {"name": f"qwen {text}"}}
        runs.append(dataclasses.replace(run, pairs=pairs, config=config))
    return runs[0], runs[1]


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_no_text_runs_or_becomes_an_element(show, payload):
    page = show(*poisoned(payload))
    visible = payload.replace("\u2028", "").replace("\u2029", "").strip().split("\n")[0][:20]
    for i in (0, 2, 4, 6):  # scored, not scored by failure, and both runs
        page.locator(".row").nth(i).click()
        page.keyboard.press("r")
        assert visible in page.locator("#detail").inner_text()
    page.get_by_role("searchbox").fill(payload)
    settle(page)
    page.locator("#detail").click()
    page.locator("#detail").hover()
    foreign = "img, iframe, object, embed, link, base, a:not([href^='#']), #browser :is(svg, script, style)"
    assert page.locator(foreign).count() == 0
    assert page.locator("script").count() == 2
    handlers = "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some(a => /^on/.test(a.name))).length"
    assert page.evaluate(handlers) == 0
    assert page.evaluate("window.hit") is None
    assert page.locator("h1").is_visible()


@pytest.mark.parametrize(
    "attack",
    [
        f"document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"{HIT}\">')",
        f"document.body.append(Object.assign(document.createElement('script'), {{textContent: '{HIT}'}}))",
        "document.body.append(Object.assign(document.createElement('script'), {src: 'https://example.org/x.js'}))",
        f"document.body.insertAdjacentHTML('beforeend', `<iframe srcdoc='<script>parent.{HIT}</script>'></iframe>`)",
        f"document.body.setAttribute('onclick', '{HIT}'); document.body.click()",
    ],
    ids=["handler", "inline script", "foreign script", "frame", "attribute"],
)
def test_the_policy_is_a_second_wall(show, attack):
    """Were markup to get in after all, the content security policy would still run nothing."""
    page = show(make_run(n=1))
    page.evaluate(attack)
    settle(page)
    assert page.evaluate("window.hit") is None
    assert any("Content Security Policy" in line for line in show.said)
    show.said.clear()  # the browser's reports of what it refused


# ------------------------------------------------------------------------------------------------------- appearance

LONG = "w" * 300


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 700, 1300])
def test_nothing_is_wider_than_the_window(show, width, scheme):
    page = show(make_run(f"first {LONG}", text=LONG), make_run("second", text=LONG), width=width, scheme=scheme)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    page.locator(".row").nth(2).click()
    page.keyboard.press("r")
    assert page.locator("#detail").is_visible()
    assert page.evaluate(fits)
    assert page.evaluate(
        "document.querySelector('#detail').scrollWidth <= document.querySelector('#detail').clientWidth"
    )


def test_a_narrow_window_shows_list_or_judgement(show):
    page = show(make_run(n=4), width=360, height=700)
    assert page.locator("#detail").is_hidden()
    page.locator(".row").nth(2).click()
    assert page.locator("#rows").is_hidden()
    assert page.locator("#detail h3").is_visible()
    page.get_by_role("button", name="List").click()
    assert page.locator("#detail").is_hidden()
    assert page.evaluate("document.activeElement.textContent").startswith("1 plain")


def test_dark_and_light_follow_the_system(show):
    def color(page, element, what):
        return page.locator(element).first.evaluate(f"(element) => getComputedStyle(element).{what}")

    def brightness(page, what):
        return sum(int(part) for part in color(page, "body", what)[4:-1].split(","))

    run = make_run(n=1)
    light, dark = show(run, scheme="light"), show(run, scheme="dark")
    assert brightness(light, "backgroundColor") > 700 > 200 > brightness(light, "color")
    assert brightness(dark, "backgroundColor") < 100 < 600 < brightness(dark, "color")
    for page in (light, dark):  # the drawings too
        assert color(page, "figure text", "fill") == color(page, "body", "color")


def test_print_leaves_out_the_controls_and_cuts_nothing(show):
    page = show(make_run(n=2, text="word " * 2000), width=360)
    page.emulate_media(media="print", color_scheme="dark")
    for part in (".filters", ".list", ".tools", ".contents"):
        assert page.locator(part).is_hidden(), part
    text = "document.querySelector('#detail .text')"
    assert page.evaluate(f"{text}.clientHeight >= {text}.scrollHeight - 1 && {text}.clientHeight > 1000")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(252, 252, 250)"


def test_every_control_has_a_name_and_every_heading_its_place(show):
    page = show(make_run("first"), make_run("second"))
    nameless = """[...document.querySelectorAll('button, input, select, a')].filter((e) =>
        ![e.textContent, e.getAttribute('aria-label'), ...[...(e.labels ?? [])].map((l) => l.textContent)]
            .some((name) => name?.trim())).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4,h5')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_focus_can_be_seen(show):
    page = show(make_run(n=2))
    page.get_by_role("searchbox").focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        outline = """(() => { const e = document.activeElement;
            const s = getComputedStyle(e.matches('fieldset input') ? e.nextElementSibling : e);
            return e === document.body ? 'solid' : s.outlineStyle; })()"""
        assert page.evaluate(outline) == "solid"
