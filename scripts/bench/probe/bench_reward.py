"""A reward function that costs nothing, and that every tool calls in the same way."""


def vowels(completions, **_others):
    texts = [answer[0]["content"] for answer in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]
