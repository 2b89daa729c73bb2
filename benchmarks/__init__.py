"""`python -m benchmarks MODEL...`: prefuse and its peers on the same model, inputs and threads, interleaved in one run."""
