"""Stand-ins for the clients of W&B and MLflow, which keep rows, steps and tags as wandb 0.31 and mlflow 3.17 do."""

from types import SimpleNamespace


class WandbRun:
    """A run of W&B: a row a step; what comes for a step below the present one is dropped."""

    def __init__(self):
        self.step, self.rows, self.alerts, self.metrics, self._row = 0, [], [], {}, {}

    def define_metric(self, name, step_metric=None, hidden=False):
        self.metrics[name] = step_metric

    def log(self, values, step=None, commit=None):
        if step is not None and step < self.step:
            return
        if step is not None and step > self.step:
            self._flush()
            self.step = step
        self._row |= values
        if commit or (commit is None and step is None):
            self._flush()
            self.step += 1

    def alert(self, title, text):
        self.alerts.append((title, text))

    def finish(self):
        self._flush()
        return self.rows

    def _flush(self):
        self.rows += [self._row] if self._row else []
        self._row = {}


class Mlflow(SimpleNamespace):
    """The module, with an active run or without."""

    def __init__(self):
        super().__init__(points=[], tags={}, active_run=lambda: None)

    def start_run(self):
        self.active_run = SimpleNamespace

    def log_metrics(self, values, step):
        assert all(len(name) <= 250 for name in values)
        self.points.append((step, values))

    def set_tag(self, name, text):
        assert len(text) <= 5000
        self.tags[name] = text
