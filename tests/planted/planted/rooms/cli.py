"""The command line, reports, what is shown, errors and metrics."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "an-error-is-exit-code-0",
        "cli/__init__.py",
        "raise typer.Exit(2 if wrong else 1) from error",
        "raise typer.Exit(0) from error",
    ),
    Fault(
        "damage-that-verify-finds-is-exit-code-0",
        "cli/edits.py",
        "return Told(report, wrong=not report.ok)",
        "return report",
    ),
    Fault(
        "conflicts-of-a-dry-run-are-exit-code-0",
        "cli/edits.py",
        "return Told(report, wrong=bool(report.conflicts))",
        "return report",
    ),
    Fault(
        "a-place-of-no-use-is-exit-code-0",
        "cli/edits.py",
        'return Told(report, wrong=report.usable_for == "nothing")',
        "return report",
    ),
    Fault(
        "a-dry-run-of-a-collection-deletes",
        "cli/edits.py",
        "return repo.garbage_collect(wait, dry_run=dry_run)",
        "return repo.garbage_collect(wait)",
    ),
    Fault(
        "a-dry-run-of-a-cleaning-deletes",
        "cli/edits.py",
        "return repo.clean(kept, wait, dry_run=dry_run)",
        "return repo.clean(kept, wait)",
    ),
    Fault(
        "a-dry-run-of-setting-back-sets-back",
        "cli/edits.py",
        "return zm.recover(open_at(url, option), to, dry_run=dry_run)",
        "return zm.recover(open_at(url, option), to)",
    ),
    Fault(
        "a-dry-run-of-a-merge-merges",
        "cli/edits.py",
        '"message": message, "dry_run": dry_run}',
        '"message": message}',
    ),
    Fault(
        "a-moved-branch-drops-commits-unasked",
        "cli/edits.py",
        "repo.reset_branch(name, version, force=force, expected=expected)",
        "repo.reset_branch(name, version, force=True)",
    ),
    Fault(
        "values-of-options-are-in-errors",
        "cli/verbs.py",
        'raise InvalidArgumentError(f"{option} takes name=value, and each name once")',
        'raise InvalidArgumentError(f"{option} takes name=value, and each name once, not {one}")',
    ),
    Fault(
        "html-has-what-others-have-written-as-markup",
        "rendering.py",
        "return out.export_html(inline_styles=True, code_format=_HTML)",
        "return out.export_html(inline_styles=True, code_format=_HTML).replace('&lt;', '<')",
    ),
    Fault(
        "text-may-be-turned-around-and-invisible",
        "errors.py",
        'return char.isprintable() or unicodedata.category(char) == "Zs"',
        'return char.isprintable() or unicodedata.category(char) in ("Zs", "Cf")',
    ),
    Fault(
        "more-than-the-limit-is-read",
        "cli/looking.py",
        "    if count > limit:\n",
        "    if False:\n",
    ),
    Fault(
        "counts-of-what-is-gone-are-lost",
        "metrics.py",
        "return Metrics(**_TOTALS)",
        "return Metrics(**{n: sum(m._counts[n] for m in [*_METERS]) for n in _NAMES})",
    ),
]
