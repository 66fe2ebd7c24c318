"""The texts that acceptance is measured on where nobody names others: a few kinds of chat requests.

Answers of one kind differ by a factor of two in what drafts are worth, so there are several of each. The first
CATEGORIES are one of each, and so are the next.
"""

from __future__ import annotations

TEXTS = (
    ("explaining", "Explain in three sentences why ships float."),
    ("listing", "List the days of the week and one thing that people often do on each of them."),
    ("rewriting", "Write this again with every name replaced by 'the captain': Anna told Ben that Anna was late."),
    ("writing", "Write the beginning of a short story about a lighthouse keeper and a storm."),
    ("coding", "Write a Python function that returns the largest of three numbers, with a docstring."),
    ("reasoning", "A train leaves at 9:40 and arrives at 11:15. How long does it travel? Show each step."),
    ("explaining", "Explain what a vaccine does in the body."),
    ("listing", "List six tools that a carpenter uses and what each is for."),
    ("rewriting", "Rewrite this politely: Send me the report now, I have no time to wait for it."),
    ("writing", "Write a short poem about the first snow."),
    ("coding", "Write a Python function that checks whether a word is a palindrome."),
    ("reasoning", "Tom has 3 boxes with 12 apples each and gives away 7 apples. How many are left?"),
    ("explaining", "Why do leaves change their colour in autumn?"),
    ("listing", "Name five planets and say one fact about each."),
    ("rewriting", "Put this into the past tense: The boy runs to the river and throws a stone into the water."),
    ("writing", "Write an e-mail in which you ask a neighbour to water your plants."),
    ("coding", "Write a SQL query that counts the orders of each customer."),
    ("reasoning", "If all roses are flowers and some flowers fade quickly, do all roses fade quickly? Explain."),
    ("explaining", "Explain how a bicycle stays upright while it moves."),
    ("listing", "List ten words that describe good food."),
    (
        "rewriting",
        "Make this shorter: The meeting that was planned for Monday has been moved to Tuesday because of the weather.",
    ),
    ("writing", "Describe a market on a summer morning."),
    ("coding", "Write a Python class for a bank account with deposit and withdraw."),
    ("reasoning", "A rectangle is 8 m long and 5 m wide. What are its area and its perimeter?"),
)
"""(category, text)."""
CATEGORIES = len({category for category, _ in TEXTS})
