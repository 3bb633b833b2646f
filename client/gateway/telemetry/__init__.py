"""What a gateway tells its operator: metrics, a line in the log for each request, spans. None of it holds anything of
prompts or answers. Begin at `request_traces.py`."""
