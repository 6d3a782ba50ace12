"""W1 to W3 as JSON for engines that run in another Python: name -> repetitions -> [prompt ids, output tokens].

The first repetition of each is the warm-up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pagemill.bench import workloads
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import load_tokenizer


def main() -> None:
    """Write the file named on the command line."""
    tokenizer = load_tokenizer(resolve_source("smollm2-135m-instruct"))
    repetitions = (workloads.REPETITIONS - 1, 0, 1)
    work = {
        name: [
            [
                (item.prompt, item.output_tokens)
                for item in workloads.build(
                    name, lambda text: tokenizer.encode(text, add_special_tokens=False), one
                ).items
            ]
            for one in repetitions
        ]
        for name in ("w1", "w2", "w3")
    }
    Path(sys.argv[1]).write_text(json.dumps(work))


if __name__ == "__main__":
    main()
