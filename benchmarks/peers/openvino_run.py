"""W1 to W3 in OpenVINO GenAI, in its own process and virtual environment: JSON on stdout.

    python benchmarks/peers/dump_workloads.py workloads.json
    python -m venv ov && ov/bin/pip install torch==2.13.0 openvino-genai optimum-intel nncf
    ov/bin/optimum-cli export openvino -m BF16_FOLDER --task text-generation-with-past --weight-format int8 ov_int8
    ov/bin/python benchmarks/peers/openvino_run.py ov_int8 workloads.json

BF16_FOLDER is what ``hugging_face_folder`` in engines.py makes. A folder that torchvision breaks: uninstall it.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    """Measure each workload of the file."""
    folder, path = sys.argv[1:3]
    with open(path) as file:
        work = json.load(file)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
    results = {}
    for name, repetitions in work.items():
        figures = []
        for items in repetitions:
            start = time.perf_counter()
            first = None
            handles = []
            for index, (prompt, output) in enumerate(items):
                config = genai.GenerationConfig()
                config.max_new_tokens = output
                config.min_new_tokens = output
                config.ignore_eos = True
                config.do_sample = False
                tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
                handles.append(pipeline.add_request(index, tensor, config))
            while pipeline.has_non_finished_requests():
                pipeline.step()
                if first is None and handles[0].can_read():
                    first = time.perf_counter() - start
            wall = time.perf_counter() - start
            produced = sum(len(handle.read_all()[0].generated_ids) for handle in handles)
            figures.append(
                {
                    "wall_s": wall,
                    "output_tokens": produced,
                    "output_tokens_per_s": produced / wall,
                    "ttft_p50_ms": 1e3 * (first or wall),
                }
            )
        results[name] = figures
    print(json.dumps(results))


if __name__ == "__main__":
    main()
