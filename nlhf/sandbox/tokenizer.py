"""The sandbox's tokenizer: one token a word, so that a model of 152 thousand parameters can read and write it."""

from transformers import PreTrainedTokenizerFast

from nlhf.sandbox.world import ASPECTS, FLOURISH, NOTE_ASPECTS, NOTE_WORDS, TASKS, WORDS

_SPECIAL = ("<pad>", "<eos>")
_MARKS = [
    "task:",
    "A:",
    "B:",
    "note:",
    "judge",
    "describe",
    "<critics>",
    "</critics>",
    "<choice>",
    "</choice>",
    "[[A]]",
    "[[B]]",
    "A",
    "B",
    "praise:",
    "blame:",
]
# Messages are joined as they are; the prompt's last word says what to do, so there is no generation prompt.
_CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %} {{ m['content'] }} <eos>{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)


def vocabulary() -> list[str]:
    """Every token, in the order of its id."""
    shown = [w for good, bad in WORDS.values() for w in (*good, *bad)] + [FLOURISH]
    words = [*_SPECIAL, *_MARKS, "\n", *ASPECTS, *(w for words in TASKS.values() for w in words), *shown]
    words += [f"{w}@B" for w in shown]
    words += [*NOTE_ASPECTS.values(), *(w for words in NOTE_WORDS.values() for w in words)]
    return words


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that splits at blanks only; an unknown word is an error of ours, not a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = vocabulary()
    if len(set(words)) != len(words):
        raise ValueError("a word stands twice in the sandbox's vocabulary")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
