"""Workers elsewhere that are this process."""


def shards_here(monkeypatch, fanout, portions) -> tuple[list, list]:
    """Shards are done here, in `portions(items)`. Returns what workers were asked for, and (shards, desc, progress) of each run."""
    asked, runs = [], []

    class Workers:
        def __init__(self, on, jobs, **named):
            self.on = on
            asked.append((on, jobs, named))

        def portions(self, items, **named):
            asked.append((items, named))
            return portions(items)

    def run_on(workers, shards, desc, progress=True):
        assert isinstance(workers, Workers)
        runs.append((list(shards), desc, progress))
        return [shard.call(*shard.arguments) for shard in runs[-1][0]]

    monkeypatch.setattr(fanout, "Workers", Workers)
    monkeypatch.setattr(fanout, "run_on", run_on)
    return asked, runs
