"""No module imports itself by way of others, not even late, inside a function."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_imports_go_in_no_circle():
    graph = grimp.build_graph(
        *("orchestrator", "policies", "adapters", "device_profiles"), exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")
