"""What an answer says, in the shapes that models give it."""

import pytest

from normalign_llava.evaluation.answers import chosen_option, yes_or_no


OPTIONS = {
    "A": "a dog",
    "B": "a cat",
    "C": "a red car",
    "D": "a horse",
}


@pytest.mark.parametrize(
    "answer",
    [
        "B",
        "b",
        "B.",
        "B)",
        "b)",
        "(B)",
        "(b)",
        "[B]",
        "**B**",
        " B\n",
        "B:",
        "b. a cat",
        "B. a cat",
        "B. A cat",
        "**B.** a cat",
        "B - a cat",
        "B: the animal that one sees in this picture",
        "B\nIt is a cat, as one sees.",
        "The answer is B",
        "the answer is b",
        "The answer is: (B).",
        "The correct answer is **B**. For A barks.",
        "The answer is B, a cat.",
        "The answer is 'B'.",
        "Answer: B",
        "Option B",
        "option b",
        "The correct choice is option B.",
        "I think it's B",
        "La respuesta es B",
        "答案是B",
        "B, not A",
        "b. The animal that one sees in this picture",
        "a cat",
        "A cat",
        "A cat.",
        "b: the animal that one sees in this picture",
        '"B" is what one would say of it here.',
        "A CAT",
        "The answer is a cat",
        "A cat sits there.",
    ],
)
def test_an_answer_chooses_the_second_option(answer):
    assert chosen_option(answer, OPTIONS) == "B"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "   ",
        "...",
        "A or B",
        "A and B",
        "A, B",
        "A/B",
        "(A), (B)",
        "Either B or C.",
        "Neither A nor B",
        "the answer is a or b",
        "The answer is A or B",
        "The answer is not B",
        "A. a dog B. a cat C. a red car",
        "a dog and a cat",
        "Option A is wrong, and option C is wrong.",
        "Hepatitis-B",
        "The answer is B-flat",
        "It is D'Artagnan",
        "E",
        "The answer is E",
        "(F)",
        "T-shirts",
        "It is 25 °C",
        "Because it meows",
        "The man is a DJ",
        "A bird",
        "A Bird",
        "A bird in a tree far away from the house",
        "Es un gato",
        "一只猫",
        "Sorry, I can't help with images of people yet.",
        "I'm sorry, but I cannot see a cat.",
        "I can't tell. B?",
        "I cannot determine whether it is B.",
        "I would say that it is B since there are ears that one can see in the picture",
        "Unable to say whether it is B.",
        "I'm unable to see a cat.",
        "I can’t say: a cat.",
        "I am sorry, a cat.",
        "I can not tell a cat.",
        "Cannot determine a cat.",
        "The answer is A & B",
        "The answer is A/B",
        "The answer is A, B",
        "It is B’s fault",
        "A bobcat",
        "A cat2",
        "It is 5B",
        "It is B5",
        "A story about a cat that goes on for so long that it is no text of one of the options",
    ],
)
def test_an_answer_chooses_nothing(answer):
    assert chosen_option(answer, OPTIONS) is None


@pytest.mark.parametrize(
    "answer",
    [
        "A",
        "a",
        "A.",
        "(A)",
        "A since it barks",
        "A is right",
        "A because it barks",
        "The answer is A",
        "A\nIt barks, as one hears.",
    ],
)
def test_the_letter_a_is_an_option_where_it_is_no_article(answer):
    assert chosen_option(answer, OPTIONS) == "A"


def test_after_an_article_an_option_is_chosen_by_its_text():
    assert chosen_option("A dog runs over the grass", OPTIONS) == "A"
    assert chosen_option("A dog runs", {"A": "two cats", "B": "dog"}) == "B"


@pytest.mark.parametrize(("answer", "letter"), [("D", "D"), ("The answer is B", "B")])
def test_options_that_are_letters_are_chosen_by_their_own_letter(answer, letter):
    options = {"A": "D", "B": "C", "C": "B", "D": "A"}
    assert chosen_option(answer, options) == letter


@pytest.mark.parametrize(
    ("answer", "options", "letter"),
    [
        ("red car", {"A": "red", "B": "red car"}, "B"),
        ("It is the red car", {"A": "red", "B": "red car"}, None),
        ("category", {"A": "cat", "B": "dog"}, None),
        ("vitamin C", {"A": "vitamin A", "B": "vitamin C", "C": "iron"}, "B"),
        ("25°C", {"A": "15°C", "B": "25°C", "C": "35°C"}, "B"),
        ("4.5", {"A": "4", "B": "4.5"}, "B"),
        ("Sorry", {"A": "Thanks", "B": "Sorry"}, "B"),
    ],
)
def test_an_option_within_another_and_within_a_word(answer, options, letter):
    assert chosen_option(answer, options) == letter


@pytest.mark.parametrize(
    "answer",
    [
        "yes",
        "Yes",
        "YES.",
        "**Yes**",
        "Yes, there is a dog in it.",
        "yes\n",
        "I think yes",
    ],
)
def test_an_answer_says_yes(answer):
    assert yes_or_no(answer) == "yes"


@pytest.mark.parametrize(
    "answer",
    [
        "no",
        "No.",
        "(No)",
        "No, there is not.",
        "There is no dog.",
    ],
)
def test_an_answer_says_no(answer):
    assert yes_or_no(answer) == "no"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Yes and no",
        "yes or no?",
        "I don't know",
        "Ja",
        "是",
        "nope",
        "yesterday",
    ],
)
def test_an_answer_says_neither_yes_nor_no(answer):
    assert yes_or_no(answer) is None


@pytest.mark.parametrize("following", range(9))
def test_a_letter_within_a_sentence_counts_only_among_its_last_four_words(following):
    """VLMEvalKit's rule: up to three words may follow it."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    answer = " ".join(["I'd go for", "B,", *words[:following]])
    expected = None
    if following < 4:
        expected = "B"
    assert chosen_option(answer, OPTIONS) == expected


def test_the_answer_may_be_twice_as_long_as_all_options_together_and_no_longer():
    # The options have 6 letters.
    options = {"A": "dog", "B": "cat"}
    assert chosen_option("a cat now ok", options) == "B"
    assert chosen_option("at: a cat now", options) is None


def test_an_option_s_text_is_no_end_of_another_word():
    assert chosen_option("one bobcat", {"A": "cat", "B": "a dog here"}) is None
