"""Parts of `scripts/bench_cpu.py`: environments, workload, commands of each tool, probe, measuring and tables."""
