"""A life of saves, aliases and deletes, and what each of its moments must look like to a reader."""

from tiered_checkpoint_io.model import ids

RUN = "20260101T000000.000000-00000000"

#: Each kind of change of a name at least once: new, overwritten, used again after its delete, aliases that move, whose
#: target goes, that become real, and real ones that become aliases.
OPERATIONS = [
    ("save", "a.ckpt", ""),
    ("alias", "last.ckpt", "a.ckpt"),
    ("save", "b.ckpt", ""),
    ("alias", "last.ckpt", "b.ckpt"),
    ("delete", "a.ckpt", ""),
    ("save", "b.ckpt", ""),
    ("save", "deep/c.ckpt", ""),
    ("delete", "b.ckpt", ""),
    ("alias", "last.ckpt", "deep/c.ckpt"),
    ("save", "a.ckpt", ""),
    ("save", "last.ckpt", ""),
    ("alias", "last.ckpt", "a.ckpt"),
    ("delete", "deep/c.ckpt", ""),
]


def op_id(number):
    return ids.save_id(RUN, number)


def state(number):
    """Returns the training state that operation ``number`` saves."""
    import torch

    return {"w": torch.arange(20_000.0) + number, "global_step": number}


class Model:
    """A durable tier as a dictionary."""

    def __init__(self):
        self._own = {}
        self._aliases = {}

    def apply(self, number, action, name, target):
        if action == "save":
            self._own[name] = number
            self._aliases.pop(name, None)
        elif action == "alias":
            self._own.pop(name, None)
            self._drop_aliases_of(name)
            self._aliases[name] = target
        else:
            # Of what was never there, too: a trainer that removes does not look.
            self._own.pop(name, None)
            self._aliases.pop(name, None)
            self._drop_aliases_of(name)

    def _drop_aliases_of(self, name):
        self._aliases = {alias: of for alias, of in self._aliases.items() if of != name}

    def is_real(self, name):
        """Returns True if the name is that of a saved checkpoint, and not of an alias."""
        return name in self._own

    def view(self):
        """Returns names, and the number of the save that each shows."""
        return {**self._own, **{alias: self._own[of] for alias, of in self._aliases.items()}}

    def objects(self):
        return sorted(self._own)


def moments():
    """Returns the model before the first operation, and behind each."""
    model = Model()
    views = [(model.view(), model.objects())]
    for number, operation in enumerate(OPERATIONS, start=1):
        model.apply(number, *operation)
        views.append((model.view(), model.objects()))
    return views
