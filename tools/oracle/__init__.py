"""The real vLLM 0.22.0, as something to be compared with. Nothing here is part of walkvllm."""
