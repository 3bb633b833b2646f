"""The HTTP APIs that the gateway speaks: OpenAI's completions, chat and Responses, and Anthropic's Messages.

Begin with `answer.py`, what all answers have in common; each API has a file of requests and one of answers.
"""
