# tests/collector.py makes each code cell of nbs/ a test; pyproject.toml puts tests/ on the path.
pytest_plugins = ["collector"]
