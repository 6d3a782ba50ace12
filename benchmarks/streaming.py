"""W1 streamed over HTTP against W1 offline: what the server and its streams cost when many users read along.

    python benchmarks/streaming.py [--options "--quantization int8"] [--repetitions 3] [--out FILE]

One engine in this process and one behind ``pagemill serve``, in turn, repetition by repetition; the one that is not
measured sleeps. The client reads raw bytes from 64 sockets and looks into them only afterwards: on a small machine a
client that parses every event takes as much of the processor as the server does, and would be measured with it.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from peers import engines

from pagemill import LLM
from pagemill.bench import offline, report, workloads


def request(port: int, item: workloads.Item, stream: bool) -> bytes:
    """One completion as HTTP/1.1, to be answered until the connection closes."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = json.dumps(
        {"model": "m", "prompt": item.prompt, "max_tokens": item.output_tokens, "temperature": 0, "ignore_eos": True}
        | options
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def over_http(port: int, workload: workloads.Workload, stream: bool) -> dict[str, Any]:
    """All requests at once, each on its own connection, until the last has closed."""
    me = psutil.Process()
    requests = [request(port, item, stream) for item in workload.items]
    answers = [bytearray() for _ in requests]
    cpu_before, start = sum(me.cpu_times()[:2]), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for data, answer in zip(requests, answers, strict=True):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(data)
            selector.register(connection, selectors.EVENT_READ, answer)
        reads = 0
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                piece = key.fileobj.recv(1 << 16)
                reads += 1
                if piece:
                    key.data.extend(piece)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    wall_s = time.perf_counter() - start
    client_cpu_s = sum(me.cpu_times()[:2]) - cpu_before
    produced = 0
    for item, answer in zip(workload.items, answers, strict=True):
        assert answer.startswith(b"HTTP/1.1 200"), bytes(answer[:300])
        at = answer.rindex(b'"completion_tokens":') + len(b'"completion_tokens":')
        tokens = int(answer[at : at + 8].split(b",")[0].split(b"}")[0])
        assert tokens == item.output_tokens, (tokens, item.output_tokens)
        produced += tokens
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": produced / wall_s,
        "client_cpu_s": client_cpu_s,
        "reads": reads,
        "events": sum(answer.count(b"data: {") for answer in answers),
    }


def main() -> int:
    """Measure in turn, write, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", default="--quantization int8", help="of pagemill serve and of the offline engine")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    words = args.options.split()
    llm = LLM(**{name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)})  # type: ignore[arg-type]
    offline.warm_up(llm)
    port = engines.free_port()
    ones: dict[str, list[dict[str, Any]]] = {"offline": [], "streamed": [], "not streamed": []}
    with engines.running(engines.pagemill(port, *words), port) as (process, _):
        server = psutil.Process(process.pid)
        engine = server.children(recursive=True)
        over_http(port, workloads.build("w1", llm.tokenizer.encode, workloads.REPETITIONS - 1), True)
        for repetition in range(args.repetitions):
            work = workloads.build("w1", llm.tokenizer.encode, repetition)
            ones["offline"].append(offline.throughput(llm, work))
            for name in ("streamed", "not streamed"):  # texts of its own: the prefix cache must not answer
                before = [sum(p.cpu_times()[:2]) for p in (server, *engine)]
                other = workloads.build("w1", llm.tokenizer.encode, (repetition + 3 * (name != "streamed")) % 9)
                figures = over_http(port, other, name == "streamed")
                after = [sum(p.cpu_times()[:2]) for p in (server, *engine)]
                figures["server_cpu_s"], figures["engine_cpu_s"] = (
                    after[0] - before[0],
                    sum(after[1:]) - sum(before[1:]),
                )
                ones[name].append(figures)
            print(
                repetition, {n: round(f[-1]["output_tokens_per_s"]) for n, f in ones.items()},
                {n: round(f[-1].get("server_cpu_s", 0), 2) for n, f in ones.items()}, file=sys.stderr, flush=True,
            )  # fmt: skip
    results = {name: {"median": report.medians(figures), "repetitions": figures} for name, figures in ones.items()}
    report.write(args.out, "streaming", {"options": args.options, "repetitions": args.repetitions}, results)
    base = results["offline"]["median"]["output_tokens_per_s"]
    for name, result in results.items():
        speed = result["median"]["output_tokens_per_s"]
        print(f"{name}: {speed:.0f} tokens/s, {speed / base:.1%} of offline")
    return 0


if __name__ == "__main__":
    sys.exit(main())
