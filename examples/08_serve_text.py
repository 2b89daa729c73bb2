"""A server of texts: several clients, one set of weights, sessions in a pool. Lines of JSON over TCP, asyncio alone."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import prefuse
from transformers import GPT2Config, GPT2LMHeadModel


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pool: asyncio.Queue[prefuse.Session]) -> None:
    """Take {"tokens": [...], "n": ..., "stop": [...]}, send each token, then how it ended; who leaves ends the text."""
    loop, session = asyncio.get_running_loop(), None

    def send(line: dict[str, int] | dict[str, str]) -> None:
        writer.write(json.dumps(line).encode() + b"\n")

    def stream(tokens: np.ndarray) -> bool:  # in the thread that generates
        loop.call_soon_threadsafe(send, {"token": int(tokens[0])})
        return not writer.is_closing()

    try:
        asked = json.loads(await reader.readline())
        (session := await pool.get()).reset()  # waits while all are taken; who asks for nothing takes none
        made = await asyncio.to_thread(session.generate, asked["tokens"], asked["n"], stop=asked.get("stop"), stream=stream)
        send({"made": int(made.shape[1])})
    except (ValueError, KeyError, TypeError, AttributeError, prefuse.CompileError) as error:
        send({"error": str(error)})
    finally:
        if session is not None:
            pool.put_nowait(session)
        writer.close()


async def client(port: int, tokens: list[int], n: int) -> list[dict[str, object]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps({"tokens": tokens, "n": n}).encode() + b"\n")
    return [json.loads(line) async for line in reader]


async def main() -> None:
    """Serve four clients at once with two sessions; one of them asks for what cannot be."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=0)).eval()
    generator = prefuse.compile_generation(model, max_tokens=64, prefill=(16,), threads=1)
    pool = asyncio.Queue[prefuse.Session]()
    for _ in range(2):
        pool.put_nowait(generator.session())
    async with await asyncio.start_server(lambda reader, writer: answer(reader, writer, pool), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        texts = await asyncio.gather(*(client(port, prompt, 8) for prompt in ([5, 90], [9, 33, 2], [71], [96])))
    print(*(text[-1] for text in texts), sep="\n")
    assert [line["token"] for line in texts[0][:-1]] == generator.generate([5, 90], 8)[0].tolist()


if __name__ == "__main__":
    asyncio.run(main())
