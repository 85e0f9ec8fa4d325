"""What a test has to tell, beside whether it passed, is printed at the end of the run.

Property tests draw the same examples in every run, so that a run says something about the change it is made for;
`pytest --hypothesis-profile=default` draws new ones.
"""

import pytest
from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every property `told`, also of tests that ran in another process."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "told" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {value}")
