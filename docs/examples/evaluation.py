"""A small evaluation, run twice: one question at a time, then all questions at once."""

import asyncio
import hashlib

from openai import AsyncOpenAI

BASE_URL = "http://127.0.0.1:8000/v1"
MODEL = "SmolLM2-135M-Instruct"
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "Which planet is called the red planet?": "Mars",
    "How many days has a week?": "seven",
    "What gas do plants take in?": "carbon dioxide",
}


async def ask(client: AsyncOpenAI, question: str) -> tuple[str, str]:
    """Return the answer to one question, and the server's fingerprint."""
    reply = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0.7,
        seed=7,
        max_completion_tokens=48,
    )
    return reply.choices[0].message.content or "", reply.system_fingerprint or ""


def report(name: str, replies: list[tuple[str, str]]) -> None:
    """Print the score, a hash of all answers, and the fingerprint."""
    right = sum(expected in answer for (answer, _), expected in zip(replies, QUESTIONS.values(), strict=True))
    digest = hashlib.sha256("\0".join(answer for answer, _ in replies).encode()).hexdigest()[:16]
    print(f"{name}: {right} of {len(replies)} right, answers {digest}, server {replies[0][1]}")


async def main() -> None:
    """Run the evaluation both ways."""
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        report("one at a time", [await ask(client, question) for question in QUESTIONS])
        report("all at once  ", await asyncio.gather(*(ask(client, question) for question in QUESTIONS)))


if __name__ == "__main__":
    asyncio.run(main())
