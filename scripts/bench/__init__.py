"""Parts of the scripts that compare tools: settings, commands, environments, workloads, probe, measuring, tables."""
