"""Runs a decoder over pages without an engine: one or more sequences, in chunks, over shuffled blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagemill.kernels.ops import StepInputs
from pagemill.kernels.reference import KVLayer, ReferenceOps
from pagemill.models.decoder import Decoder

__all__ = ["PagedRun", "greedy", "logits_of"]


class PagedRun:
    """KV pages of a few sequences, with block tables that no order can be read from."""

    def __init__(
        self, decoder: Decoder, *, block_size: int = 4, max_len: int = 128, rows: int = 1, seed: int = 0
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        per_row = -(-max_len // block_size)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        self.tables = order.view(rows, per_row)
        self.groups = 1 + max(spec.group for spec in decoder.attention_specs)
        cpu = torch.device("cpu")
        self.caches = [
            KVLayer(rows * per_row, block_size, spec.num_kv_heads, spec.head_dim, torch.float32, cpu)
            for spec in decoder.attention_specs
        ]
        for cache in self.caches:
            for tensor in cache.tensors:
                tensor.fill_(float("nan"))
        self.lengths = [0] * rows

    def step(self, new: dict[int, Sequence[int]]) -> torch.Tensor:
        """Append tokens to some rows; float32 logits of all of them [N, V]."""
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for row, ids in new.items():
            place = range(self.lengths[row], self.lengths[row] + len(ids))
            tokens += list(ids)
            positions += list(place)
            slots += [
                int(self.tables[row, p // self.block_size]) * self.block_size + p % self.block_size for p in place
            ]
            self.lengths[row] += len(ids)
            starts.append(len(tokens))
            lengths.append(self.lengths[row])

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        inputs = StepInputs(
            token_ids=ints(tokens),
            positions=ints(positions),
            query_start=ints(starts),
            context_lens=ints(lengths),
            slot_mapping=[ints(slots)] * self.groups,
            block_tables=[self.tables[list(new)]] * self.groups,
            logits_rows=ints(range(len(tokens))),
        )
        with torch.inference_mode():
            return self.decoder.forward(ReferenceOps(inputs, self.caches))


def logits_of(decoder: Decoder, ids: Sequence[int], chunk: int | None = None, **options: int) -> torch.Tensor:
    """Logits of every position of one sequence, computed ``chunk`` tokens at a time: [len(ids), V]."""
    run = PagedRun(decoder, **options)
    size = chunk or len(ids)
    return torch.cat([run.step({0: ids[at : at + size]}) for at in range(0, len(ids), size)])


def greedy(decoder: Decoder, ids: Sequence[int], count: int, **options: int) -> list[int]:
    """The ``count`` most likely tokens, one after another."""
    run, new = PagedRun(decoder, **options), list(ids)
    out: list[int] = []
    for _ in range(count):
        new = [int(run.step({0: new})[-1].argmax())]
        out += new
    return out
