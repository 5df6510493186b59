"""What the studies of the package found, as blocks of a page: from records in results/studies.

After 'perfed study NAME', copy its records into results/studies/NAME/records. In a page,
``<!-- begin: study-NAME -->`` is then all of its tables.
"""

from __future__ import annotations

from functools import partial

from committed import RESULTS, machine

from perfed.config import STUDIES, preset_names, read_mapping
from perfed.core import layout
from perfed.runs.design import Conduct, design
from perfed.runs.study import machines
from perfed.runs.study_tables import Outcome


def tables(name: str) -> str:
    conduct = Conduct(design(read_mapping(name, STUDIES)), RESULTS / "studies" / name)
    outcome = Outcome(conduct.design, conduct.everything())
    shown = layout.markdown(outcome.tables().values())
    return "\n\n".join([shown, *map(machine, machines(outcome.records()))])


BLOCKS = {f"study-{name}": partial(tables, name) for name in preset_names(STUDIES)}
