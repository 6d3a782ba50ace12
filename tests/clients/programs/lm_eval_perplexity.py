"""lm-evaluation-harness: perplexity of the documents in a JSON file, through its local-completions model.

    python lm_eval_perplexity.py DOCUMENTS MAX_LENGTH

The last line of standard output is the word perplexity.
"""

import os
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: pages
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - metric: word_perplexity
"""


def main() -> None:
    documents, max_length = sys.argv[1:]
    model = {
        "model": os.environ["PAGEMILL_MODEL"],
        "base_url": os.environ["OPENAI_BASE_URL"] + "/completions",
        "tokenizer_backend": "remote",
        "max_length": int(max_length),
        "num_concurrent": 4,
        "timeout": 600,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder
        Path(folder, "pages.yaml").write_text(TASK.format(documents=documents))
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = lm_eval.simple_evaluate(
            "local-completions", model_args=model, tasks=["pages"], task_manager=manager, bootstrap_iters=0
        )
    print(repr(float(found["results"]["pages"]["word_perplexity,none"])))


main()
