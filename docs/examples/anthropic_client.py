"""Anthropic's own client against a gateway, whose address is in ANTHROPIC_BASE_URL, and ANTHROPIC_API_KEY a key or any
word."""

from anthropic import Anthropic

client = Anthropic()

with client.messages.stream(
    model="molink/tiny-shakespeare", max_tokens=24, messages=[{"role": "user", "content": "Who is there?"}]
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
print(stream.get_final_message().usage)
