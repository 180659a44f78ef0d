"""Real deployment on NVIDIA FLARE: kits, processes, jobs, supervision. See docs/deployment.md."""
