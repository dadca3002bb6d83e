"""A reward: the share of the response's characters that are digits."""


async def digits(args, response, sample):
    """Return the reward of a sample; `response` is its text without the engine's stop token."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
