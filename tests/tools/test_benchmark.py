"""benchmark of a batch, started for real: mlx-lm's batch_generate on pruned caches."""

import re


def test_a_batch_of_a_pruned_model(run, side, models):
    # More tokens than the budget, in several chunks, so that rows are pruned as they are read.
    flags = ["-b", 3, "-p", 21, "-g", 5, "-n", 2, "--prefill-step-size", 6]
    printed = run(side, "benchmark", "--model", models("selective"), *flags)
    assert "prompt_tokens=21, generation_tokens=5, batch_size=3" in printed
    assert printed.count("Trial ") == 2
    figures = re.search(r"Averages: prompt_tps=(\S+), generation_tps=(\S+),", printed)
    assert all(float(figure) > 0 for figure in figures.groups())
