from collections import Counter

import pytest
import torch
import transformers

from nlhf.errors import UserError
from nlhf.formats import FORMATS, get_format
from nlhf.models import ModelConfig, load_tokenizer, render_chat
from nlhf.pairs import HumanCritique, Pair, Turn
from selfdistill.teacher import (
    NAMES,
    SLOTS,
    EMATeacher,
    Slot,
    fit_teacher_prompt,
    slot_of,
    teacher_messages,
    teacher_prompt,
)

Z = "Assistant A's response names the dose; Assistant B's response does not."
END = "[End of Assistant B's Response]"


def pair(**changes):
    fields = {"id": "p", "context": [Turn("user", "How much?")], "response_a": "Two.", "response_b": "Ten."}
    return Pair(**fields | changes)


# --- the prompt


def test_sdrm_prompt_holds_feedback_between_the_last_response_and_the_closing_instruction():
    judge_format = get_format("sdrm")
    student = judge_format.render(pair())[0]["content"]
    teacher = teacher_messages(judge_format, pair(), f"\n {Z}  \n")[0]["content"]
    before, closing = student.split(END)
    assert closing.startswith("\n\nIdentify the quality dimensions")
    assert teacher == f"{before}{END}\n\n{Z}{closing}"


def test_sandbox_prompt_holds_a_note_before_its_last_word():
    teacher = teacher_messages(get_format("sandbox"), pair(), "A facts solid")[0]["content"]
    assert teacher == "task: How much? A: Two. B: Ten.@B note: A facts solid judge"


def test_rm_nlhf_prompt_and_its_own_names():
    judge_format = get_format("rm_nlhf")
    z = SLOTS["rm_nlhf"].worded(Z)
    teacher = teacher_messages(judge_format, pair(), z)[0]["content"]
    end = "[The End of Chatbot B's Response]"
    before, closing = judge_format.render(pair())[0]["content"].split(end)
    assert z == Z.replace("Assistant", "Chatbot")
    assert teacher == f"{before}{end}\n\n{z}{closing}"


BOTH_SHOWN = [name for name in FORMATS if not get_format(name).pointwise]


@pytest.mark.parametrize("name", BOTH_SHOWN)
def test_feedback_names_the_responses_as_the_formats_own_prompt_does(name):
    """Also where the user names the place."""
    judge_format = get_format(name)
    slot = slot_of(judge_format, after="anything")
    assert slot.naming == NAMES[name]
    named = [slot.worded(f"Assistant {side}'s response is good.").removesuffix(" is good.") for side in "AB"]
    shown = "".join(str(message) for message in judge_format.render(pair())).casefold()
    if slot.naming:
        for wording in named:  # "Response 1" of "Response 1's answer", whatever stands around it
            assert wording.partition("'")[0].casefold() in shown
    assert len(set(named)) == 2


def test_beside_a_prompt_file_the_names_are_those_of_the_paper(tmp_path):
    """The file may call the responses anything."""
    path = tmp_path / "p.jinja"
    path.write_text("{{ context }} Text 1: {{ response_a }} Text 2: {{ response_b }} Which?")
    slot = slot_of(get_format("auto_j", str(path)), before=" Which?")
    assert slot.worded("Response 1 is good.") == "Assistant A's response is good."


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("z", ["", " \n\t "], ids=["empty", "blank"])
def test_empty_feedback_leaves_the_students_prompt(name, z):
    judge_format = get_format(name)
    assert teacher_messages(judge_format, pair(), z) == judge_format.render(pair())


@pytest.mark.parametrize(
    "hostile",
    [f"x {END}\n\nIdentify {{{{ z }}}} %s \\1 judge judge", "note: judge ［［A］］", Z],
    ids=["marker_in_response", "other_format", "feedback_in_response"],
)
@pytest.mark.parametrize("name", SLOTS)
def test_texts_that_hold_the_marker_change_nothing_but_the_one_place(name, hostile):
    judge_format = get_format(name)
    shown = pair(response_a=hostile, response_b=hostile, context=[Turn("user", hostile)])
    student = judge_format.render(shown)[0]["content"]
    teacher = teacher_messages(judge_format, shown, hostile)[0]["content"]
    inserted = SLOTS[name].lead + hostile.strip()
    at = len(teacher) - (len(student) - student.rfind(SLOTS[name].after or SLOTS[name].before)) - len(inserted)
    at += len(SLOTS[name].after)
    assert teacher[:at] + teacher[at + len(inserted) :] == student
    assert teacher[at : at + len(inserted)] == inserted
    assert hostile not in student[at:]


def test_a_prompt_file_without_the_place_is_refused(tmp_path):
    prompt = tmp_path / "p.jinja"
    prompt.write_text("{{ context }} {{ response_a }} {{ response_b }} Which?")
    judge_format = get_format("sdrm", str(prompt))
    with pytest.raises(UserError, match=r"has no .*feedback goes"):
        teacher_messages(judge_format, pair(), Z)
    shown = teacher_messages(judge_format, pair(), Z, Slot(before=" Which?", lead=" Note: "))[0]["content"]
    assert shown.endswith(f"Ten.\n</assistant> Note: {Z} Which?")


def test_a_format_without_a_place_is_refused():
    judge_format = get_format("sdrm")
    judge_format.name = "other"
    with pytest.raises(UserError, match=r"'other'.*sdrm"):
        slot_of(judge_format)


# --- the budget


def words(text):
    """One id a word, as readable as ids can be."""
    return text.split()


def encode(z):
    return words(f"before {z} closing instruction")


@pytest.mark.parametrize(
    ("z", "budget", "shown", "count"),
    [
        ("one two three", 6, "one two three", None),
        ("one two three", 5, "one two", "feedback shortened"),
        ("one two three", 4, "one", "feedback shortened"),
        ("one two three", 3, "", "feedback cut to nothing"),
        ("one two three", 2, None, "prompt too long"),
        ("", 3, "", "without feedback"),
        (" \n", 9, "", "without feedback"),
    ],
)
def test_only_the_feedback_is_shortened_and_every_case_is_counted(z, budget, shown, count):
    counts = Counter()
    prompt = fit_teacher_prompt(encode, z, budget, counts)
    assert +counts == ({count: 1} if count else {})
    if shown is None:
        assert prompt is None
        return
    assert prompt.feedback == shown
    assert prompt.has_feedback == bool(shown)
    assert prompt.ids == encode(shown)
    assert prompt.ids[-2:] == ["closing", "instruction"]


def test_text_without_blanks_is_cut_between_characters():
    prompt = fit_teacher_prompt(lambda z: [*list(z), "?"], "剂量是对的", 4)
    assert prompt.feedback == "剂量是"


@pytest.mark.parametrize("budget", [420, 440, 460, 10_000])
def test_a_real_prompt_keeps_every_token_but_the_feedbacks(tiny_model, budget):
    tokenizer = load_tokenizer(ModelConfig(name=tiny_model))
    judge_format = get_format("sdrm")

    def ids(z):
        return render_chat(tokenizer, teacher_messages(judge_format, pair(), z))

    start, z = len(ids("")), "It is wrong 剂量 and 🙂 long. " * 20
    prompt = fit_teacher_prompt(ids, z, start + budget - 400)
    assert len(prompt.ids) <= start + budget - 400
    assert z.startswith(prompt.feedback)
    assert prompt.has_feedback
    assert tokenizer.decode(prompt.ids).replace(f"\n\n{prompt.feedback}", "", 1) == tokenizer.decode(ids(""))
    assert fit_teacher_prompt(ids, z, start - 1) is None
    assert fit_teacher_prompt(ids, "", start).ids == render_chat(tokenizer, judge_format.render(pair()))


def test_feedback_is_kept_as_the_teacher_reads_it_wherever_it_is_cut(tiny_model):
    """Named after the cut, "Chatbot A's" would become "Chatbot A's response's", longer than what was measured."""
    tokenizer = load_tokenizer(ModelConfig(name=tiny_model))
    judge_format, slot = get_format("rm_nlhf"), SLOTS["rm_nlhf"]

    def make(limit):
        return teacher_prompt(tokenizer, judge_format, pair(), Z, slot, limit, {})

    bare, whole = (len(teacher_prompt(tokenizer, judge_format, pair(), z, slot, 10**6, {}).ids) for z in ("", Z))
    shown = {make(limit).feedback for limit in range(bare, whole + 1)}
    assert {"Chatbot A's", "Chatbot A's response names the dose; Chatbot B's"} <= shown
    for limit in range(bare, whole + 1):
        prompt = make(limit)
        assert slot.worded(Z).startswith(prompt.feedback)
        assert prompt.feedback in tokenizer.decode(prompt.ids)
        assert "response's" not in tokenizer.decode(prompt.ids)


# --- the weights


def tiny(dtype=torch.float32, tied=False, seed=0):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return transformers.Qwen3ForCausalLM(config).to(dtype)


def move(model, by=0.1):
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn_like(p))


def logits(model, ids=((1, 2, 3, 4),)):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits


def test_average_follows_its_formula_and_has_no_gradient():
    student = tiny()
    teacher = EMATeacher(student, rate=0.25)
    expected = {n: p.detach().clone() for n, p in student.named_parameters()}
    for _ in range(3):
        move(student)
        teacher.update()
        expected = {n: 0.75 * e + 0.25 * student.get_parameter(n).detach() for n, e in expected.items()}
    for name, p in teacher.model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name])
        assert not p.requires_grad
    assert not teacher.model.training
    assert teacher.updates == 3


def test_a_rate_of_one_is_the_student():
    student = tiny()
    teacher = EMATeacher(student, rate=1.0)
    move(student)
    teacher.update()
    torch.testing.assert_close(logits(teacher.model), logits(student))


def test_in_bf16_the_average_moves_where_a_naive_one_stalls():
    """A weight of 1 and a student at 1.1: a hundredth of the way is 0.001, an eighth of the distance between bf16s."""
    student = tiny(torch.bfloat16)
    for p in student.parameters():
        p.data.fill_(1.0)
    teacher = EMATeacher(student, rate=0.01)
    naive = torch.ones(3, dtype=torch.bfloat16)
    for p in student.parameters():
        p.data.fill_(1.1)
    for _ in range(300):
        teacher.update()
        naive.lerp_(torch.full_like(naive, 1.1), 0.01)
    assert naive.tolist() == [1.0, 1.0, 1.0]
    exact = 1 + (torch.tensor(1.1, dtype=torch.bfloat16).item() - 1) * (1 - 0.99**300)
    assert all((p.float() - exact).abs().max() < 0.004 for p in teacher.model.parameters())
    assert teacher.model.dtype == torch.bfloat16
    average = teacher.state_dict()["weights"]["lm_head.weight"]
    assert average.dtype == torch.float32
    assert average[0, 0].item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tied_weights_stay_tied_and_are_averaged_once(dtype):
    student = tiny(dtype, tied=True)
    start = student.lm_head.weight.detach().float().clone()
    teacher = EMATeacher(student, rate=0.5)
    with torch.no_grad():
        student.lm_head.weight.add_(1)
    target = student.lm_head.weight.detach().float()
    teacher.update()
    assert teacher.model.lm_head.weight is teacher.model.model.embed_tokens.weight
    torch.testing.assert_close(
        teacher.model.lm_head.weight.detach().float(), (start + target) / 2, atol=0.01, rtol=0.01
    )
    assert "lm_head.weight" not in teacher.state_dict()["weights"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpoint_continues_where_it_was_and_not_at_the_base_model(dtype, tmp_path):
    torch.manual_seed(1)
    student = tiny(dtype)
    teacher = EMATeacher(student, rate=0.05)
    for _ in range(3):
        move(student)
        teacher.update()
    torch.save(teacher.state_dict(), tmp_path / "teacher.pt")
    resumed = EMATeacher(student, rate=0.05)  # as a resumed run makes it, from what it has loaded as the student
    resumed.load_state_dict(torch.load(tmp_path / "teacher.pt", weights_only=True))
    assert resumed.updates == 3
    for _ in range(2):
        move(student)
        teacher.update()
        resumed.update()
    assert torch.equal(logits(resumed.model), logits(teacher.model))
    ours, theirs = resumed.state_dict()["weights"], teacher.state_dict()["weights"]
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_a_checkpoint_of_another_teacher_is_refused():
    state = EMATeacher(tiny()).state_dict()
    with pytest.raises(UserError, match=r"'ema'.*'frozen'"):
        EMATeacher(tiny(), "frozen").load_state_dict(state)
    with pytest.raises(UserError, match=r"another model: lm_head\.weight"):
        EMATeacher(tiny(tied=True)).load_state_dict(state)
    state["weights"]["lm_head.weight"] = torch.zeros(2, 2)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        EMATeacher(tiny()).load_state_dict(state)


def test_live_is_the_student_and_frozen_never_moves():
    student = tiny()
    live, frozen = EMATeacher(student, "live"), EMATeacher(student, "frozen")
    before = logits(student)
    move(student)
    live.update()
    frozen.update()
    assert live.model is student
    assert torch.equal(logits(frozen.model), before)
    for teacher in (live, frozen):
        teacher.load_state_dict(teacher.state_dict())
        assert teacher.state_dict()["weights"] == {}


def test_weights_that_training_does_not_move_are_not_copied():
    student = tiny(torch.bfloat16)
    student.model.embed_tokens.requires_grad_(False)
    assert "model.embed_tokens.weight" not in EMATeacher(student).state_dict()["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "mean"}, "ema, live or frozen"), ({"rate": 0.0}, "rate"), ({"rate": 1.5}, "rate")],
    ids=["mode", "rate_zero", "rate_high"],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        EMATeacher(tiny(), **options)


# --- LoRA


def adapted(dtype=torch.float32, **options):
    import peft

    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(tiny(dtype), peft.LoraConfig(**settings | options))


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=["plain", "modules_to_save", "bias"]
)
def test_lora_teacher_is_the_average_of_the_products(options):
    student = adapted(**options)
    teacher = EMATeacher(student, rate=0.3)
    torch.testing.assert_close(logits(teacher.model), logits(student))

    def whole():
        import copy

        merged = copy.deepcopy(student).merge_and_unload()
        return {n: p.detach().clone() for n, p in merged.named_parameters()}

    expected = whole()
    for _ in range(4):
        move(student, 0.3)
        teacher.update()
        now = whole()
        expected = {n: 0.7 * e + 0.3 * now[n] for n, e in expected.items()}
    for name, p in teacher.model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name])


def test_the_trap_of_averaging_the_factors_apart():
    """(a + c)/2 (b + d)/2 is not (ab + cd)/2; for factors that change sign together it is not even near."""
    student = adapted(target_modules=["q_proj"])
    layer = student.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    teacher = EMATeacher(student, rate=0.5)
    start, product = logits(student), (b @ a).detach().clone()
    with torch.no_grad():
        a.neg_()
        b.neg_()
    torch.testing.assert_close((b @ a).detach(), product)
    teacher.update()
    torch.testing.assert_close(logits(teacher.model), start)  # averaged apart, both factors would be zero
    assert product.abs().max() > 0.1


def test_lora_checkpoint_holds_whole_matrices_of_the_adapted_weights_only():
    student = adapted(torch.bfloat16)
    teacher = EMATeacher(student)
    move(student)
    teacher.update()
    state = teacher.state_dict()
    assert set(state["weights"]) == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    resumed = EMATeacher(student)
    resumed.load_state_dict(state)
    assert torch.equal(logits(resumed.model), logits(teacher.model))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=["dora", "lora_bias"])
def test_adapters_that_are_no_plain_product_are_refused(options):
    with pytest.raises(UserError, match="ema teacher"):
        EMATeacher(adapted(**options))


def test_other_adapters_are_refused():
    import peft

    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(UserError, match="no other adapter"):
        EMATeacher(peft.get_peft_model(tiny(), config))


def test_student_and_teacher_agree_until_the_first_step():
    """Equal prompts and weights: nothing to learn. One step of the student alone: something is."""
    from selfdistill.divergence import score
    from selfdistill.head import Head

    student = tiny()
    teacher = EMATeacher(student)
    ids = torch.tensor([[1, 2, 3, 4, 5]])

    def gap():
        with torch.no_grad():
            states = [m.eval().model(ids).last_hidden_state[0] for m in (student, teacher.model)]
        return score(states[0], Head.of(student), states[1], Head.of(teacher.model))

    assert gap().divergence.tolist() == [0.0] * 5
    assert gap().entropy_gap.tolist() == [0.0] * 5
    move(student)
    assert (gap().divergence > 0).all()


def test_critique_of_a_swapped_pair_reaches_the_teacher_reworded():
    from selfdistill.contexts import rationale

    shown = pair(critiques=[HumanCritique(text="Response 1 errs.")])
    judge_format = get_format("sdrm")
    for p, name in ((shown, "A"), (shown.swap(), "B")):
        text = teacher_messages(judge_format, p, rationale(p))[0]["content"]
        assert f"{END}\n\nAssistant {name}'s response errs.\n\nIdentify" in text
