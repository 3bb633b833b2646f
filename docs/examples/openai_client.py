"""OpenAI's client against a gateway: OPENAI_BASE_URL=http://127.0.0.1:8000/v1, OPENAI_API_KEY a key or any word."""

from openai import OpenAI

client = OpenAI()
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Who is there?"}], max_tokens=24
)
print(answer.choices[0].message.content)
print(answer.usage)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Nay, answer me."}],
    max_tokens=24,
    temperature=0.8,
    seed=7,
    stream=True,
)
for piece in stream:
    print(piece.choices[0].delta.content or "", end="", flush=True)
print()

# Whatever is drawn is of the schema.
wanted = {
    "type": "object",
    "properties": {"speaker": {"enum": ["ROMEO", "JULIET"]}, "line": {"type": "string", "maxLength": 20}},
    "required": ["speaker", "line"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Say a line."}],
    max_tokens=100,
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "line", "schema": wanted, "strict": True},
    },
)
print(answer.choices[0].message.content)
