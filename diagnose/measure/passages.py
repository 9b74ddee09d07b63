# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A small text on which a language model's layers are measured."""

PASSAGES = (
    "The ferry leaves the harbour at seven in the morning and returns after dark. On most days it carries farmers, "
    "teachers and a few visitors who want to see the old lighthouse. When the wind is strong, the captain waits until "
    "noon, and everybody drinks tea in the small hall beside the quay.",
    "To bake a simple bread, mix five cups of flour with two of warm water, a spoon of salt and a little yeast. "
    "Let the dough rest for an hour, fold it twice, and bake it in a hot oven until the crust is brown. It is best "
    "on the same day, but it can be kept in a cloth for three.",
    "A list is sorted by comparing neighbours and exchanging those that stand in the wrong order. The largest element "
    "reaches the end after the first pass, the second largest after the second. For n elements this takes about n "
    "squared comparisons, which is why faster methods divide the list first.",
    "In 1869 the two railways met in the desert, and a journey that had taken six months took a week. Letters became "
    "cheap, prices fell, and towns that the line had passed by were empty within ten years. Not everyone was glad: "
    "those who had lived on the plains before lost their land.",
    "Doctor, my left knee has hurt since Monday. Does it hurt when you walk, or only on the stairs? Mostly on the "
    "stairs, and at night. Then let us look at it. I do not think that anything is broken, but please rest it for a "
    "week, and come again if it is not better by then.",
    "Plants take in light with their leaves and make sugar of water and carbon dioxide. Oxygen is what is left over. "
    "At night they breathe as animals do. A tree of thirty metres moves hundreds of litres of water a day from its "
    "roots to its crown, without a pump, because water evaporates above.",
    "The committee met on Thursday to discuss the budget of the coming year. Three members asked for more money for "
    "the library, two for the roads. After a long debate it was agreed that the roof of the school comes first. The "
    "next meeting is on the fourth of May at half past six in the town hall.",
    "She opened the letter slowly, read the first line, and put it down again. Outside, somebody was singing. For a "
    "moment she thought of the summer by the lake, of the boat with the green sail and of what her brother had said "
    "there. Then she took a pen, and began to write an answer.",
)
