"""Lints and renders a chart with Helm's own library, a process for itself: it brings Go's runtime along. Prints JSON.
Usage: python render_chart.py CHART VALUES(JSON)"""

from __future__ import annotations

import json
import sys

import helm_python

chart, values = sys.argv[1], json.loads(sys.argv[2])
try:
    rendered = helm_python.Chart.load(chart).render(values, name="pool", namespace="models")
    print(json.dumps({"lint": helm_python.lint(chart, values, strict=True), "rendered": rendered}))
except helm_python.HelmError as error:
    print(json.dumps({"error": str(error)}))
