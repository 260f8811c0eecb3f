# tests/collector.py makes each code cell of nbs/ a test, tests/replayed.py replays what they record;
# pyproject.toml puts tests/ on the path.
pytest_plugins = ["collector", "replayed"]
