"""Laws that every model, task and operator must obey, as functions that `check` and the tests call."""
